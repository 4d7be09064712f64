// f16 and bf16: the records of all ranks for one chunk become the record of their sum or mean, as in bagua-core's compressed all_reduce.
//
// Each value is rounded to the element type as it decodes; they are added in rank order in float32, divided once, rounded to the element
// type, and encoded. A thread computes eight elements at a time, of any number of ranks, and nothing is kept in between.
#include "convert.cuh"

#define GROUP 8

// Records are aligned to sixteen bytes, of which each is a multiple.
template <class E, class Half>
DEVICE void reduce_records(const u8 *records, u64 bytes, u64 count, u32 ranks, float divisor, u8 *record) {
    const bool power = (bits_of(divisor) & 0x007fffffu) == 0;
    // The reciprocal of a power of two is exact.
    const float reciprocal = power ? 1.0f / divisor : 0.0f;
    for (u64 group = first_item(); group < bytes / 16; group += item_step()) {
        float sum[GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) sum[i] = 0.0f;
        for (u32 rank = 0; rank < ranks; rank++) {
            const Vec vec = load_vector(records + rank * bytes + group * 16);
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) {
                const float value = E::load(converted<E, Half>(get<u16>(vec, i)));
                sum[i] = rank == 0 ? value : plus(sum[i], value);
            }
        }
        Vec out = {{0, 0, 0, 0}};
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const float mean = power ? times(sum[i], reciprocal) : over(sum[i], divisor);
            const u16 half = converted<Half, E>(E::store(mean));
            put<u16>(out, i, group * GROUP + i < count ? half : 0);
        }
        store_vector(record + group * 16, out);
    }
}

// `bytes`: of a record. `divisor`: at least 1. The grid has one dimension.
#define REDUCE(name, E, Half)                                                                                                \
    KERNEL_OF(4) convert_reduce_##name(const u8 *records, u64 bytes, u64 count, u32 ranks, float divisor, u8 *record) {      \
        reduce_records<E, Half>(records, bytes, count, ranks, divisor, record);                                              \
    }                                                                                                                        \
    EXPORT(convert_reduce_##name)

REDUCE(f32_f16, F32, F16)
REDUCE(f32_bf16, F32, BF16)
REDUCE(f16_f16, F16, F16)
REDUCE(f16_bf16, F16, BF16)
REDUCE(bf16_f16, BF16, F16)
REDUCE(bf16_bf16, BF16, BF16)
