// Reduction of float16 and bfloat16, computed in float32: see reduce.cuh.
#include "reduce.cuh"

#define HALF(name, E)                                                                                                        \
    REDUCE(name##_sum, E::Raw, (Floats<E COMMA Sum COMMA false>{}))                                                          \
    REDUCE(name##_avg, E::Raw, (Floats<E COMMA Sum COMMA true>{static_cast<float>(divisor)}))                                \
    REDUCE(name##_product, E::Raw, (Floats<E COMMA Product COMMA false>{}))                                                  \
    REDUCE(name##_min, E::Raw, (Floats<E COMMA Min COMMA false>{}))                                                          \
    REDUCE(name##_max, E::Raw, (Floats<E COMMA Max COMMA false>{}))

HALF(f16, F16)
HALF(bf16, BF16)
