// minmax_u8: eight bits between the smallest and the largest element, with the records of bagua-core's codec, byte for byte.
//
// A record: min and max in the element type (-0 as +0), zeros up to byte 32, a byte per element, zeros up to a multiple of 32.
#pragma once
#include "device.cuh"

// Bytes of a record before its elements.
#define HEADER 32

// The range of some elements. Empty: infinity, -infinity, 1.
struct Range {
    float min, max;
    // 1 where no element is NaN, else 0.
    u32 ordered;
    u32 unused;
};

DEVICE Range empty_range() { return {__uint_as_float(0x7f800000u), __uint_as_float(0xff800000u), 1u, 0u}; }

DEVICE void include(Range &range, float value) {
    // fminf and fmaxf leave NaN out.
    range.min = fminf(range.min, value);
    range.max = fmaxf(range.max, value);
    if (value != value) range.ordered = 0;
}

DEVICE Range joined(const Range &a, const Range &b) {
    return {fminf(a.min, b.min), fmaxf(a.max, b.max), a.ordered & b.ordered, 0u};
}

// The ranges of all threads of a block as one, which every thread gets.
DEVICE Range of_block(Range range) {
    __shared__ Range of_warps[THREADS / 32];
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) {
        const Range other = {__shfl_xor_sync(0xffffffffu, range.min, distance), __shfl_xor_sync(0xffffffffu, range.max, distance),
                             __shfl_xor_sync(0xffffffffu, range.ordered, distance), 0u};
        range = joined(range, other);
    }
    // The last call's results have been read.
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = range;
    __syncthreads();
    range = of_warps[0];
#pragma unroll
    for (u32 warp = 1; warp < THREADS / 32; warp++) range = joined(range, of_warps[warp]);
    return range;
}

// What a range of all elements means.
struct Levels {
    // Levels per unit.
    float scale;
    // The level that is written as 0.
    float lower;
    // False: everything is NaN, because an element is infinite for instance.
    bool valid;
    // The level of no element has more than 22 bits.
    bool small;
};

DEVICE Levels levels_of(float min, float max) {
    const float range = max - min, scale = 255.0f / (range + 1e-7f);
    const float top = max * scale, bottom = min * scale, upper = rintf(top);
    const bool small = fabsf(top) < 4194304.0f && fabsf(bottom) < 4194304.0f;
    return {scale, upper - 255.0f, is_finite(range) && is_finite(upper) && is_finite(bottom), small};
}

// 1.5 * 2^23: a number of at most 22 bits that is added to it is rounded to an integer, half to even, in its lower bits.
#define ROUNDER 12582912.0f

// The bytes of elements. `first` is the integer that `lower` is, for small levels.
struct Quantizer {
    Levels levels;
    i32 first;

    DEVICE Quantizer of(const Levels &levels) {
        return {levels, static_cast<i32>(bits_of(ROUNDER)) + (levels.small ? static_cast<i32>(levels.lower) : 0)};
    }
    // Rounding is monotonic, so that no element has a level above that of the largest one.
    template <bool SMALL> __device__ __forceinline__ u32 level(float value) const {
        const float scaled = value * levels.scale;
        if constexpr (SMALL) {
            const i32 level = static_cast<i32>(bits_of(scaled + ROUNDER)) - first;
            return static_cast<u32>(level < 0 ? 0 : level);
        } else {
            return static_cast<u32>(fminf(fmaxf(rintf(scaled) - levels.lower, 0.0f), 255.0f));
        }
    }
};

DEVICE u64 padded(u64 count) { return (count + 31) / 32 * 32; }
DEVICE u64 record_bytes(u64 count) { return HEADER + padded(count); }

// The header, by the first 32 threads of a block; the zeros behind the elements are not written.
template <class E> DEVICE void store_header(u8 *record, const Range &range, bool valid) {
    typedef typename E::Raw Raw;
    if (threadIdx.x >= HEADER) return;
    // Adding 0 makes +0 of -0.
    const float nan = __uint_as_float(0x7fc00000u);
    const Raw min = E::store(valid ? range.min + 0.0f : nan), max = E::store(valid ? range.max + 0.0f : nan);
    const u32 at = threadIdx.x;
    u8 byte = 0;
    if (at < E::SIZE) byte = static_cast<u8>(min >> 8 * at);
    else if (at < 2 * E::SIZE) byte = static_cast<u8>(max >> 8 * (at - E::SIZE));
    record[at] = byte;
}

template <class E> DEVICE Levels load_levels(const u8 *record) {
    typedef typename E::Raw Raw;
    return levels_of(E::load(load_bytes<Raw>(record)), E::load(load_bytes<Raw>(record + E::SIZE)));
}

// The value of a byte, as it is stored.
template <class E> DEVICE typename E::Raw restored(const Levels &levels, u32 byte) {
    const float nan = __uint_as_float(0x7fc00000u);
    return E::store(levels.valid ? (static_cast<float>(byte) + levels.lower) / levels.scale : nan);
}

// The range of a chunk, of the ranges that as many blocks have written.
DEVICE Range combined(const Range *ranges, u32 blocks) {
    Range own = empty_range();
    for (u32 i = threadIdx.x; i < blocks; i += THREADS) own = joined(own, ranges[i]);
    return of_block(own);
}
