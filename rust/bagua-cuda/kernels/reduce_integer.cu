// Reduction of integers and truth values: see reduce.cuh.
//
// Sums, products and bits do not depend on the sign, and bits not on the size: those of i8, i32 and i64 are computed by the kernels of u8.
#include "reduce.cuh"

#define ORDER(name, E)                                                                                                       \
    REDUCE(name##_min, E::Raw, Plain<E COMMA Min>())                                                                         \
    REDUCE(name##_max, E::Raw, Plain<E COMMA Max>())
#define ARITHMETIC(name, E)                                                                                                  \
    REDUCE(name##_sum, E::Raw, Plain<E COMMA Sum>())                                                                         \
    REDUCE(name##_product, E::Raw, Plain<E COMMA Product>())
#define BITS(name, TRUTHS)                                                                                                   \
    REDUCE(name##_bor, u8, Words<Or COMMA TRUTHS>())                                                                         \
    REDUCE(name##_band, u8, Words<And COMMA TRUTHS>())                                                                       \
    REDUCE(name##_bxor, u8, Words<Xor COMMA TRUTHS>())

REDUCE(u8_sum, u8, Words<SumBytes COMMA false>())
REDUCE(u8_product, u8, Plain<U8 COMMA Product>())
ARITHMETIC(i32, U32)
ARITHMETIC(i64, U64)
ORDER(u8, U8)
ORDER(i8, I8)
ORDER(i32, I32)
ORDER(i64, I64)
BITS(u8, false)
// Of 0 and 1 the product and the smaller one are the conjunction, the larger one is the disjunction.
BITS(bool, true)
