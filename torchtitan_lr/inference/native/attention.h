// Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
//
// Attention of one token per row over a cache.

#pragma once

#include "common.h"

#include <type_traits>
#include <vector>

namespace {

// The rotation of one position, for whole vectors: (cos, cos) and (-sin, sin) per pair.
template <typename T> void spread(const T* table, int64_t width, T* cosines, T* sines) {
    for (int64_t i = 0; i < width; i += 2) {
        cosines[i] = cosines[i + 1] = table[i];
        sines[i] = -table[i + 1];
        sines[i + 1] = table[i + 1];
    }
}

// Rotates the pairs of one head.
template <typename T>
void rotate(const T* x, const T* cosines, const T* sines, T* y, int64_t width) {
    constexpr int W = Vec<T>::W;
    typedef vec<T> V;
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        const V value = *(const V*)(x + i);
        *(V*)(y + i) = value * *(const V*)(cosines + i) + swapped(value) * *(const V*)(sines + i);
    }
    for (; i < width; i += 2) {
        const T even = x[i], odd = x[i + 1];
        y[i] = even * cosines[i] + odd * sines[i];
        y[i + 1] = odd * cosines[i + 1] + even * sines[i + 1];
    }
}

// q times W keys, of which the first `count` exist; fetches the keys that lie `ahead` of these.
template <typename T>
vec<T> match(const T* q, const T* keys, int64_t width, int64_t count, int64_t ahead) {
    constexpr int W = Vec<T>::W;
    typedef vec<T> V;
    V sums[W];
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
        const T* key = keys + std::min<int64_t>(j, count - 1) * width;
        V sum = {};
        int64_t i = 0;
        for (; i + 4 * W <= width; i += 4 * W)
#pragma GCC unroll 4
            for (int u = 0; u < 4 * W; u += W) {
                __builtin_prefetch(key + i + u + ahead, 0, 2);
                sum += *(const V*)(q + i + u) * *(const V*)(key + i + u);
            }
        for (; i + W <= width; i += W) sum += *(const V*)(q + i) * *(const V*)(key + i);
        for (; i < width; ++i) sum[0] += q[i] * key[i];
        sums[j] = sum;
    }
    return reduce<T>(sums, [](V a, V b) { return a + b; });
}

// Softmax of q times the keys of the columns from `first` to the present one. W numbers follow the
// scores, so that all of them are whole vectors.
template <typename T>
void weigh(const T* q, const T* keys, int64_t width, int64_t first, int64_t last, T* scores,
           int64_t ahead) {
    constexpr int W = Vec<T>::W;
    typedef vec<T> V;
    const T scale = T(1) / std::sqrt(T(width));
    V most = V{} - T(1e30), total = {};
    for (int64_t t = first; t <= last; t += W) {
        const int64_t count = std::min<int64_t>(W, last + 1 - t);
        const V found = scale * match(q, keys + t * width, width, count, ahead);
        most = found > most ? found : most;
        *(V*)(scores + t) = found;
        for (int64_t j = count; j < W; ++j) scores[t + j] = T(-1e30);
    }
    T highest = most[0];
    for (int i = 1; i < W; ++i) highest = std::max(highest, most[i]);
    for (int64_t t = first; t <= last; t += W) {
        const V weight = exponential(*(const V*)(scores + t) - highest);
        *(V*)(scores + t) = weight;
        total += weight;
    }
    T sum = 0;
    for (int i = 0; i < W; ++i) sum += total[i];
    for (int64_t t = first; t <= last; t += W) *(V*)(scores + t) *= 1 / sum;
}

// out (H, C vectors) = scores (H, t) · values (t, C vectors), for H heads at once; fetches the
// values that lie `ahead` of these, if it is not 0.
template <typename T, int H, int C>
void blend_part(const T* scores, int64_t stride, const T* values, int64_t width, int64_t first,
                int64_t last, T* out, int64_t out_stride, int64_t ahead) {
    constexpr int W = Vec<T>::W;
    vec<T> sums[H][C] = {};
    for (int64_t t = first; t <= last; ++t) {
        vec<T> value[C];
        for (int i = 0; i < C; ++i) value[i] = *(const vec<T>*)(values + t * width + i * W);
        if (ahead)
            for (int i = 0; i < C; ++i)
                __builtin_prefetch(values + t * width + i * W + ahead, 0, 2);
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
           int64_t last, T* out, int64_t out_stride, int64_t ahead = 0) {
    constexpr int W = Vec<T>::W, C = H > 4 ? 2 : 4;
    int64_t i = 0;
    for (; i + C * W <= width; i += C * W)
        blend_part<T, H, C>(scores, stride, values + i, width, first, last, out + i, out_stride,
                               ahead);
    for (; i + W <= width; i += W)
        blend_part<T, H, 1>(scores, stride, values + i, width, first, last, out + i, out_stride,
                               ahead);
    for (; i < width; ++i)
        for (int h = 0; h < H; ++h) {
            T sum = 0;
            for (int64_t t = first; t <= last; ++t)
                sum += scores[h * stride + t] * values[t * width + i];
            out[h * out_stride + i] = sum;
        }
}

// Attention of one token per row. p: q, k, v or latent, keys, values or latents, out, rotations,
// padding of each row, scores (threads, heads, n[5]); n: heads, key heads, head width, capacity,
// latent width, numbers per head in scores. Keys (b, h_kv, capacity, width), latents
// (b, 1, capacity, r); out (b, h, width), for latents (b, h, r).
template <typename T, bool LATENT> void attend(const Op& op, const Context& c) {
    const int64_t heads = op.n[0], groups = op.n[1], width = op.n[2], capacity = op.n[3];
    const int64_t rank = op.n[4], stride = op.n[5], per = heads / groups, last = c.column;
    c.restart();
    T *q = (T*)op.p[0], *k = (T*)op.p[1], *v = (T*)op.p[2];
    T* scores = (T*)op.p[8] + c.thread * heads * stride;
    const int64_t* padding = (const int64_t*)op.p[7];
    std::vector<T> turn(2 * width);
    T *cosines = turn.data(), *sines = cosines + width;
    int64_t turned = -1;
    // One item is a head of the keys, and with latents, which all heads share, a part of them.
    const int64_t parts = LATENT ? (c.batch >= c.threads ? 1 : groups) : groups;
    int64_t begin, end;
    share(c, op.turn, c.batch * parts, begin, end);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t b = item / parts, part = item % parts, first = padding[b];
        if (b != turned) spread((const T*)op.p[6] + (last - first) * width, width, cosines, sines);
        turned = b;
        const int64_t from = groups * part / parts, to = groups * (part + 1) / parts;
        for (int64_t g = from; g < to; ++g) {
            T* keys = (T*)op.p[3] + (b * groups + g) * capacity * width;
            rotate(k + (b * groups + g) * width, cosines, sines, keys + last * width, width);
            // The caches of a batch do not fit the processor's: what comes next is fetched here.
            T* values = (T*)op.p[4] + (LATENT ? b : b * groups + g) * capacity * rank;
            for (int64_t h = 0; h < per; ++h) {
                T* query = q + (b * heads + g * per + h) * width;
                rotate(query, cosines, sines, query, width);
                weigh(query, keys, width, first, last, scores + (g * per + h) * stride,
                      capacity * width);
            }
            if (LATENT) continue;
            std::memcpy(values + last * width, v + (b * groups + g) * width, width * sizeof(T));
            T* out = (T*)op.p[5] + (b * heads + g * per) * width;
            const T* s = scores + g * per * stride;
            int64_t h = 0;
            for (; h + 4 <= per; h += 4)
                blend<T, 4>(s + h * stride, stride, values, width, first, last, out + h * width,
                            width, h ? 0 : capacity * width);
            for (; h < per; ++h)
                blend<T, 1>(s + h * stride, stride, values, width, first, last, out + h * width,
                            width, h ? 0 : capacity * width);
        }
        if (!LATENT) continue;
        T* latents = (T*)op.p[4] + b * capacity * rank;
        // All parts of a row write the same numbers.
        std::memcpy(latents + last * rank, v + b * rank, rank * sizeof(T));
        T* out = (T*)op.p[5] + b * heads * rank;
        const int64_t next = parts == 1 && item + 1 < end ? capacity * rank : 0;
        int64_t h = from * per;
        const auto mixed = [&](auto width_of) {
            constexpr int H = decltype(width_of)::value;
            for (; h + H <= to * per; h += H)
                blend<T, H>(scores + h * stride, stride, latents, rank, first, last,
                            out + h * rank, rank, h ? 0 : next);
        };
        // All heads read the same latents, so that many of them share one pass.
        mixed(std::integral_constant<int, 12>());
        mixed(std::integral_constant<int, 8>());
        mixed(std::integral_constant<int, 4>());
        mixed(std::integral_constant<int, 1>());
    }
}

}  // namespace
