// Averages of up to eight sources, element by element, strictly in the order given: bagua-core's `reduce::sum_over`.
//
// Half types accumulate in float32 and are rounded once. The sum is divided by `divisor` once, at the end. Sums are
// computed fast, and again with `settled` where the result has a NaN: a NaN stays in a sum.
#include "elementwise.cuh"

template <bool CAREFUL, class F> DEVICE F add(F a, F b) {
    if constexpr (CAREFUL) return plus(a, b);
    else return a + b;
}

template <class A, class B> struct Same {
    static constexpr bool value = false;
};
template <class A> struct Same<A, A> {
    static constexpr bool value = true;
};

// A vector whose first element has become the last one, and the second the first.
template <class Raw> DEVICE Vec rotated(const Vec &vec) {
    constexpr u32 WORDS = sizeof(Raw) / 4, BITS = sizeof(Raw) % 4 * 8;
    Vec out;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 low = vec.word[(i + WORDS) % 4], high = vec.word[(i + WORDS + 1) % 4];
        if constexpr (BITS == 0) out.word[i] = low;
        else out.word[i] = low >> BITS | high << (32 - BITS);
    }
    return out;
}

template <class E> struct Average {
    typedef typename E::Raw Raw;
    typedef typename E::Value Value;
    Value divisor;

    // Of a NaN, `CAREFUL` keeps the bits; without, it stays some NaN.
    template <bool CAREFUL> DEVICE Value load(Raw raw) {
        if constexpr (Same<E, F16>::value && !CAREFUL) return from_f16<true>(raw);
        else return E::load(raw);
    }
    template <bool CAREFUL> DEVICE Raw store(const Value &value) {
        if constexpr (Same<E, F16>::value && !CAREFUL) return to_f16<true>(value);
        else return E::store(value);
    }
    // The result at the i-th place of vectors.
    template <bool CAREFUL>
    __device__ __forceinline__ Value one(const Vec (&in)[MAX_SOURCES], u32 number, u32 i) const {
        Value acc = load<CAREFUL>(get<Raw>(in[0], i));
#pragma unroll
        for (u32 k = 1; k < MAX_SOURCES; k++) {
            if (k < number) acc = add<CAREFUL>(acc, load<CAREFUL>(get<Raw>(in[k], i)));
        }
        if constexpr (CAREFUL) return over(acc, divisor);
        // The reciprocal of a power of two is exact.
        else return is_power(divisor) ? acc * (1 / divisor) : acc / divisor;
    }
    DEVICE bool is_power(float value) { return (bits_of(value) & 0x007fffffu) == 0; }
    DEVICE bool is_power(double value) { return (bits_of(value) & 0x000fffffffffffffull) == 0; }

    __device__ __forceinline__ Vec operator()(const Vec (&in)[MAX_SOURCES], u32 number) const {
        Vec out = {{0, 0, 0, 0}};
        bool careful = false;
#pragma unroll
        for (u32 i = 0; i < E::PER_VECTOR; i++) {
            const Value result = one<false>(in, number, i);
            careful = careful || result != result;
            put<Raw>(out, i, store<false>(result));
        }
        return careful ? again(in, number) : out;
    }
    // A loop of little code: the elements pass the first place one after the other.
    __device__ __forceinline__ Vec again(const Vec (&in)[MAX_SOURCES], u32 number) const {
        Vec left[MAX_SOURCES], out = {{0, 0, 0, 0}};
#pragma unroll
        for (u32 k = 0; k < MAX_SOURCES; k++) {
            if (k < number) left[k] = in[k];
        }
#pragma unroll 1
        for (u32 i = 0; i < E::PER_VECTOR; i++) {
            out = rotated<Raw>(out);
            put<Raw>(out, E::PER_VECTOR - 1, store<true>(one<true>(left, number, 0)));
#pragma unroll
            for (u32 k = 0; k < MAX_SOURCES; k++) {
                if (k < number) left[k] = rotated<Raw>(left[k]);
            }
        }
        return out;
    }
};

// `sources`: the first `number` of them count.
#define AVERAGE(name, E)                                                                                                     \
    KERNEL average_##name(const Sources sources, u32 number, u8 *out, u64 count, double divisor) {                           \
        elementwise<E::Raw, MAX_SOURCES>(sources, number, out, count, Average<E>{static_cast<E::Value>(divisor)});           \
    }                                                                                                                        \
    EXPORT(average_##name)

AVERAGE(f16, F16)
AVERAGE(bf16, BF16)
AVERAGE(f32, F32)
AVERAGE(f64, F64)
