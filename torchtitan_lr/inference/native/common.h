// Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
//
// What all operations of the step share: their structure, vectors, and the threads' parts.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include <immintrin.h>
#endif

struct Op {
    int64_t kind;
    int64_t wait;   // whether all threads meet after it
    int64_t turn;   // rotates the threads' shares, so that small operations use all of them
    void* p[10];
    int64_t n[10];
    double f[2];
};

namespace {

enum Kind { EMBED, NORM, LINEAR, MIX, ATTEND, ATTEND_LATENT, QUANTIZE, SCREEN, PICK, ARGMAX };
enum Ending { STORE, SILU, ADD, MULTIPLY };

// How far a thread has fetched what the next attention reads: in part `part` (keys or values of a
// head) of row `row`, up to number `number`; in all `bytes`, of `due` / 2^16 vectors to be fetched.
struct Cursor { int64_t row, part, number, bytes, due; };

struct Context {
    int64_t batch, column;
    int thread, threads;
    mutable Cursor cursor;

    // An attention is done: what is fetched now is for the next one.
    void restart() const { cursor = {batch * thread / threads, 0, 0, 0, 0}; }
};

// The part [begin, end) of `count` items that belongs to this thread.
void share(const Context& c, int64_t turn, int64_t count, int64_t& begin, int64_t& end) {
    const int64_t me = (c.thread + turn) % c.threads;
    begin = count * me / c.threads;
    end = count * (me + 1) / c.threads;
}

template <typename T> struct Vec {
    static constexpr int W = 64 / sizeof(T);
    typedef T type __attribute__((vector_size(64), aligned(sizeof(T)), may_alias));
};
template <typename T> using vec = typename Vec<T>::type;

inline void halves(vec<float> a, vec<float> b, vec<float>& even, vec<float>& odd) {
#ifdef __clang__
    even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    const vec<int32_t> i = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    even = __builtin_shuffle(a, b, i);
    odd = __builtin_shuffle(a, b, i + 1);
#endif
}

inline void halves(vec<double> a, vec<double> b, vec<double>& even, vec<double>& odd) {
#ifdef __clang__
    even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
    odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    const vec<int64_t> i = {0, 2, 4, 6, 8, 10, 12, 14};
    even = __builtin_shuffle(a, b, i);
    odd = __builtin_shuffle(a, b, i + 1);
#endif
}

// The two of each pair, exchanged.
inline vec<float> swapped(vec<float> x) {
#ifdef __clang__
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#else
    const vec<int32_t> i = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    return __builtin_shuffle(x, i);
#endif
}

inline vec<double> swapped(vec<double> x) {
#ifdef __clang__
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    const vec<int64_t> i = {1, 0, 3, 2, 5, 4, 7, 6};
    return __builtin_shuffle(x, i);
#endif
}

// Reduces W vectors to one, whose lane i is the reduction of vector i.
template <typename T, typename F> vec<T> reduce(vec<T>* v, F pair) {
    for (int n = Vec<T>::W; n > 1; n /= 2)
        for (int i = 0; i < n / 2; ++i) {
            vec<T> even, odd;
            halves(v[2 * i], v[2 * i + 1], even, odd);
            v[i] = pair(even, odd);
        }
    return v[0];
}

inline double exponential(double x) { return std::exp(x); }

inline vec<double> exponential(vec<double> x) {
    for (int i = 0; i < Vec<double>::W; ++i) x[i] = std::exp(x[i]);
    return x;
}

// In fp32 within 2 units of the last place.
inline vec<float> exponential(vec<float> x) {
    x = x < -87.0f ? vec<float>{} - 87.0f : x;
    x = x > 88.0f ? vec<float>{} + 88.0f : x;
    // Positive, so that cutting it off rounds down: the nearest power of 2, 127 added.
    const vec<int32_t> power = __builtin_convertvector(x * 1.44269504f + 127.5f, vec<int32_t>);
    const vec<float> n = __builtin_convertvector(power, vec<float>) - 127.0f;
    const vec<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec<float> p = r * 1.3888889e-3f + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = (p * r * r + r) + 1.0f;
    return p * (vec<float>)(power << 23);
}

inline float exponential(float x) { return exponential(vec<float>{} + x)[0]; }

}  // namespace
