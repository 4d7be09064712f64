// Reduction of float32, float64 and products of complex numbers, whose other operations are those of twice as many parts: see reduce.cuh.
#include "reduce.cuh"

#define FLOAT(name, E)                                                                                                       \
    REDUCE(name##_sum, E::Raw, (Floats<E COMMA Sum COMMA false>{}))                                                          \
    REDUCE(name##_avg, E::Raw, (Floats<E COMMA Sum COMMA true>{static_cast<E::Value>(divisor)}))                             \
    REDUCE(name##_product, E::Raw, (Floats<E COMMA Product COMMA false>{}))                                                  \
    REDUCE(name##_min, E::Raw, Plain<E COMMA Min>())                                                                         \
    REDUCE(name##_max, E::Raw, Plain<E COMMA Max>())

FLOAT(f32, F32)
FLOAT(f64, F64)
REDUCE(c64_product, C64::Raw, (Floats<C64 COMMA Product COMMA false>{}))
REDUCE(c128_product, C128::Raw, (Floats<C128 COMMA Product COMMA false>{}))
