// Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
//
// The screened head: bounds of all logits, and the products that they leave open.

#pragma once

#include "common.h"

namespace {

// The screened head, see `screened_head.py`. p: x, codes of x, its scale, norm, and what is
// left (b each), its sum (b); n: K.
template <typename T> void quantize(const Op& op, const Context& c) {
    const int64_t width = op.n[0];
    int64_t begin, end;
    share(c, op.turn, c.batch, begin, end);
    for (int64_t b = begin; b < end; ++b) {
        const T* x = (const T*)op.p[0] + b * width;
        int8_t* codes = (int8_t*)op.p[1] + b * 4;  // (K / 4, b, 4)
        float most = 1e-30f, squares = 0, left = 0;
        for (int64_t i = 0; i < width; ++i) most = std::max(most, std::fabs(float(x[i])));
        const float scale = most / 127;
        int32_t sum = 0;
        for (int64_t i = 0; i < width; ++i) {
            const float value = float(x[i]), code = std::nearbyint(value / scale);
            const float rest = value - code * scale;
            codes[i / 4 * 4 * c.batch + i % 4] = int8_t(code);
            sum += int32_t(code);
            squares += value * value;
            left += rest * rest;
        }
        ((float*)op.p[2])[b] = scale;
        ((float*)op.p[3])[b] = std::sqrt(squares);
        ((float*)op.p[4])[b] = std::sqrt(left);
        ((int32_t*)op.p[5])[b] = sum;
    }
}

typedef vec<float> floats;
typedef vec<int32_t> ints;

inline floats larger(floats a, floats b) { return a > b ? a : b; }

// Products of R rows of codes with 16 rows of the head's, whose codes have 128 added.
template <int R>
void dots(const int8_t* x, int64_t batch, int64_t width, const uint8_t* codes,
          const int32_t* sums, ints* out) {
    for (int r = 0; r < R; ++r) out[r] = ints{} - 128 * sums[r];
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    __m512i acc[R];
    for (int r = 0; r < R; ++r) acc[r] = (__m512i)out[r];
    for (int64_t k = 0; k < width; k += 4) {
        const __m512i w = _mm512_loadu_si512(codes + k * 16);
        __builtin_prefetch(codes + k * 16 + 4096);  // else memory comes late by a fifth of the time
        for (int r = 0; r < R; ++r) {
            int32_t four;
            std::memcpy(&four, x + k * batch + r * 4, 4);
            acc[r] = _mm512_dpbusd_epi32(acc[r], w, _mm512_set1_epi32(four));
        }
    }
    for (int r = 0; r < R; ++r) out[r] = (ints)acc[r];
#else
    for (int64_t k = 0; k < width; k += 4)
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < 16; ++i)
                for (int j = 0; j < 4; ++j)
                    out[r][i] += int32_t(x[k * batch + r * 4 + j]) * codes[k * 16 + i * 4 + j];
#endif
}

struct Screen {
    const int8_t* x; const float *scale, *norm, *left; const int32_t* sum;
    const uint8_t* codes; const float* bounds;  // (V / 16, 3, 16): scale, ‖e‖, ‖s c‖
    float* lowest;   // (threads, b, 16): largest lower bounds
    float* highest;  // (V / 16, b): largest upper bound in a panel
    int64_t width, panels, batch;
    Screen(const Op& op, const Context& c)
        : x((int8_t*)op.p[0]), scale((float*)op.p[1]), norm((float*)op.p[2]),
          left((float*)op.p[3]), sum((int32_t*)op.p[4]), codes((uint8_t*)op.p[5]),
          bounds((float*)op.p[6]), lowest((float*)op.p[7]), highest((float*)op.p[8]),
          width(op.n[0]), panels((op.n[1] + 15) / 16), batch(c.batch) {}

    // Lower and upper bounds of R rows from b on in a panel. The last token pads the last panel,
    // which changes no maximum.
    template <int R> void bound(int64_t b, int64_t panel, floats* low, floats* high) const {
        const float* s = bounds + panel * 48;
        const floats scales = *(const floats*)s, error = *(const floats*)(s + 16);
        const floats norms = *(const floats*)(s + 32);
        ints dot[R];
        dots<R>(x + b * 4, batch, width, codes + panel * width * 16, sum + b, dot);
        for (int r = 0; r < R; ++r) {
            const floats around = error * norm[b + r] + norms * left[b + r];
            const floats estimate = __builtin_convertvector(dot[r], floats) * (scales * scale[b + r]);
            low[r] = estimate - around;
            high[r] = estimate + around;
        }
    }

    template <int R> void rows(int64_t b, int64_t panel, float* least) const {
        floats low[R], high[16] = {};
        bound<R>(b, panel, low, high);
        for (int r = 0; r < R; ++r) {
            floats* kept = (floats*)(least + (b + r) * 16);
            *kept = larger(*kept, low[r]);
        }
        float most[16];
        *(floats*)most = reduce<float>(high, larger);
        for (int r = 0; r < R; ++r) highest[panel * batch + b + r] = most[r];
    }
};

inline void screen(const Op& op, const Context& c) {
    const Screen s(op, c);
    float* least = s.lowest + c.thread * c.batch * 16;
    std::fill(least, least + c.batch * 16, -3e38f);
    int64_t begin, end;
    share(c, op.turn, s.panels, begin, end);
    for (int64_t panel = begin; panel < end; ++panel) {
        int64_t b = 0;
        for (; b + 16 <= c.batch; b += 16) s.rows<16>(b, panel, least);
        for (; b + 4 <= c.batch; b += 4) s.rows<4>(b, panel, least);
        for (; b < c.batch; ++b) s.rows<1>(b, panel, least);
    }
}

// The exact products of the tokens that may be the most likely one; p as `screen`, and the tokens;
// n: K, V, address of x (b, K), address of the weight.
template <typename T> struct Best {
    float limit;  // no token below it can be the one
    int64_t token;
    T logit;

    void look(const Screen& s, const Op& op, int64_t b, int64_t here) {
        const T *x = (const T*)op.n[2] + b * s.width, *weight = (const T*)op.n[3];
        floats low, high;
        s.bound<1>(b, here, &low, &high);
        const int64_t count = std::min<int64_t>(16, op.n[1] - here * 16);
        for (int64_t i = 0; i < count; ++i) {
            if (high[i] < limit) continue;
            const int64_t found = here * 16 + i;
            T sum = 0;
            for (int64_t k = 0; k < s.width; ++k) sum += x[k] * weight[found * s.width + k];
            if (token >= 0 && (sum < logit || (sum == logit && found > token))) continue;
            token = found;
            logit = sum;
            limit = std::max(limit, float(sum) - std::fabs(float(sum)) * 1e-6f);
        }
    }
};

// The tokens of 16 rows at most, whose bounds are compared side by side.
template <typename T>
void pick_rows(const Screen& s, const Op& op, const Context& c, int64_t begin, int64_t end) {
    const int64_t rows = end - begin;
    Best<T> best[16];
    floats limits = floats{} + 3e38f, most = floats{} - 3e38f;
    ints first = {};
    for (int64_t r = 0; r < rows; ++r) {
        limits[r] = -3e38f;
        for (int i = 0; i < c.threads * 16; ++i)
            limits[r] = std::max(limits[r], s.lowest[(i / 16 * c.batch + begin + r) * 16 + i % 16]);
    }
    const auto bounds_of = [&](int64_t panel) {
        floats found = floats{} - 3e38f;
        const float* from = s.highest + panel * c.batch + begin;
        if (rows == 16) return *(const floats*)from;
        std::memcpy(&found, from, rows * sizeof(float));
        return found;
    };
    for (int64_t panel = 0; panel < s.panels; ++panel) {
        const floats found = bounds_of(panel);
        first = found > most ? ints{} + int32_t(panel) : first;
        most = larger(most, found);
    }
    // The most promising panel first: its largest logit closes most others.
    for (int64_t r = 0; r < rows; ++r) {
        best[r] = {limits[r], -1, 0};
        best[r].look(s, op, begin + r, first[r]);
        limits[r] = best[r].limit;
    }
    for (int64_t panel = 0; panel < s.panels; ++panel) {
        const ints open = bounds_of(panel) >= limits;
        int any = 0;
        for (int r = 0; r < 16; ++r) any |= open[r];
        if (!any) continue;
        for (int64_t r = 0; r < rows; ++r)
            if (open[r] && panel != first[r]) {
                best[r].look(s, op, begin + r, panel);
                limits[r] = best[r].limit;
            }
    }
    for (int64_t r = 0; r < rows; ++r) ((int64_t*)op.p[9])[begin + r] = best[r].token;
}

template <typename T> void pick(const Op& op, const Context& c) {
    const Screen s(op, c);
    int64_t begin, end;
    share(c, op.turn, c.batch, begin, end);
    for (int64_t b = begin; b < end; b += 16) pick_rows<T>(s, op, c, b, std::min(b + 16, end));
}

}  // namespace
