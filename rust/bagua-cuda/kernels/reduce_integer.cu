// Reduction of integers and truth values: see reduce.cuh.
//
// Sums, products and bits do not depend on the sign, and bits not on the size: sums and products of signed types are computed by the
// kernels of unsigned ones, and the bits of all types by those of u8.
#include "reduce.cuh"

template <class RawType, class ValueType> struct Integer : Element<RawType, ValueType> {
    DEVICE ValueType load(RawType raw) { return static_cast<ValueType>(raw); }
    DEVICE RawType store(ValueType value) { return static_cast<RawType>(value); }
};

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

typedef Integer<u8, u8> U8;
REDUCE(u8_sum, u8, Words<SumBytes COMMA false>())
REDUCE(u8_product, u8, Plain<U8 COMMA Product>())
ORDER(u8, U8)
BITS(u8, false)

typedef Integer<u8, i8> I8;
ORDER(i8, I8)

// Its values are not u16: C++ multiplies those as int, in which 65535 * 65535 overflows.
typedef Integer<u16, u32> U16;
ARITHMETIC(u16, U16)
ORDER(u16, U16)

typedef Integer<u16, i16> I16;
ORDER(i16, I16)

typedef Integer<u32, u32> U32;
ARITHMETIC(u32, U32)
ORDER(u32, U32)

typedef Integer<u32, i32> I32;
ORDER(i32, I32)

typedef Integer<u64, u64> U64;
ARITHMETIC(u64, U64)
ORDER(u64, U64)

typedef Integer<u64, i64> I64;
ORDER(i64, I64)

// Of 0 and 1 the product and the smaller one are the conjunction, the larger one is the disjunction.
BITS(bool, true)
