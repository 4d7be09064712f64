// The loop of kernels whose result at a place depends on what is at that place only: vectors, and single elements
// around them.
#pragma once
#include "device.cuh"

// Most sources of one launch.
#define MAX_SOURCES 8

// Addresses of arrays.
struct Sources {
    const u8 *at[MAX_SOURCES];
};

// out[i] = function(sources[0][i], …). Arrays are aligned to their elements, and each is either `out` itself or does
// not overlap it. Vectors where all have the same remainder by 16. `function` computes a whole vector; of a single
// element it gets one that has zeros behind it.
template <class Raw, u32 MOST, class Function>
DEVICE void elementwise(const Sources &sources, u32 number, u8 *out, u64 count, const Function &function) {
    bool together = true;
#pragma unroll
    for (u32 k = 0; k < MOST; k++) {
        if (k < number) together = together && reinterpret_cast<u64>(sources.at[k]) % 16 == reinterpret_cast<u64>(out) % 16;
    }
    const Split split = Split::of(out, sizeof(Raw), count, together);
    for (u64 item = first_item(); item < split.items; item += item_step()) {
        const u64 at = split.element(item) * sizeof(Raw);
        const bool whole = split.is_vector(item);
        // All of them before the first is used, so that they are in flight together.
        Vec in[MOST];
#pragma unroll
        for (u32 k = 0; k < MOST; k++) {
            if (k < number) in[k] = whole ? load_vector(sources.at[k] + at) : load_one<Raw>(sources.at[k] + at);
        }
        const Vec result = function(in, number);
        if (whole) store_vector(out + at, result);
        else store_one<Raw>(out + at, result);
    }
}
