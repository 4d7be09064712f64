// What all kernels use: element types, 16-byte vectors, conversions and arithmetic with the bits of the host.
//
// Compiled by NVRTC without any header of CUDA, and by g++ for the host with tests/cuda/host/shim.h (BAGUA_ON_HOST). Options:
// --fmad=false, and -DDEFAULT_NAN_SIGN=1 where the host's processor gives invalid operations a negative NaN (x86-64), else 0.
//
// Arithmetic. Additions, multiplications and divisions of IEEE 754 have the same bits everywhere but for NaN: a device always returns
// 0x7fffffff, a processor the NaN of the operands, made quiet, or its default NaN. `plus`, `minus`, `times` and `over` return the
// processor's. Where both operands are NaN, it is the first one; which one a processor returns depends on the order that a compiler chose.
#pragma once

#ifdef BAGUA_ON_HOST
#include "shim.h"
#else
// Registers a kernel with the host's table of kernels; nothing for NVRTC.
#define EXPORT(kernel)
// Dynamic shared memory of a block.
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

// Threads of a block, for every kernel.
#define THREADS 256
// A kernel that the driver finds by its name.
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
// One of which that many blocks run on a multiprocessor at a time. With 4, ptxas spills no register around divisions.
#define KERNEL_OF(blocks) extern "C" __global__ void __launch_bounds__(THREADS, blocks)
#define DEVICE static __device__ __forceinline__

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// --- memory ----------------------------------------------------------------------------------------------------------

// Sixteen bytes in registers.
struct Vec {
    u32 word[4];
};

// Sixteen bytes at an address that sixteen divides.
DEVICE Vec load_vector(const u8 *at) {
    const uint4 all = *reinterpret_cast<const uint4 *>(at);
    return {{all.x, all.y, all.z, all.w}};
}

DEVICE void store_vector(u8 *at, const Vec &vec) {
    *reinterpret_cast<uint4 *>(at) = make_uint4(vec.word[0], vec.word[1], vec.word[2], vec.word[3]);
}

// Bytes from an address to the next multiple of `unit`, a power of two.
DEVICE u64 up_to(const void *at, u64 unit) { return (unit - reinterpret_cast<u64>(at) % unit) % unit; }

DEVICE bool is_aligned(const void *at, u64 unit) { return reinterpret_cast<u64>(at) % unit == 0; }

DEVICE u64 smaller_of(u64 a, u64 b) { return a < b ? a : b; }

// A number in bytes at any address, the lowest byte first.
template <class Raw> DEVICE Raw load_bytes(const u8 *at) {
    Raw raw = 0;
#pragma unroll
    for (u32 i = 0; i < sizeof(Raw); i++) raw |= static_cast<Raw>(static_cast<Raw>(at[i]) << 8 * i);
    return raw;
}

template <class Raw> DEVICE void store_bytes(u8 *at, Raw raw) {
#pragma unroll
    for (u32 i = 0; i < sizeof(Raw); i++) at[i] = static_cast<u8>(raw >> 8 * i);
}

// The unsigned integer of as many bytes as an element.
template <u32 SIZE> struct RawOf;
template <> struct RawOf<1> {
    typedef u8 type;
};
template <> struct RawOf<2> {
    typedef u16 type;
};
template <> struct RawOf<4> {
    typedef u32 type;
};
template <> struct RawOf<8> {
    typedef u64 type;
};

// The i-th element of a vector. The index is known when a loop has been unrolled, so that vectors stay in registers.
template <class Raw> DEVICE Raw get(const Vec &vec, u32 i) {
    if constexpr (sizeof(Raw) == 8) {
        return vec.word[2 * i] | static_cast<u64>(vec.word[2 * i + 1]) << 32;
    } else {
        constexpr u32 PER_WORD = 4 / sizeof(Raw);
        return static_cast<Raw>(vec.word[i / PER_WORD] >> i % PER_WORD * 8 * sizeof(Raw));
    }
}

// Adds the i-th element to a vector that has zeros there.
template <class Raw> DEVICE void put(Vec &vec, u32 i, Raw raw) {
    if constexpr (sizeof(Raw) == 8) {
        vec.word[2 * i] = static_cast<u32>(raw);
        vec.word[2 * i + 1] = static_cast<u32>(raw >> 32);
    } else {
        constexpr u32 PER_WORD = 4 / sizeof(Raw);
        vec.word[i / PER_WORD] |= static_cast<u32>(raw) << i % PER_WORD * 8 * sizeof(Raw);
    }
}

// One element in the first place of a vector. Its address is a multiple of its size.
template <class Raw> DEVICE Vec load_one(const u8 *at) {
    Vec vec = {{0, 0, 0, 0}};
    put<Raw>(vec, 0, *reinterpret_cast<const Raw *>(at));
    return vec;
}

template <class Raw> DEVICE void store_one(u8 *at, const Vec &vec) { *reinterpret_cast<Raw *>(at) = get<Raw>(vec, 0); }

// How the threads of a grid share elements: vectors where all arrays can be aligned, single elements before and behind them.
struct Split {
    // Single elements in front.
    u64 head;
    // Vectors behind those.
    u64 vectors;
    // Single elements in front, vectors, and single elements at the end: what is shared.
    u64 items;
    // Elements of a vector.
    u64 width;

    // `at` is one of arrays that have all the same remainder by 16, if `together`.
    DEVICE Split of(const u8 *at, u64 size, u64 count, bool together) {
        const u64 width = 16 / size, ahead = up_to(at, 16);
        if (!together || ahead % size != 0) return {count, 0, count, width};
        const u64 head = smaller_of(ahead / size, count), vectors = (count - head) / width;
        return {head, vectors, head + vectors + (count - head) % width, width};
    }
    // Whether an item is a vector.
    __device__ __forceinline__ bool is_vector(u64 item) const { return item >= head && item - head < vectors; }
    // The first element of an item.
    __device__ __forceinline__ u64 element(u64 item) const {
        if (item < head) return item;
        const u64 past = item - head;
        return head + (past < vectors ? past * width : vectors * width + (past - vectors));
    }
};

DEVICE u64 first_item() { return static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x; }
DEVICE u64 item_step() { return static_cast<u64>(gridDim.x) * THREADS; }

// --- floats ----------------------------------------------------------------------------------------------------------

DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE u64 bits_of(double value) { return static_cast<u64>(__double_as_longlong(value)); }
DEVICE float quiet(float nan) { return __uint_as_float(bits_of(nan) | 0x00400000u); }
DEVICE double quiet(double nan) { return __longlong_as_double(static_cast<i64>(bits_of(nan) | 0x0008000000000000ull)); }
DEVICE float default_nan(float) { return __uint_as_float(0x7fc00000u | DEFAULT_NAN_SIGN << 31); }
DEVICE double default_nan(double) {
    return __longlong_as_double(static_cast<i64>(0x7ff8000000000000ull | static_cast<u64>(DEFAULT_NAN_SIGN) << 63));
}

// The result of an operation, or the NaN that a processor returns.
template <class F> DEVICE F settled(F result, F a, F b) {
    if (result == result) return result;
    return a != a ? quiet(a) : b != b ? quiet(b) : default_nan(result);
}

template <class F> DEVICE F plus(F a, F b) { return settled(a + b, a, b); }
template <class F> DEVICE F minus(F a, F b) { return settled(a - b, a, b); }
template <class F> DEVICE F times(F a, F b) { return settled(a * b, a, b); }
template <class F> DEVICE F over(F a, F b) { return settled(a / b, a, b); }

DEVICE bool is_finite(float value) { return (bits_of(value) & 0x7fffffffu) < 0x7f800000u; }

// float16, as the crate half converts it: to nearest even; a NaN keeps its upper bits and becomes quiet. `ANY_NAN`: of a NaN it is enough
// that it stays one.
template <bool ANY_NAN = false> DEVICE float from_f16(u16 half) {
    const u32 sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (!ANY_NAN && rest > 0x7c00u) return __uint_as_float(sign | 0x7fc00000u | (rest & 0x3ffu) << 13);
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
#else
    if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // A subnormal number is so many units of 2^-24, which float32 holds exactly.
    if (rest < 0x400u) return __uint_as_float(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
    return __uint_as_float(sign | ((rest << 13) + (112u << 23)));
#endif
}

template <bool ANY_NAN = false> DEVICE u16 to_f16(float value) {
    const u32 bits = bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (!ANY_NAN && rest > 0x7f800000u) return static_cast<u16>(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
#ifdef __CUDA_ARCH__
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    if (rest > 0x7f800000u) return static_cast<u16>(sign | 0x7e00u);
    if (rest >= 0x47800000u) return static_cast<u16>(sign | 0x7c00u);
    if (rest < 0x38800000u) {
        // Added to 0.5, whose last place is 2^-24, a number is rounded to units of a subnormal float16.
        return static_cast<u16>(sign | (bits_of(__uint_as_float(rest) + 0.5f) - 0x3f000000u));
    }
    const u32 rounded = rest + 0xfffu + (rest >> 13 & 1u);
    return static_cast<u16>(sign | ((rounded >> 13) - (112u << 10)));
#endif
}

// bfloat16. Loading leaves a signalling NaN as it is: everything that is stored as bfloat16 or computed becomes quiet.
DEVICE float from_bf16(u16 half) { return __uint_as_float(static_cast<u32>(half) << 16); }

DEVICE u16 to_bf16(float value) {
    const u32 bits = bits_of(value);
    if (value != value) return static_cast<u16>(bits >> 16 | 0x0040u);
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// --- element types ---------------------------------------------------------------------------------------------------

// An element type: Raw, its bits; Value, what it is computed in; SIZE, its bytes; PER_VECTOR, as many as a vector holds.
template <class RawType, class ValueType> struct Element {
    typedef RawType Raw;
    typedef ValueType Value;
    static constexpr u32 SIZE = sizeof(Raw), PER_VECTOR = 16 / sizeof(Raw);
};

struct F16 : Element<u16, float> {
    DEVICE float load(u16 raw) { return from_f16(raw); }
    DEVICE u16 store(float value) { return to_f16(value); }
};
struct BF16 : Element<u16, float> {
    DEVICE float load(u16 raw) { return from_bf16(raw); }
    DEVICE u16 store(float value) { return to_bf16(value); }
};
struct F32 : Element<u32, float> {
    DEVICE float load(u32 raw) { return __uint_as_float(raw); }
    DEVICE u32 store(float value) { return bits_of(value); }
};
struct F64 : Element<u64, double> {
    DEVICE double load(u64 raw) { return __longlong_as_double(static_cast<i64>(raw)); }
    DEVICE u64 store(double value) { return bits_of(value); }
};
