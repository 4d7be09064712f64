// Reduction of integers and truth values: see reduce.cuh.
//
// Sums, products and bits do not depend on the sign, and bits not on the size: those of i8, i32 and i64 are computed by the kernels of u8.
#include "reduce.cuh"

template <class RawType, class ValueType> struct Integer : Element<RawType, ValueType> {
    DEVICE ValueType load(RawType raw) { return static_cast<ValueType>(raw); }
    DEVICE RawType store(ValueType value) { return static_cast<RawType>(value); }
};
typedef Integer<u8, u8> U8;
typedef Integer<u8, i8> I8;
typedef Integer<u32, u32> U32;
typedef Integer<u32, i32> I32;
typedef Integer<u64, u64> U64;
typedef Integer<u64, i64> I64;

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
