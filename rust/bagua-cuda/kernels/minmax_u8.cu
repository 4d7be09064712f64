// minmax_u8: eight bits between the smallest and the largest element, with the records of bagua-core's codec, byte for byte.
//
// A record: min and max in the element type (-0 as +0), zeros up to byte 32, a byte per element, zeros up to a multiple of 32.
// Encoding takes two launches of the same grid, because no block waits for another one. `…_range_T` writes the range of what each block
// has seen; `…_encode_T` combines those of a chunk and writes its record. The grid is (blocks per chunk, chunks).
//
// Elements are aligned to their size. Records may be at any address; sixteen bytes are read or written at a time where an array of
// elements can be aligned (single elements come before and behind), four or eight where the records' bytes are aligned there.
// Decoding looks each byte up in a table of the 256 values of a record, so that a value is divided once per block.
// The fused kernels take the records of all ranks for one chunk, add what they decode to in rank order, divide, round, and encode that, in
// three launches: tables, range, record. They decode twice, because records are smaller than a mean that would be kept in between.
#include "device.cuh"

// Bytes of a record before its elements.
#define HEADER 32
// Of as many ranks `minmax_u8_reduce_…` has the tables in shared memory.
#define MAX_TABLES 32

// The range of some elements. Empty: infinity, -infinity, 1.
struct Range {
    float min, max;
    // 1 where no element is infinite or NaN, else 0.
    u32 finite;
    u32 unused;
};

DEVICE Range empty_range() { return {__uint_as_float(0x7f800000u), __uint_as_float(0xff800000u), 1u, 0u}; }

DEVICE void include(Range &range, float value) {
    // fminf and fmaxf leave NaN out, and the others show in the result.
    range.min = fminf(range.min, value);
    range.max = fmaxf(range.max, value);
    if (value != value) range.finite = 0;
}

DEVICE Range joined(const Range &a, const Range &b) {
    return {fminf(a.min, b.min), fmaxf(a.max, b.max), a.finite & b.finite, 0u};
}

// The ranges of all threads of a block as one, which every thread gets. `finite` becomes 0 where min or max is infinite.
DEVICE Range of_block(Range range) {
    __shared__ Range of_warps[THREADS / 32];
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) {
        const Range other = {__shfl_xor_sync(0xffffffffu, range.min, distance), __shfl_xor_sync(0xffffffffu, range.max, distance),
                             __shfl_xor_sync(0xffffffffu, range.finite, distance), 0u};
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
    // False: everything is NaN.
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

template <class E> DEVICE void range(const u8 *elements, u64 count, u64 chunks, Range *ranges) {
    for (u64 chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
        const u8 *from = elements + chunk * count * E::SIZE;
        const Split split = Split::of(from, E::SIZE, count, true);
        Range own = empty_range();
#pragma unroll 4
        for (u64 vector = first_item(); vector < split.vectors; vector += item_step()) {
            const Vec vec = load_vector(from + (split.head + vector * E::PER_VECTOR) * E::SIZE);
#pragma unroll
            for (u32 i = 0; i < E::PER_VECTOR; i++) include(own, E::load(get<typename E::Raw>(vec, i)));
        }
        // The single elements, fewer than two vectors.
        if (blockIdx.x == 0 && threadIdx.x < split.items - split.vectors) {
            const u64 item = threadIdx.x < split.head ? threadIdx.x : threadIdx.x + split.vectors;
            include(own, E::load(*reinterpret_cast<const typename E::Raw *>(from + split.element(item) * E::SIZE)));
        }
        const Range all = of_block(own);
        if (threadIdx.x == 0) ranges[chunk * gridDim.x + blockIdx.x] = all;
    }
}

// The range of a chunk, of the ranges that as many blocks have written.
DEVICE Range combined(const Range *ranges, u32 blocks) {
    Range own = empty_range();
    for (u32 i = threadIdx.x; i < blocks; i += THREADS) own = joined(own, ranges[i]);
    own = of_block(own);
    if (!is_finite(own.min) || !is_finite(own.max)) own.finite = 0;
    return own;
}

// Writes the levels of the elements of a chunk.
template <class E, bool SMALL> DEVICE void quantize(const u8 *from, u64 count, const Quantizer &quantizer, u8 *body) {
    typedef typename E::Raw Raw;
    // The bytes of as many elements as a vector holds.
    typedef typename RawOf<E::PER_VECTOR>::type Bytes;
    const Split split = Split::of(from, E::SIZE, count, true);
    const bool whole = is_aligned(body + split.head, sizeof(Bytes));
#pragma unroll 4
    for (u64 vector = first_item(); vector < split.vectors; vector += item_step()) {
        const u64 element = split.head + vector * E::PER_VECTOR;
        const Vec vec = load_vector(from + element * E::SIZE);
        Bytes bytes = 0;
#pragma unroll
        for (u32 i = 0; i < E::PER_VECTOR; i++) {
            bytes |= static_cast<Bytes>(quantizer.level<SMALL>(E::load(get<Raw>(vec, i)))) << 8 * i;
        }
        if (whole) *reinterpret_cast<Bytes *>(body + element) = bytes;
        else store_bytes(body + element, bytes);
    }
    if (blockIdx.x == 0 && threadIdx.x < split.items - split.vectors) {
        const u64 item = threadIdx.x < split.head ? threadIdx.x : threadIdx.x + split.vectors;
        const u64 element = split.element(item);
        const Raw raw = *reinterpret_cast<const Raw *>(from + element * E::SIZE);
        body[element] = static_cast<u8>(quantizer.level<SMALL>(E::load(raw)));
    }
}

template <class E>
DEVICE void encode(const u8 *elements, u64 count, u64 chunks, const Range *ranges, u8 *records, u32 *nonfinite) {
    for (u64 chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
        const u8 *from = elements + chunk * count * E::SIZE;
        u8 *record = records + chunk * record_bytes(count), *body = record + HEADER;
        const Range all = combined(ranges + chunk * gridDim.x, gridDim.x);
        const Levels levels = levels_of(all.min, all.max);
        const bool valid = all.finite && levels.valid;
        if (blockIdx.x == 0) {
            store_header<E>(record, all, valid);
            if (threadIdx.x < padded(count) - count) body[count + threadIdx.x] = 0;
            if (threadIdx.x == 0 && !valid && nonfinite != nullptr) atomicAdd(nonfinite, 1u);
        }
        const Quantizer quantizer = Quantizer::of(levels);
        if (!valid) {
            for (u64 i = first_item(); i < count; i += item_step()) body[i] = 0;
        } else if (levels.small) {
            quantize<E, true>(from, count, quantizer, body);
        } else {
            quantize<E, false>(from, count, quantizer, body);
        }
    }
}

template <class E> DEVICE void decode(const u8 *records, u64 count, u64 chunks, u8 *elements) {
    typedef typename E::Raw Raw;
    typedef typename RawOf<E::PER_VECTOR>::type Bytes;
    // Whole words, so that threads that read neighbours use different banks.
    __shared__ u32 table[256];
    for (u64 chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
        const u8 *record = records + chunk * record_bytes(count), *body = record + HEADER;
        u8 *to = elements + chunk * count * E::SIZE;
        __syncthreads();
        table[threadIdx.x] = restored<E>(load_levels<E>(record), threadIdx.x);
        __syncthreads();
        const Split split = Split::of(to, E::SIZE, count, true);
        const bool whole = is_aligned(body + split.head, sizeof(Bytes));
#pragma unroll 4
        for (u64 vector = first_item(); vector < split.vectors; vector += item_step()) {
            const u64 element = split.head + vector * E::PER_VECTOR;
            const Bytes bytes =
                whole ? *reinterpret_cast<const Bytes *>(body + element) : load_bytes<Bytes>(body + element);
            Vec vec = {{0, 0, 0, 0}};
#pragma unroll
            for (u32 i = 0; i < E::PER_VECTOR; i++) {
                put<Raw>(vec, i, static_cast<Raw>(table[static_cast<u32>(bytes >> 8 * i) & 255u]));
            }
            store_vector(to + element * E::SIZE, vec);
        }
        if (blockIdx.x == 0 && threadIdx.x < split.items - split.vectors) {
            const u64 item = threadIdx.x < split.head ? threadIdx.x : threadIdx.x + split.vectors;
            const u64 element = split.element(item);
            *reinterpret_cast<Raw *>(to + element * E::SIZE) = static_cast<Raw>(table[body[element]]);
        }
    }
}

// --- decode, reduce, encode ------------------------------------------------------------------------------------------

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
    const bool valid = all.finite && levels.valid, whole = is_aligned(body, GROUP);
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

// `elements`: chunks * count elements. `ranges`: chunks * gridDim.x ranges of 16 bytes, for `…_encode` with the same grid.
// `nonfinite`: null, or a number to which each record of NaN adds 1. `kept`: null, or room for the means before their encoding.
// `…_tables_T` has a block for each rank. `…_reduce…` has one chunk, a grid of one dimension, and 1024 bytes of dynamic shared memory for
// each rank if those are at most 32.
#define FAMILY(name, E)                                                                                                      \
    KERNEL_OF(4) minmax_u8_range_##name(const u8 *elements, u64 count, u64 chunks, Range *ranges) {                          \
        range<E>(elements, count, chunks, ranges);                                                                           \
    }                                                                                                                        \
    EXPORT(minmax_u8_range_##name)                                                                                           \
    KERNEL_OF(4) minmax_u8_encode_##name(const u8 *elements, u64 count, u64 chunks, const Range *ranges, u8 *records,        \
                                   u32 *nonfinite) {                                                                         \
        encode<E>(elements, count, chunks, ranges, records, nonfinite);                                                      \
    }                                                                                                                        \
    EXPORT(minmax_u8_encode_##name)                                                                                          \
    KERNEL_OF(4) minmax_u8_decode_##name(const u8 *records, u64 count, u64 chunks, u8 *elements) {                           \
        decode<E>(records, count, chunks, elements);                                                                         \
    }                                                                                                                        \
    EXPORT(minmax_u8_decode_##name)                                                                                          \
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
