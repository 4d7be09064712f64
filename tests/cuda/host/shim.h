// What device code uses of CUDA C, for g++: kernels are functions, and the threads of a block are fibers (fibers.h).
//
// Included by rust/bagua-cuda/kernels/device.cuh where BAGUA_ON_HOST is defined. Kernels run one at a time in a process, so that shared
// memory is static memory: the sanitizers know its bounds.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstring>
#include <tuple>
#include <utility>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define DYNAMIC_SHARED(type, name) type *name = static_cast<type *>(bagua::dynamic_shared())

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#define threadIdx (bagua::here().thread)
#define blockIdx (bagua::here().block)
#define blockDim (bagua::here().block_size)
#define gridDim (bagua::here().grid_size)

template <class To, class From> To bit_cast_to(const From &from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
inline unsigned __float_as_uint(float value) { return bit_cast_to<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return bit_cast_to<float>(bits); }
inline long long __double_as_longlong(double value) { return bit_cast_to<long long>(value); }
inline double __longlong_as_double(long long bits) { return bit_cast_to<double>(bits); }

inline void __syncthreads() { bagua::sync_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { bagua::sync_warp(mask); }

// The value of another lane; `source` is called with the caller's lane.
template <class T> T shuffled(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= 8);
    unsigned long long bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = bagua::exchange_in_warp(mask, bits, source);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T> T __shfl_sync(unsigned mask, T value, unsigned lane) { return shuffled(mask, value, lane % 32); }
template <class T> T __shfl_xor_sync(unsigned mask, T value, unsigned other) {
    return shuffled(mask, value, bagua::lane() ^ other);
}
// A lane whose source is beyond the warp keeps its own value.
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
    const unsigned lane = bagua::lane();
    return shuffled(mask, value, lane + distance < 32 ? lane + distance : lane);
}

// Fibers of one thread: nothing comes between.
template <class T> T atomicAdd(T *at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}

namespace bagua {

// A kernel in the table, with its parameters' sizes and a function that calls it with their addresses.
struct Kernel {
    const char *name;
    int parameters;
    const size_t *sizes;
    void (*call)(void **arguments);
};

// Adds a kernel to the table.
bool add_kernel(const Kernel &kernel);

template <auto FUNCTION> struct Exported;
template <class... P, void (*FUNCTION)(P...)> struct Exported<FUNCTION> {
    static constexpr size_t SIZES[] = {sizeof(P)...};
    template <size_t... I> static void call_with(void **arguments, std::index_sequence<I...>) {
        FUNCTION(*static_cast<P *>(arguments[I])...);
    }
    static void call(void **arguments) { call_with(arguments, std::index_sequence_for<P...>()); }
    static Kernel kernel(const char *name) { return {name, sizeof...(P), SIZES, call}; }
};

}  // namespace bagua

#define EXPORT(kernel_name) \
    static const bool exported_##kernel_name = bagua::add_kernel(bagua::Exported<kernel_name>::kernel(#kernel_name));
