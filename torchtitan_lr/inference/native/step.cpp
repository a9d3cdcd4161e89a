// Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
//
// One decoding step of a LLaMA on a CPU: a list of operations that all threads walk through
// together. `program.py` writes the list; the structures below are its ctypes structures.
//
// Weights are packed into panels of NB output channels, [ceil(N / NB)][K][NB] with zeros at the end,
// so that a product reads memory in order for any number of rows, without sums across a vector.
// Integers are packed likewise, four input channels side by side: [ceil(V / 16)][K / 4][16][4].

#include "attention.h"
#include "common.h"
#include "fetch.h"
#include "products.h"
#include "screen.h"

#include <omp.h>

namespace {

// p: tokens, table, x; n: width.
template <typename T> void embed(const Op& op, const Context& c) {
    const int64_t* tokens = (const int64_t*)op.p[0];
    const int64_t width = op.n[0];
    int64_t begin, end;
    share(c, op.turn, c.batch, begin, end);
    for (int64_t b = begin; b < end; ++b)
        std::memcpy((T*)op.p[2] + b * width, (const T*)op.p[1] + tokens[b] * width,
                    width * sizeof(T));
}

// RMSNorm; p: x, weight, y; n: width; f: eps.
template <typename T> void norm(const Op& op, const Context& c) {
    const int64_t width = op.n[0];
    const T* weight = (const T*)op.p[1];
    int64_t begin, end;
    share(c, op.turn, c.batch, begin, end);
    for (int64_t b = begin; b < end; ++b) {
        const T* x = (const T*)op.p[0] + b * width;
        T* y = (T*)op.p[2] + b * width;
        T sum = 0;
        for (int64_t i = 0; i < width; ++i) sum += x[i] * x[i];
        const T factor = T(1) / std::sqrt(sum / T(width) + T(op.f[0]));
        for (int64_t i = 0; i < width; ++i) y[i] = x[i] * factor * weight[i];
    }
}

// y = σ(h + g · previous); p: h, previous or null, y; n: width, whether σ; f: g.
template <typename T> void mix(const Op& op, const Context& c) {
    const T *h = (const T*)op.p[0], *previous = (const T*)op.p[1];
    T* y = (T*)op.p[2];
    const T gate = T(op.f[0]);
    int64_t begin, end;
    share(c, op.turn, c.batch * op.n[0], begin, end);
    for (int64_t i = begin; i < end; ++i) {
        const T value = previous ? h[i] + gate * previous[i] : h[i];
        y[i] = op.n[1] ? silu(value) : value;
    }
}

// p: logits (b, V), tokens; n: V.
template <typename T> void argmax(const Op& op, const Context& c) {
    int64_t begin, end;
    share(c, op.turn, c.batch, begin, end);
    for (int64_t b = begin; b < end; ++b) {
        const T* row = (const T*)op.p[0] + b * op.n[0];
        T most = row[0];
        for (int64_t i = 0; i < op.n[0]; ++i) most = std::max(most, row[i]);
        ((int64_t*)op.p[1])[b] = std::find(row, row + op.n[0], most) - row;
    }
}

template <typename T> void run(const Op* ops, int64_t count, int64_t batch, int64_t column,
                               int threads) {
#pragma omp parallel num_threads(threads)
    {
        const Context c{batch, column, omp_get_thread_num(), omp_get_num_threads(), {}};
        c.restart();
        for (int64_t i = 0; i < count; ++i) {
            const Op& op = ops[i];
            switch (op.kind) {
                case EMBED: embed<T>(op, c); break;
                case NORM: norm<T>(op, c); break;
                case LINEAR: linear<T>(op, c); break;
                case MIX: mix<T>(op, c); break;
                case ATTEND: attend<T, false>(op, c); break;
                case ATTEND_LATENT: attend<T, true>(op, c); break;
                case QUANTIZE: quantize<T>(op, c); break;
                case SCREEN: screen(op, c); break;
                case PICK: pick<T>(op, c); break;
                default: argmax<T>(op, c);
            }
            if (op.wait) {
#pragma omp barrier
            }
        }
    }
}

}  // namespace

extern "C" void run_float(const Op* ops, int64_t count, int64_t batch, int64_t column,
                          int threads) {
    run<float>(ops, count, batch, column, threads);
}

extern "C" void run_double(const Op* ops, int64_t count, int64_t batch, int64_t column,
                           int threads) {
    run<double>(ops, count, batch, column, threads);
}
