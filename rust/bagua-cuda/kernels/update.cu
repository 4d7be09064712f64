// The updates of asynchronous averaging and of the compressed ring, with the bits of bagua-core. Half types are computed in float32.
#include "elementwise.cuh"

// weights = average where an element still has the bits of its snapshot, else weights + (average - snapshot).
template <class E> struct Correct {
    __device__ __forceinline__ Vec operator()(const Vec (&in)[3], u32) const {
        typedef typename E::Raw Raw;
        Vec out = {{0, 0, 0, 0}};
#pragma unroll
        for (u32 i = 0; i < E::PER_VECTOR; i++) {
            const Raw weight = get<Raw>(in[0], i), average = get<Raw>(in[1], i), snapshot = get<Raw>(in[2], i);
            const auto moved = plus(E::load(weight), minus(E::load(average), E::load(snapshot)));
            put<Raw>(out, i, weight == snapshot ? average : E::store(moved));
        }
        return out;
    }
};

// values + difference.
template <class E> struct Add {
    __device__ __forceinline__ Vec operator()(const Vec (&in)[2], u32) const {
        typedef typename E::Raw Raw;
        Vec out = {{0, 0, 0, 0}};
#pragma unroll
        for (u32 i = 0; i < E::PER_VECTOR; i++) {
            put<Raw>(out, i, E::store(plus(E::load(get<Raw>(in[0], i)), E::load(get<Raw>(in[1], i)))));
        }
        return out;
    }
};

// What the compressed ring sends: weights + left / 3 + right / 3 - 5/3 own, in float32 with one rounding per operation.
template <class E> struct Difference {
    __device__ __forceinline__ Vec operator()(const Vec (&in)[4], u32) const {
        typedef typename E::Raw Raw;
        const float third = 1.0f / 3.0f, five_thirds = 5.0f / 3.0f;
        Vec out = {{0, 0, 0, 0}};
#pragma unroll
        for (u32 i = 0; i < E::PER_VECTOR; i++) {
            const float weight = E::load(get<Raw>(in[0], i)), left = E::load(get<Raw>(in[1], i));
            const float right = E::load(get<Raw>(in[2], i)), own = E::load(get<Raw>(in[3], i));
            const float sum = plus(plus(weight, times(left, third)), times(right, third));
            put<Raw>(out, i, E::store(minus(sum, times(own, five_thirds))));
        }
        return out;
    }
};

#define AVERAGING(name, E)                                                                                                   \
    KERNEL update_correct_##name(u8 *weights, const u8 *average, const u8 *snapshot, u64 count) {                            \
        elementwise<E::Raw, 3>({{weights, average, snapshot}}, 3, weights, count, Correct<E>());                             \
    }                                                                                                                        \
    EXPORT(update_correct_##name)

#define RING(name, E)                                                                                                        \
    KERNEL update_ring_difference_##name(const u8 *weights, const u8 *left, const u8 *right, const u8 *own, u8 *out,         \
                                         u64 count) {                                                                        \
        elementwise<E::Raw, 4>({{weights, left, right, own}}, 4, out, count, Difference<E>());                               \
    }                                                                                                                        \
    EXPORT(update_ring_difference_##name)                                                                                    \
    KERNEL update_ring_take_##name(u8 *replica, const u8 *difference, u64 count) {                                           \
        elementwise<E::Raw, 2>({{replica, difference}}, 2, replica, count, Add<E>());                                        \
    }                                                                                                                        \
    EXPORT(update_ring_take_##name)

AVERAGING(f16, F16)
AVERAGING(bf16, BF16)
AVERAGING(f32, F32)
AVERAGING(f64, F64)
RING(f16, F16)
RING(bf16, BF16)
RING(f32, F32)
