// Error feedback of compressed all_reduce, with the bits of bagua-core: what encoding lost, a float32 for each element, is added to the next
// tensor. Elements are aligned to their size.
#include "device.cuh"

// after = data + error; data = that, rounded.
template <class E> DEVICE void compensate(typename E::Raw *data, const float *error, float *after, u64 count) {
    for (u64 i = first_item(); i < count; i += item_step()) {
        const float sum = plus(E::load(data[i]), error[i]);
        after[i] = sum;
        data[i] = E::store(sum);
    }
}

// after -= decoded.
template <class E> DEVICE void lose(float *after, const typename E::Raw *decoded, u64 count) {
    for (u64 i = first_item(); i < count; i += item_step()) after[i] = minus(after[i], E::load(decoded[i]));
}

// after += divisor * (mean - decoded).
template <class E>
DEVICE void lose_mean(float *after, const typename E::Raw *mean, const typename E::Raw *decoded, u64 count, float divisor) {
    for (u64 i = first_item(); i < count; i += item_step()) {
        const float lost = times(divisor, minus(E::load(mean[i]), E::load(decoded[i])));
        after[i] = plus(after[i], lost);
    }
}

// Adds 1 to `nonfinite`, at least once, where an element is not finite.
template <class E> DEVICE void look(const typename E::Raw *data, u64 count, u32 *nonfinite) {
    bool finite = true;
    for (u64 i = first_item(); i < count; i += item_step()) finite = finite && is_finite(E::load(data[i]));
    if (!finite) atomicAdd(nonfinite, 1u);
}

#define FEEDBACK(name, E)                                                                                                    \
    KERNEL feedback_add_##name(E::Raw *data, const float *error, float *after, u64 count) {                                  \
        compensate<E>(data, error, after, count);                                                                            \
    }                                                                                                                        \
    EXPORT(feedback_add_##name)                                                                                              \
    KERNEL feedback_lose_##name(float *after, const E::Raw *decoded, u64 count) { lose<E>(after, decoded, count); }          \
    EXPORT(feedback_lose_##name)                                                                                             \
    KERNEL feedback_lose_mean_##name(float *after, const E::Raw *mean, const E::Raw *decoded, u64 count, float divisor) {    \
        lose_mean<E>(after, mean, decoded, count, divisor);                                                                  \
    }                                                                                                                        \
    EXPORT(feedback_lose_mean_##name)                                                                                        \
    KERNEL feedback_look_##name(const E::Raw *data, u64 count, u32 *nonfinite) { look<E>(data, count, nonfinite); }          \
    EXPORT(feedback_look_##name)

FEEDBACK(f16, F16)
FEEDBACK(bf16, BF16)
FEEDBACK(f32, F32)

// error = after, unless something was not finite.
KERNEL feedback_keep_f32(float *error, const float *after, u64 count, const u32 *nonfinite) {
    if (*nonfinite != 0) return;
    for (u64 i = first_item(); i < count; i += item_step()) error[i] = after[i];
}
EXPORT(feedback_keep_f32)
