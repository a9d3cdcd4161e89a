// Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
//
// Products of a few rows with packed weights.

#pragma once

#include "common.h"
#include "fetch.h"

namespace {

template <typename T> T silu(T x) { return x / (1 + exponential(-x)); }

// Ends R rows of a tile; of the last panel only `count` channels exist.
template <typename T, int R>
inline __attribute__((always_inline)) void finish(const vec<T> (&sums)[R][2], T* y,
                                                  int64_t y_stride, int64_t count,
                                                  int64_t ending) {
    constexpr int W = Vec<T>::W, NB = 2 * W;
    const auto each = [&](auto end) {
        for (int r = 0; r < R; ++r) {
            T part[NB] = {}, *row = y + r * y_stride, *to = count == NB ? row : part;
            if (to == part) std::memcpy(part, row, count * sizeof(T));
            for (int h = 0; h < 2; ++h) {
                vec<T>& out = *(vec<T>*)(to + h * W);
                out = end(out, sums[r][h]);
            }
            if (to == part) std::memcpy(row, part, count * sizeof(T));
        }
    };
    typedef vec<T> V;
    switch (ending) {
        case STORE: each([](V, V sum) { return sum; }); break;
        case SILU: each([](V, V sum) { return silu(sum); }); break;
        case ADD: each([](V y, V sum) { return y + sum; }); break;
        default: each([](V y, V sum) { return y * sum; });
    }
}

// R rows times one panel of two vectors.
template <typename T, int R>
void tile(const T* x, int64_t x_stride, const T* w, int64_t k_size, T* y, int64_t y_stride,
          int64_t count, int64_t ending, const T* next, int shift, const Fetch<T>& fetch) {
    using V = typename Vec<T>::type;
    constexpr int W = Vec<T>::W, NB = 2 * W, U = R == 1 ? 4 : 1;
    V sums[U][R][2] = {};
    // Another thread may have changed the outputs last: they come while the sums are computed.
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) __builtin_prefetch(y + r * y_stride + h * W, 1);
    int64_t k = 0;
    for (; k + U <= k_size; k += U) {
        // The next panel comes from memory while this one is multiplied.
        if (R == 8) __builtin_prefetch(next + (2 * k >> shift) * W, 0, 2), fetch.at(k);
        for (int u = 0; u < U; ++u) {
            const V a = *(const V*)(w + (k + u) * NB), b = *(const V*)(w + (k + u) * NB + W);
            for (int r = 0; r < R; ++r) {
                const T s = x[r * x_stride + k + u];
                sums[u][r][0] += a * s;
                sums[u][r][1] += b * s;
            }
        }
    }
    for (; k < k_size; ++k) {
        const V a = *(const V*)(w + k * NB), b = *(const V*)(w + k * NB + W);
        for (int r = 0; r < R; ++r) {
            const T s = x[r * x_stride + k];
            sums[0][r][0] += a * s;
            sums[0][r][1] += b * s;
        }
    }
    for (int u = 1; u < U; ++u)
        for (int r = 0; r < R; ++r)
            for (int h = 0; h < 2; ++h) sums[0][r][h] += sums[u][r][h];
    finish<T, R>(sums[0], y, y_stride, count, ending);
}

// Where this thread begins in the weight of a product.
template <typename T> const T* first_panel(const Op& op, const Context& c) {
    constexpr int NB = 2 * Vec<T>::W;
    int64_t begin, end;
    share(c, op.turn, (op.n[3] + NB - 1) / NB, begin, end);
    return (const T*)op.p[1] + begin * op.n[1] * NB;
}

// y (b, N) from x (b, K) and packed W; p: x, w, y; n: x stride, K, y stride, N, ending, and the
// number of outputs after which the next K numbers of x follow (0: all have the same input),
// and how many operations further the next product and the next attention are, in this step or,
// before this operation, in the next step (0: that attention's cache is not fetched), and the
// vectors of it per 2^16 input channels of a tile.
template <typename T> void linear(const Op& op, const Context& c) {
    constexpr int NB = 2 * Vec<T>::W;
    const T *input = (const T*)op.p[0], *weight = (const T*)op.p[1];
    T* y = (T*)op.p[2];
    const int64_t xs = op.n[0], k = op.n[1], ys = op.n[2], size = op.n[3], ending = op.n[4];
    int64_t begin, end;
    share(c, op.turn, (size + NB - 1) / NB, begin, end);
    // Each tile of eight rows fetches its part of the next panel; there are 2^shift or more tiles.
    int shift = 0;
    while ((16 << shift) <= c.batch) ++shift;
    for (int64_t panel = begin; panel < end; ++panel) {
        const T* w = weight + panel * k * NB;
        const T* after = panel + 1 < end ? w + k * NB : first_panel<T>((&op)[op.n[6]], c);
        T* out = y + panel * NB;
        const T* x = op.n[5] ? input + panel * NB / op.n[5] * k : input;
        const int64_t count = std::min<int64_t>(NB, size - panel * NB);
        const Fetch<T> none{x, 0};
        int64_t row = 0;
        for (; row + 8 <= c.batch; row += 8) {
            const T* next = after + ((row / 8) * 2 * k >> shift) * (NB / 2);
            tile<T, 8>(x + row * xs, xs, w, k, out + row * ys, ys, count, ending, next, shift,
                       op.n[7] ? take((&op)[op.n[7]], c, x, k, op.n[8]) : none);
        }
        for (; row + 3 <= c.batch; row += 3)
            tile<T, 3>(x + row * xs, xs, w, k, out + row * ys, ys, count, ending, w, 0, none);
        for (; row < c.batch; ++row)
            tile<T, 1>(x + row * xs, xs, w, k, out + row * ys, ys, count, ending, w, 0, none);
    }
}

}  // namespace
