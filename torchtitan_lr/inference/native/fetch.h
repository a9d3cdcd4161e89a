// Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
//
// Products are limited by arithmetic and attention by memory: the cache that the next attention
// reads is fetched while products of many rows are computed.

#pragma once

#include "common.h"

namespace {

// Bytes that all threads together fetch for one attention, which stay in the processor's cache.
constexpr int64_t FETCHED = 16 << 20;

// What a tile fetches, one vector at a time: `rate` / 2^16 vectors per input channel.
template <typename T> struct Fetch {
    const T* from;
    int64_t rate;
    void at(int64_t k) const { __builtin_prefetch(from + (k * rate >> 16) * Vec<T>::W, 0, 2); }
};

// Takes the next vectors of the cache that the attention `op` will read, for a tile of `k` input
// channels that should fetch `rate` / 2^16 vectors per channel, so that memory is evenly busy. What
// a tile could not take follows with the next ones. A thread fetches about the rows it will read.
template <typename T>
Fetch<T> take(const Op& op, const Context& c, const T* unused, int64_t k, int64_t rate) {
    constexpr int W = Vec<T>::W;
    Cursor& at = c.cursor;
    const int64_t end = c.batch * (c.thread + 1) / c.threads;
    if (at.row == end || at.bytes * c.threads >= FETCHED) return {unused, 0};
    at.due += k * rate;
    const int64_t most = std::min((at.due >> 16) - at.bytes / 64, k);
    if (most <= 0) return {unused, 0};
    const int64_t groups = op.n[1], capacity = op.n[3];
    const int64_t values = op.kind == ATTEND ? groups : 1;
    const bool keys = at.part < groups;
    const int64_t width = keys ? op.n[2] : op.n[4];
    const int64_t part = keys ? at.row * groups + at.part : at.row * values + at.part - groups;
    const int64_t vectors = std::min((c.column * width - at.number + W - 1) / W, most);
    const T* from = (const T*)op.p[keys ? 3 : 4] + part * capacity * width + at.number;
    at.number += vectors * W;
    at.bytes += vectors * 64;
    if (at.number >= c.column * width) {
        at.number = 0;
        at.part = (at.part + 1) % (groups + values);
        at.row += at.part == 0;
    }
    return {from, (vectors << 16) / k};
}

}  // namespace
