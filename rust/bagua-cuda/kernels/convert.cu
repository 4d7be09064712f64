// Conversion between float32, float16 and bfloat16: to nearest even; a NaN keeps its sign and upper bits and becomes quiet.
//
// Arrays are aligned to their elements and do not overlap. A thread converts eight elements at a time where both can be aligned.
#include "device.cuh"

template <class To, class From> DEVICE typename To::Raw converted(typename From::Raw raw) {
    const float value = From::load(raw);
    // The only one that is neither rounded nor computed.
    if constexpr (To::SIZE == 4) return To::store(value != value ? quiet(value) : value);
    else return To::store(value);
}

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
        reinterpret_cast<typename To::Raw *>(to)[element] =
            converted<To, From>(reinterpret_cast<const typename From::Raw *>(from)[element]);
    }
}

#define CONVERT(name, From, To)                                                                                              \
    KERNEL convert_##name(const u8 *from, u64 count, u8 *to) { convert<To, From>(from, count, to); }                         \
    EXPORT(convert_##name)

CONVERT(f32_f16, F32, F16)
CONVERT(f32_bf16, F32, BF16)
CONVERT(f16_f32, F16, F32)
CONVERT(f16_bf16, F16, BF16)
CONVERT(bf16_f32, BF16, F32)
CONVERT(bf16_f16, BF16, F16)
