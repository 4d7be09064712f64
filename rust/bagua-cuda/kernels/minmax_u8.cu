// minmax_u8: encoding and decoding, see minmax_u8.cuh.
//
// Encoding takes two launches of the same grid, because no block waits for another one. `…_range_T` writes the range of what each block
// has seen; `…_encode_T` combines those of a chunk and writes its record. The grid is (blocks per chunk, chunks).
//
// Elements are aligned to their size. Records may be at any address; sixteen bytes are read or written at a time where an array of
// elements can be aligned (single elements come before and behind), four or eight where the records' bytes are aligned there.
// Decoding is one launch, of blocks that go through the tiles of all chunks together. Each byte is looked up in a table of the 256 values
// of a record, so that a value is divided once per tile.
#include "minmax_u8.cuh"

// Blocks of the encoding kernels that run on a multiprocessor at a time. Six are all of their grid, and faster on Hopper; elsewhere the
// compiler spills registers for that.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 100 == 9
#define ENCODERS 6
#else
#define ENCODERS 4
#endif

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

// Writes the levels of the elements of a chunk.
template <class E, bool SMALL> DEVICE void quantize(const u8 *from, u64 count, const Quantizer &quantizer, u8 *body) {
    typedef typename E::Raw Raw;
    // The bytes of as many elements as a vector holds.
    typedef typename RawOf<E::PER_VECTOR>::type Bytes;
    const Split split = Split::of(from, E::SIZE, count, true);
    const bool whole = is_aligned(body + split.head, sizeof(Bytes));
    // Large levels are rare.
#pragma unroll(SMALL ? 4 : 1)
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
    for (u64 row = blockIdx.y; row < chunks; row += gridDim.y) {
        // The last chunk first: the device's second-level cache may still have it.
        const u64 chunk = chunks - 1 - row;
        const u8 *from = elements + chunk * count * E::SIZE;
        u8 *record = records + chunk * record_bytes(count), *body = record + HEADER;
        const Range all = combined(ranges + chunk * gridDim.x, gridDim.x);
        const Levels levels = levels_of(all.min, all.max);
        const bool valid = all.ordered && levels.valid;
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

// Vectors of a tile for each thread.
#define VECTORS 4

// What a block decodes at a time of a chunk: up to VECTORS vectors for each thread. The first tile of a chunk has the single elements too,
// fewer than two vectors.
template <class E> struct Tile {
    Split split;
    u64 first;
    bool singles;

    DEVICE Tile of(const u8 *to, u64 count, u64 number) {
        return {Split::of(to, E::SIZE, count, true), number * (THREADS * VECTORS) + threadIdx.x, number == 0};
    }
    __device__ __forceinline__ u64 vector(u32 i) const { return first + i * THREADS; }
    // The first element of a vector.
    __device__ __forceinline__ u64 element(u64 vector) const { return split.head + vector * E::PER_VECTOR; }
    // The single element of this thread, if `has_single`.
    __device__ __forceinline__ bool has_single() const { return singles && threadIdx.x < split.items - split.vectors; }
    __device__ __forceinline__ u64 single() const {
        return split.element(threadIdx.x < split.head ? threadIdx.x : threadIdx.x + split.vectors);
    }
};

// A block takes every so many tiles of all chunks.
template <class E> DEVICE void decode(const u8 *records, u64 count, u64 chunks, u64 tiles, u8 *elements) {
    typedef typename E::Raw Raw;
    typedef typename RawOf<E::PER_VECTOR>::type Bytes;
    // Whole words, so that threads that read neighbours use different banks.
    __shared__ u32 table[256];
    u64 chunk_of_table = chunks;
    for (u64 number = blockIdx.x; number < chunks * tiles; number += gridDim.x) {
        const u64 chunk = number / tiles;
        const u8 *record = records + chunk * record_bytes(count), *body = record + HEADER;
        u8 *to = elements + chunk * count * E::SIZE;
        const Tile<E> tile = Tile<E>::of(to, count, number % tiles);
        const bool whole = is_aligned(body + tile.split.head, sizeof(Bytes));
        Bytes bytes[VECTORS] = {};
#pragma unroll
        for (u32 i = 0; i < VECTORS; i++) {
            const u8 *at = body + tile.element(tile.vector(i));
            if (tile.vector(i) < tile.split.vectors) bytes[i] = whole ? *reinterpret_cast<const Bytes *>(at) : load_bytes<Bytes>(at);
        }
        if (chunk != chunk_of_table) {
            __syncthreads();
            table[threadIdx.x] = restored<E>(load_levels<E>(record), threadIdx.x);
            __syncthreads();
            chunk_of_table = chunk;
        }
#pragma unroll
        for (u32 i = 0; i < VECTORS; i++) {
            if (tile.vector(i) >= tile.split.vectors) continue;
            Vec vec = {{0, 0, 0, 0}};
#pragma unroll
            for (u32 k = 0; k < E::PER_VECTOR; k++) {
                put<Raw>(vec, k, static_cast<Raw>(table[static_cast<u32>(bytes[i] >> 8 * k) & 255u]));
            }
            store_vector(to + tile.element(tile.vector(i)) * E::SIZE, vec);
        }
        if (tile.has_single()) {
            *reinterpret_cast<Raw *>(to + tile.single() * E::SIZE) = static_cast<Raw>(table[body[tile.single()]]);
        }
    }
}

// `elements`: chunks * count elements. `ranges`: chunks * gridDim.x ranges of 16 bytes, for `…_encode` with the same grid.
// `nonfinite`: null, or a number to which each record of NaN adds 1. `tiles`: of a chunk.
#define FAMILY(name, E)                                                                                                      \
    KERNEL_OF(ENCODERS) minmax_u8_range_##name(const u8 *elements, u64 count, u64 chunks, Range *ranges) {                   \
        range<E>(elements, count, chunks, ranges);                                                                           \
    }                                                                                                                        \
    EXPORT(minmax_u8_range_##name)                                                                                           \
    KERNEL_OF(ENCODERS) minmax_u8_encode_##name(const u8 *elements, u64 count, u64 chunks, const Range *ranges, u8 *records, \
                                   u32 *nonfinite) {                                                                         \
        encode<E>(elements, count, chunks, ranges, records, nonfinite);                                                      \
    }                                                                                                                        \
    EXPORT(minmax_u8_encode_##name)                                                                                          \
    KERNEL_OF(4) minmax_u8_decode_##name(const u8 *records, u64 count, u64 chunks, u64 tiles, u8 *elements) {                \
        decode<E>(records, count, chunks, tiles, elements);                                                                  \
    }                                                                                                                        \
    EXPORT(minmax_u8_decode_##name)

FAMILY(f32, F32)
FAMILY(f16, F16)
FAMILY(bf16, BF16)
