// Reduction of up to eight sources, element by element, strictly in the order given: bagua-core's `reduce::combine` and `sum_over`.
// reduce_half.cu, reduce_float.cu and reduce_integer.cu have the kernels: one program would take too long to compile at first use.
//
// Half types accumulate in float32 and are rounded once. `divisor` counts for averages only: the sum is divided by it once, at the end.
// min and max give NaN where a source has NaN: the last one. Integers wrap. What is not 0 is true, and true is written as 1.
#pragma once
#include "elementwise.cuh"

// Sums of floats are computed fast, and again with `settled` where the result has a NaN: a NaN stays in a sum and in a product.
template <bool CAREFUL, class F> DEVICE F add(F a, F b) {
    if constexpr (CAREFUL) return plus(a, b);
    else return a + b;
}

template <bool CAREFUL, class F> DEVICE F multiply(F a, F b) {
    if constexpr (CAREFUL) return times(a, b);
    else return a * b;
}

DEVICE bool has_nan(float value) { return value != value; }
DEVICE bool has_nan(double value) { return value != value; }

// Real and imaginary part.
template <class F> struct Complex {
    F re, im;
};

template <class F> DEVICE bool has_nan(const Complex<F> &value) { return value.re != value.re || value.im != value.im; }

template <bool CAREFUL, class F> DEVICE Complex<F> multiply(const Complex<F> &a, const Complex<F> &b) {
    F re;
    if constexpr (CAREFUL) re = minus(times(a.re, b.re), times(a.im, b.im));
    else re = a.re * b.re - a.im * b.im;
    return {re, add<CAREFUL>(multiply<CAREFUL>(a.re, b.im), multiply<CAREFUL>(a.im, b.re))};
}

struct C64 : Element<u64, Complex<float>> {
    DEVICE Complex<float> load(u64 raw) {
        return {__uint_as_float(static_cast<u32>(raw)), __uint_as_float(static_cast<u32>(raw >> 32))};
    }
    DEVICE u64 store(const Complex<float> &value) { return bits_of(value.re) | static_cast<u64>(bits_of(value.im)) << 32; }
};
struct C128 : Element<Pair64, Complex<double>> {
    DEVICE Complex<double> load(const Pair64 &raw) { return {F64::load(raw.first), F64::load(raw.second)}; }
    DEVICE Pair64 store(const Complex<double> &value) { return {bits_of(value.re), bits_of(value.im)}; }
};

struct Sum {
    template <bool CAREFUL, class V> DEVICE V apply(V before, V next) { return add<CAREFUL>(before, next); }
};
struct Product {
    template <bool CAREFUL, class V> DEVICE V apply(const V &before, const V &next) { return multiply<CAREFUL>(before, next); }
};
struct Min {
    template <bool, class V> DEVICE V apply(V before, V next) { return next < before || next != next ? next : before; }
};
struct Max {
    template <bool, class V> DEVICE V apply(V before, V next) { return next > before || next != next ? next : before; }
};

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

// Floats and complex numbers.
template <class E, class Op, bool DIVIDES> struct Floats {
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
            if (k < number) acc = Op::template apply<CAREFUL>(acc, load<CAREFUL>(get<Raw>(in[k], i)));
        }
        if constexpr (DIVIDES) {
            if constexpr (CAREFUL) acc = over(acc, divisor);
            // The reciprocal of a power of two is exact.
            else acc = is_power(divisor) ? acc * (1 / divisor) : acc / divisor;
        }
        return acc;
    }
    DEVICE bool is_power(float value) { return (bits_of(value) & 0x007fffffu) == 0; }
    DEVICE bool is_power(double value) { return (bits_of(value) & 0x000fffffffffffffull) == 0; }

    __device__ __forceinline__ Vec operator()(const Vec (&in)[MAX_SOURCES], u32 number) const {
        Vec out = {{0, 0, 0, 0}};
        bool careful = false;
#pragma unroll
        for (u32 i = 0; i < E::PER_VECTOR; i++) {
            const Value result = one<false>(in, number, i);
            careful = careful || has_nan(result);
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

// What is neither rounded nor NaN by arithmetic: integers, and the order of floats.
template <class E, class Op> struct Plain {
    __device__ __forceinline__ Vec operator()(const Vec (&in)[MAX_SOURCES], u32 number) const {
        Vec out = {{0, 0, 0, 0}};
#pragma unroll
        for (u32 i = 0; i < E::PER_VECTOR; i++) {
            typename E::Value acc = E::load(get<typename E::Raw>(in[0], i));
#pragma unroll
            for (u32 k = 1; k < MAX_SOURCES; k++) {
                if (k < number) acc = Op::template apply<false>(acc, E::load(get<typename E::Raw>(in[k], i)));
            }
            put<typename E::Raw>(out, i, E::store(acc));
        }
        return out;
    }
};

// Operations on the four words of a vector, whatever its elements are.
struct And {
    DEVICE u32 apply(u32 a, u32 b) { return a & b; }
};
struct Or {
    DEVICE u32 apply(u32 a, u32 b) { return a | b; }
};
struct Xor {
    DEVICE u32 apply(u32 a, u32 b) { return a ^ b; }
};
// Sums of four bytes each, without a carry from one to the next.
struct SumBytes {
    DEVICE u32 apply(u32 a, u32 b) { return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u); }
};

template <class Op, bool TRUTHS> struct Words {
    // 1 for each byte that is not 0, if those are truth values.
    DEVICE u32 load(u32 word) {
        if constexpr (TRUTHS) return (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) >> 7 & 0x01010101u;
        else return word;
    }
    __device__ __forceinline__ Vec operator()(const Vec (&in)[MAX_SOURCES], u32 number) const {
        Vec out;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 acc = load(in[0].word[i]);
#pragma unroll
            for (u32 k = 1; k < MAX_SOURCES; k++) {
                if (k < number) acc = Op::apply(acc, load(in[k].word[i]));
            }
            out.word[i] = acc;
        }
        return out;
    }
};

// All have the same parameters. `sources`: the first `number` of them count. `divisor`: for avg.
#define REDUCE(name, Raw, function)                                                                                          \
    KERNEL reduce_##name(const Sources sources, u32 number, u8 *out, u64 count, double divisor) {                            \
        (void)divisor;                                                                                                       \
        elementwise<Raw, MAX_SOURCES>(sources, number, out, count, function);                                                \
    }                                                                                                                        \
    EXPORT(reduce_##name)
#define COMMA ,
