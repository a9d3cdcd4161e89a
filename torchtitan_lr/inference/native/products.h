// Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
//
// Products of a few rows with packed weights.

#pragma once

#include "common.h"

namespace {

template <typename T> T silu(T x) { return x / (T(1) + exponential(-x)); }

template <typename T>
inline __attribute__((always_inline)) void finish(T* y, const T* sums, int64_t count,
                                                  int64_t ending) {
    switch (ending) {
        case STORE: for (int64_t i = 0; i < count; ++i) y[i] = sums[i]; break;
        case SILU: for (int64_t i = 0; i < count; ++i) y[i] = silu(sums[i]); break;
        case ADD: for (int64_t i = 0; i < count; ++i) y[i] += sums[i]; break;
        default: for (int64_t i = 0; i < count; ++i) y[i] *= sums[i];
    }
}

// R rows times one panel of two vectors.
template <typename T, int R>
void tile(const T* x, int64_t x_stride, const T* w, int64_t k_size, T* y, int64_t y_stride,
          int64_t count, int64_t ending, const T* next, int shift) {
    using V = typename Vec<T>::type;
    constexpr int W = Vec<T>::W, NB = 2 * W, U = R == 1 ? 4 : 1;
    V sums[U][R][2] = {};
    int64_t k = 0;
    for (; k + U <= k_size; k += U) {
        // The next panel comes from memory while this one is multiplied.
        if (R == 8) __builtin_prefetch(next + (2 * k >> shift) * W);
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
    for (int r = 0; r < R; ++r) {
        T out[NB];
        for (int h = 0; h < 2; ++h) {
            V sum = sums[0][r][h];
            for (int u = 1; u < U; ++u) sum += sums[u][r][h];
            *(V*)(out + h * W) = sum;
        }
        if (count == NB) finish(y + r * y_stride, out, NB, ending);
        else finish(y + r * y_stride, out, count, ending);
    }
}

// y (b, N) from x (b, K) and packed W; p: x, w, y; n: x stride, K, y stride, N, ending, and the
// number of outputs after which the next K numbers of x follow (0: all outputs have the same input).
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
        T* out = y + panel * NB;
        const T* x = op.n[5] ? input + panel * NB / op.n[5] * k : input;
        const int64_t count = std::min<int64_t>(NB, size - panel * NB);
        int64_t row = 0;
        for (; row + 8 <= c.batch; row += 8) {
            const T* next = w + k * NB + ((row / 8) * 2 * k >> shift) * (NB / 2);
            tile<T, 8>(x + row * xs, xs, w, k, out + row * ys, ys, count, ending, next, shift);
        }
        for (; row + 3 <= c.batch; row += 3)
            tile<T, 3>(x + row * xs, xs, w, k, out + row * ys, ys, count, ending, nullptr, 0);
        for (; row < c.batch; ++row)
            tile<T, 1>(x + row * xs, xs, w, k, out + row * ys, ys, count, ending, nullptr, 0);
    }
}

}  // namespace
