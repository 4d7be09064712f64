// minmax_u8: the records of all ranks for one chunk become the record of their sum or mean, as in bagua-core's compressed all_reduce.
//
// They are added in rank order, in float32 as they decode, divided once, rounded, and encoded, in three launches: tables, range, record.
// They are decoded twice, because records are smaller than a mean that would be kept in between.
#include "minmax_u8.cuh"

// Of as many ranks `minmax_u8_reduce_…` has the tables in shared memory.
#define MAX_TABLES 32
// Elements that a thread computes at a time.
#define GROUP 8

// The values of each byte of the records of as many ranks as there are blocks: 256 numbers for each rank.
template <class E> DEVICE void tables(const u8 *records, u64 count, float *values) {
    const Levels levels = load_levels<E>(records + blockIdx.x * record_bytes(count));
    values[blockIdx.x * 256 + threadIdx.x] = E::load(restored<E>(levels, threadIdx.x));
}

// The records of `ranks` ranks for the same elements, one after the other.
struct Records {
    const u8 *first;
    // Of each.
    u64 count;
    u32 ranks;
    // What the sum is divided by, and what it is multiplied by where that is exact, else 0.
    float divisor, reciprocal;
    // Whether the bytes of a group can be read at once.
    bool aligned;

    // The divisor is at least 1.
    DEVICE Records of(const u8 *first, u64 count, u32 ranks, float divisor) {
        const bool power = (bits_of(divisor) & 0x007fffffu) == 0;
        return {first, count, ranks, divisor, power ? 1.0f / divisor : 0.0f, is_aligned(first, GROUP)};
    }
};

// Copies the tables of all ranks into the block's shared memory if there is room, and returns where they are.
DEVICE const float *near_tables(const float *values, u32 ranks, float *room) {
    if (ranks > MAX_TABLES) return values;
    for (u32 rank = 0; rank < ranks; rank++) room[rank * 256 + threadIdx.x] = values[rank * 256 + threadIdx.x];
    __syncthreads();
    return room;
}

// The means of a group of elements, rounded as they would be stored. Records have zeros behind their last element. Where a mean is NaN, so
// is the record, whatever bits that NaN has.
template <class E> DEVICE void means(const Records &records, const float *values, u64 group, float (&mean)[GROUP]) {
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) mean[i] = 0.0f;
    for (u32 rank = 0; rank < records.ranks; rank++) {
        const u8 *body = records.first + rank * record_bytes(records.count) + HEADER + group * GROUP;
        const u64 bytes = records.aligned ? *reinterpret_cast<const u64 *>(body) : load_bytes<u64>(body);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const float value = values[rank * 256 + (static_cast<u32>(bytes >> 8 * i) & 255u)];
            mean[i] = rank == 0 ? value : mean[i] + value;
        }
    }
    if (records.reciprocal != 0.0f) {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) mean[i] *= records.reciprocal;
    } else {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) mean[i] /= records.divisor;
    }
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) mean[i] = E::load(E::store(mean[i]));
}

template <class E>
DEVICE void reduce_range(const u8 *first, u64 count, u32 ranks, float divisor, const float *far, Range *ranges) {
    DYNAMIC_SHARED(float, room);
    const Records records = Records::of(first, count, ranks, divisor);
    const float *values = near_tables(far, ranks, room);
    Range own = empty_range();
    for (u64 group = first_item(); group < padded(count) / GROUP; group += item_step()) {
        float mean[GROUP];
        means<E>(records, values, group, mean);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            if (group * GROUP + i < count) include(own, mean[i]);
        }
    }
    const Range all = of_block(own);
    if (threadIdx.x == 0) ranges[blockIdx.x] = all;
}

template <class E>
DEVICE void reduce_encode(const u8 *first, u64 count, u32 ranks, float divisor, const float *far, const Range *ranges,
                          u8 *record, u8 *kept, u32 *nonfinite) {
    DYNAMIC_SHARED(float, room);
    typedef typename E::Raw Raw;
    const Records records = Records::of(first, count, ranks, divisor);
    const float *values = near_tables(far, ranks, room);
    u8 *body = record + HEADER;
    const Range all = combined(ranges, gridDim.x);
    const Levels levels = levels_of(all.min, all.max);
    const bool valid = all.ordered && levels.valid, whole = is_aligned(body, GROUP);
    const Quantizer quantizer = Quantizer::of(levels);
    if (blockIdx.x == 0) {
        store_header<E>(record, all, valid);
        if (threadIdx.x == 0 && !valid && nonfinite != nullptr) atomicAdd(nonfinite, 1u);
    }
    for (u64 group = first_item(); group < padded(count) / GROUP; group += item_step()) {
        float mean[GROUP];
        means<E>(records, values, group, mean);
        // Of no element behind the last one.
        const u64 left = count - smaller_of(group * GROUP, count);
        if (kept != nullptr) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) {
                if (i < left) reinterpret_cast<Raw *>(kept)[group * GROUP + i] = E::store(mean[i]);
            }
        }
        u64 bytes = 0;
        if (valid && levels.small) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) bytes |= static_cast<u64>(i < left ? quantizer.level<true>(mean[i]) : 0) << 8 * i;
        } else if (valid) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) bytes |= static_cast<u64>(i < left ? quantizer.level<false>(mean[i]) : 0) << 8 * i;
        }
        if (whole) *reinterpret_cast<u64 *>(body + group * GROUP) = bytes;
        else store_bytes(body + group * GROUP, bytes);
    }
}

// `tables`: 1024 bytes for each rank. `ranges`: gridDim.x of them, for `…_reduce_T` with the same grid. `kept`: null, or room for the mean
// before its encoding. `nonfinite`: null, or a number to which a record of NaN adds 1. `…_tables_T` has a block for each rank, the others
// a grid of one dimension, and 1024 bytes of dynamic shared memory for each rank if those are at most 32.
#define FAMILY(name, E)                                                                                                      \
    KERNEL_OF(4) minmax_u8_tables_##name(const u8 *records, u64 count, float *tables_of) {                                   \
        tables<E>(records, count, tables_of);                                                                                \
    }                                                                                                                        \
    EXPORT(minmax_u8_tables_##name)                                                                                          \
    KERNEL_OF(4) minmax_u8_reduce_range_##name(const u8 *records, u64 count, u32 ranks, float divisor, const float *tables,  \
                                         Range *ranges) {                                                                    \
        reduce_range<E>(records, count, ranks, divisor, tables, ranges);                                                     \
    }                                                                                                                        \
    EXPORT(minmax_u8_reduce_range_##name)                                                                                    \
    KERNEL_OF(4) minmax_u8_reduce_##name(const u8 *records, u64 count, u32 ranks, float divisor, const float *tables,        \
                                   const Range *ranges, u8 *record, u8 *kept, u32 *nonfinite) {                              \
        reduce_encode<E>(records, count, ranks, divisor, tables, ranges, record, kept, nonfinite);                           \
    }                                                                                                                        \
    EXPORT(minmax_u8_reduce_##name)

FAMILY(f32, F32)
FAMILY(f16, F16)
FAMILY(bf16, BF16)
