// Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
//
// Attention of one token per row over a cache.

#pragma once

#include "common.h"

#include <type_traits>

namespace {

// Rotates the pairs of one head.
template <typename T> void rotate(const T* x, const T* table, T* y, int64_t width) {
    for (int64_t i = 0; i < width; i += 2) {
        const T cos = table[i], sin = table[i + 1], even = x[i], odd = x[i + 1];
        y[i] = even * cos - odd * sin;
        y[i + 1] = even * sin + odd * cos;
    }
}

// Rows that are read soon: `width` numbers of each, `stride` apart.
template <typename T> struct Ahead {
    const T* rows;
    int64_t stride, width;

    void fetch(int64_t t) const {
        for (int64_t i = 0; i < width; i += Vec<T>::W) __builtin_prefetch(rows + t * stride + i, 0, 2);
    }
};

// Softmax of q times the keys of the columns from `first` to the present one.
template <typename T>
void weigh(const T* q, const T* keys, int64_t width, int64_t first, int64_t last, T* scores,
           const Ahead<T>& keys_ahead, const Ahead<T>& values_ahead) {
    constexpr int W = Vec<T>::W;
    const T scale = T(1) / std::sqrt(T(width));
    T total = 0;
    for (int64_t t = first; t <= last; t += W) {
        const int64_t count = std::min<int64_t>(W, last + 1 - t);
        vec<T> sums[W] = {};
        for (int64_t j = 0; j < count; ++j) {
            const T* key = keys + (t + j) * width;
            keys_ahead.fetch(t + j);
            values_ahead.fetch(t + j);
            int64_t i = 0;
            for (; i + W <= width; i += W) sums[j] += *(const vec<T>*)(q + i) * *(const vec<T>*)(key + i);
            for (; i < width; ++i) sums[j][0] += q[i] * key[i];
        }
        T found[W];
        *(vec<T>*)found = scale * reduce<T>(sums, [](vec<T> a, vec<T> b) { return a + b; });
        for (int64_t j = 0; j < count; ++j) scores[t + j] = found[j];
    }
    T most = scores[first];
    for (int64_t t = first; t <= last; ++t) most = std::max(most, scores[t]);
    for (int64_t t = first; t <= last; ++t) {
        scores[t] = exponential(scores[t] - most);
        total += scores[t];
    }
    for (int64_t t = first; t <= last; ++t) scores[t] /= total;
}

// out (H, C vectors) = scores (H, t) · values (t, C vectors), for H heads at once.
template <typename T, int H, int C>
void blend_part(const T* scores, int64_t stride, const T* values, int64_t width, int64_t first,
                int64_t last, T* out, int64_t out_stride) {
    constexpr int W = Vec<T>::W;
    vec<T> sums[H][C] = {};
    for (int64_t t = first; t <= last; ++t) {
        vec<T> value[C];
        for (int i = 0; i < C; ++i) value[i] = *(const vec<T>*)(values + t * width + i * W);
        for (int h = 0; h < H; ++h) {
            const T s = scores[h * stride + t];
            for (int i = 0; i < C; ++i) sums[h][i] += value[i] * s;
        }
    }
    for (int h = 0; h < H; ++h)
        for (int i = 0; i < C; ++i) *(vec<T>*)(out + h * out_stride + i * W) = sums[h][i];
}

// The same for all columns.
template <typename T, int H>
void blend(const T* scores, int64_t stride, const T* values, int64_t width, int64_t first,
           int64_t last, T* out, int64_t out_stride) {
    constexpr int W = Vec<T>::W, C = H > 4 ? 2 : 4;
    int64_t i = 0;
    for (; i + C * W <= width; i += C * W)
        blend_part<T, H, C>(scores, stride, values + i, width, first, last, out + i, out_stride);
    for (; i + W <= width; i += W)
        blend_part<T, H, 1>(scores, stride, values + i, width, first, last, out + i, out_stride);
    for (; i < width; ++i)
        for (int h = 0; h < H; ++h) {
            T sum = 0;
            for (int64_t t = first; t <= last; ++t)
                sum += scores[h * stride + t] * values[t * width + i];
            out[h * out_stride + i] = sum;
        }
}

// Attention of one token per row. p: q, k, v or latent, keys, values or latents, out, rotations,
// padding of each row, scores (threads, heads, capacity); n: heads, key heads, head width,
// capacity, latent width. Keys (b, h_kv, capacity, width), latents (b, 1, capacity, r); out
// (b, h, width), for latents (b, h, r).
template <typename T, bool LATENT> void attend(const Op& op, const Context& c) {
    const int64_t heads = op.n[0], groups = op.n[1], width = op.n[2], capacity = op.n[3];
    const int64_t rank = op.n[4], per = heads / groups, last = c.column;
    T *q = (T*)op.p[0], *k = (T*)op.p[1], *v = (T*)op.p[2];
    T* scores = (T*)op.p[8] + c.thread * heads * capacity;
    const int64_t* padding = (const int64_t*)op.p[7];
    // One item is a head of the keys, and with latents, which all heads share, a part of them.
    const int64_t parts = LATENT ? (c.batch >= c.threads ? 1 : groups) : groups;
    int64_t begin, end;
    share(c, op.turn, c.batch * parts, begin, end);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t b = item / parts, part = item % parts, first = padding[b];
        const T* table = (const T*)op.p[6] + (last - first) * width;
        const int64_t from = groups * part / parts, to = groups * (part + 1) / parts;
        for (int64_t g = from; g < to; ++g) {
            T* keys = (T*)op.p[3] + (b * groups + g) * capacity * width;
            rotate(k + (b * groups + g) * width, table, keys + last * width, width);
            // The caches of a batch do not fit the processor's: what comes next is fetched here.
            T* values = (T*)op.p[4] + (LATENT ? b : b * groups + g) * capacity * rank;
            const int64_t slice = LATENT ? rank * (g - from) / (to - from) : 0;
            const int64_t end = LATENT ? rank * (g - from + 1) / (to - from) : rank;
            for (int64_t h = 0; h < per; ++h) {
                const Ahead<T> next{keys + capacity * width, width, h ? 0 : width};
                const Ahead<T> read{values + slice, rank, h ? 0 : end - slice};
                T* query = q + (b * heads + g * per + h) * width;
                rotate(query, table, query, width);
                weigh(query, keys, width, first, last, scores + (g * per + h) * capacity,
                      next, read);
            }
            if (LATENT) continue;
            std::memcpy(values + last * width, v + (b * groups + g) * width, width * sizeof(T));
            T* out = (T*)op.p[5] + (b * heads + g * per) * width;
            const T* s = scores + g * per * capacity;
            int64_t h = 0;
            for (; h + 4 <= per; h += 4)
                blend<T, 4>(s + h * capacity, capacity, values, width, first, last,
                            out + h * width, width);
            for (; h < per; ++h)
                blend<T, 1>(s + h * capacity, capacity, values, width, first, last,
                            out + h * width, width);
        }
        if (!LATENT) continue;
        T* latents = (T*)op.p[4] + b * capacity * rank;
        // All parts of a row write the same numbers.
        std::memcpy(latents + last * rank, v + b * rank, rank * sizeof(T));
        const T* weights = scores;
        T* out = (T*)op.p[5] + b * heads * rank;
        int64_t h = from * per;
        const auto mixed = [&](auto width_of) {
            constexpr int H = decltype(width_of)::value;
            for (; h + H <= to * per; h += H)
                blend<T, H>(weights + h * capacity, capacity, latents, rank, first, last,
                            out + h * rank, rank);
        };
        // All heads read the same latents, so that many of them share one pass.
        mixed(std::integral_constant<int, 12>());
        mixed(std::integral_constant<int, 8>());
        mixed(std::integral_constant<int, 4>());
        mixed(std::integral_constant<int, 1>());
    }
}

}  // namespace
