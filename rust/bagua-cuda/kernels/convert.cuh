// Conversion between float32, float16 and bfloat16: to nearest even; a NaN keeps its sign and upper bits and becomes quiet, also from a type
// to itself.
#pragma once
#include "device.cuh"

template <class To, class From> DEVICE typename To::Raw converted(typename From::Raw raw) {
    const float value = From::load(raw);
    // The only one that is neither rounded nor computed.
    if constexpr (To::SIZE == 4) return To::store(value != value ? quiet(value) : value);
    else return To::store(value);
}
