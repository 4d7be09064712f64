// Conversion between float32, float16 and bfloat16: the codecs f16 and bf16. See convert.cuh.
//
// Arrays do not overlap; they may be at any address. A thread converts eight elements at a time where both can be aligned.
#include "convert.cuh"

// As many bytes as eight elements, in one vector or two.
template <class E> DEVICE void load_eight(const u8 *at, typename E::Raw (&raw)[8]) {
#pragma unroll
    for (u32 part = 0; part < 8 / E::PER_VECTOR; part++) {
        const Vec vec = load_vector(at + part * 16);
#pragma unroll
        for (u32 i = 0; i < E::PER_VECTOR; i++) raw[part * E::PER_VECTOR + i] = get<typename E::Raw>(vec, i);
    }
}

template <class E> DEVICE void store_eight(u8 *at, const typename E::Raw (&raw)[8]) {
#pragma unroll
    for (u32 part = 0; part < 8 / E::PER_VECTOR; part++) {
        Vec vec = {{0, 0, 0, 0}};
#pragma unroll
        for (u32 i = 0; i < E::PER_VECTOR; i++) put<typename E::Raw>(vec, i, raw[part * E::PER_VECTOR + i]);
        store_vector(at + part * 16, vec);
    }
}

// An element at any address.
template <class E> DEVICE typename E::Raw load_element(const u8 *at) {
    typedef typename E::Raw Raw;
    return is_aligned(at, E::SIZE) ? *reinterpret_cast<const Raw *>(at) : load_bytes<Raw>(at);
}

template <class E> DEVICE void store_element(u8 *at, typename E::Raw raw) {
    if (is_aligned(at, E::SIZE)) *reinterpret_cast<typename E::Raw *>(at) = raw;
    else store_bytes(at, raw);
}

template <class To, class From> DEVICE void convert(const u8 *from, u64 count, u8 *to) {
    const bool from_is_narrow = From::SIZE == 2;
    const u64 ahead = up_to(from_is_narrow ? from : to, 16) / 2;
    const bool together = is_aligned(from + ahead * From::SIZE, 16) && is_aligned(to + ahead * To::SIZE, 16);
    const u64 head = together ? smaller_of(ahead, count) : count, groups = (count - head) / 8;
    for (u64 group = first_item(); group < groups; group += item_step()) {
        const u64 element = head + group * 8;
        typename From::Raw raw[8];
        typename To::Raw result[8];
        load_eight<From>(from + element * From::SIZE, raw);
#pragma unroll
        for (u32 i = 0; i < 8; i++) result[i] = converted<To, From>(raw[i]);
        store_eight<To>(to + element * To::SIZE, result);
    }
    const u64 singles = count - groups * 8;
    for (u64 item = first_item(); item < singles; item += item_step()) {
        const u64 element = item < head ? item : item + groups * 8;
        store_element<To>(to + element * To::SIZE, converted<To, From>(load_element<From>(from + element * From::SIZE)));
    }
}

template <class To, class From>
DEVICE void convert_chunks(const u8 *from, u64 from_step, u8 *to, u64 to_step, u64 count, u64 chunks) {
    for (u64 chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
        u8 *target = to + chunk * to_step * To::SIZE;
        convert<To, From>(from + chunk * from_step * From::SIZE, count, target);
        for (u64 item = count + first_item(); item < to_step; item += item_step()) {
            store_element<To>(target + item * To::SIZE, 0);
        }
    }
}

// `chunks` parts of `count` elements, which begin `from_step` elements apart, and `to_step` in the target, both at least `count`. The target
// gets zeros behind the elements of a chunk. The grid is (blocks per chunk, chunks).
#define CONVERT(name, From, To)                                                                                              \
    KERNEL convert_##name(const u8 *from, u64 from_step, u8 *to, u64 to_step, u64 count, u64 chunks) {                       \
        convert_chunks<To, From>(from, from_step, to, to_step, count, chunks);                                               \
    }                                                                                                                        \
    EXPORT(convert_##name)

CONVERT(f32_f16, F32, F16)
CONVERT(f32_bf16, F32, BF16)
CONVERT(f16_f32, F16, F32)
CONVERT(f16_f16, F16, F16)
CONVERT(f16_bf16, F16, BF16)
CONVERT(bf16_f32, BF16, F32)
CONVERT(bf16_f16, BF16, F16)
CONVERT(bf16_bf16, BF16, BF16)
