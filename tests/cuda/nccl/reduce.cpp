// Arithmetic: in an order that is not that of the ranks, with the rounding of an average before the sum.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "comm.h"

namespace nccl {
namespace {

// A bfloat16, by way of float32.
struct Bfloat16 {
    std::uint16_t bits;
    operator float() const {
        const std::uint32_t wide = std::uint32_t{bits} << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
    static Bfloat16 of(float value) {
        std::uint32_t wide;
        std::memcpy(&wide, &value, 4);
        if (value != value) return {static_cast<std::uint16_t>(wide >> 16 | 0x40)};
        return {static_cast<std::uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
    }
};

template <class T> T load(const unsigned char *from, std::size_t at) {
    T value;
    std::memcpy(&value, from + at * sizeof(T), sizeof(T));
    return value;
}

// A minimum that loses a NaN, as NCCL's may.
template <class A> A combined(ncclRedOp_t op, A a, A b) {
    if (op == ncclMin) return b < a || a != a ? b : a;
    if (op == ncclMax) return b > a || a != a ? b : a;
    if constexpr (std::is_integral_v<A>) {
        using U = std::make_unsigned_t<A>;
        const auto x = static_cast<std::uint64_t>(static_cast<U>(a)), y = static_cast<std::uint64_t>(static_cast<U>(b));
        return static_cast<A>(op == ncclProd ? x * y : x + y);
    } else {
        return op == ncclProd ? a * b : a + b;
    }
}

template <class T, class A>
void all(ncclRedOp_t op, unsigned char *out, const std::vector<const unsigned char *> &from, std::size_t count) {
    const auto ranks = static_cast<int>(from.size());
    const bool scaled = op == ncclAvg && !std::is_integral_v<A>;
    for (std::size_t at = 0; at < count; ++at) {
        const auto value = [&](int rank) {
            const A one = static_cast<A>(load<T>(from[static_cast<std::size_t>(rank)], at));
            if constexpr (!std::is_integral_v<A>)
                if (scaled) return one * (A{1} / static_cast<A>(ranks));
            return one;
        };
        A sum = value(ranks - 1);
        for (int rank = 0; rank < ranks - 1; ++rank) sum = combined<A>(op, sum, value(rank));
        if (op == ncclAvg && !scaled) sum = static_cast<A>(sum / static_cast<A>(ranks));
        T made;
        if constexpr (std::is_same_v<T, Bfloat16>)
            made = Bfloat16::of(sum);
        else
            made = static_cast<T>(sum);
        std::memcpy(out + at * sizeof(T), &made, sizeof(T));
    }
}

}  // namespace

std::size_t size_of(ncclDataType_t dtype) {
    constexpr std::size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return dtype >= 0 && dtype < 10 ? SIZES[dtype] : 0;
}

void combine(ncclDataType_t dtype, ncclRedOp_t op, unsigned char *out, const std::vector<const unsigned char *> &from,
             std::size_t count) {
    switch (dtype) {
        case ncclInt8: return all<std::int8_t, std::int8_t>(op, out, from, count);
        case ncclUint8: return all<std::uint8_t, std::uint8_t>(op, out, from, count);
        case ncclInt32: return all<std::int32_t, std::int32_t>(op, out, from, count);
        case ncclUint32: return all<std::uint32_t, std::uint32_t>(op, out, from, count);
        case ncclInt64: return all<std::int64_t, std::int64_t>(op, out, from, count);
        case ncclUint64: return all<std::uint64_t, std::uint64_t>(op, out, from, count);
        case ncclFloat16: return all<_Float16, float>(op, out, from, count);
        case ncclFloat32: return all<float, float>(op, out, from, count);
        case ncclFloat64: return all<double, double>(op, out, from, count);
        case ncclBfloat16: return all<Bfloat16, float>(op, out, from, count);
    }
}

}  // namespace nccl
