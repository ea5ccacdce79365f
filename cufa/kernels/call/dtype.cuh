// The element types, the two types of sums, and the conversions between them.
#pragma once

#include "ptx/ptx_common.cuh"

struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};
// E4M3 (Micikevicius et al. 2022): it has no infinity, and NaN has all bits of exponent and
// mantissa set.
struct float8_e4m3fn {
    unsigned char bits;
};
using float32 = float;
using float64 = double;

template <class T>
struct AccumulatorOf {
    using type = float;
};
template <>
struct AccumulatorOf<float64> {
    using type = double;
};
template <class T>
using accumulator_t = typename AccumulatorOf<T>::type;

template <class T>
constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<bfloat16> = true;

__device__ inline float to_acc(float16 x) {
    return ptx::float_from_half(x.bits);
}
__device__ inline float to_acc(bfloat16 x) {
    return ptx::float_from_bfloat16(x.bits);
}
__device__ inline float to_acc(float8_e4m3fn x) {
    const unsigned int magnitude = x.bits & 0x7f;
    if (magnitude == 0x7f) return __int_as_float(0x7fffffff);
    // The four bits of the exponent become the lowest of a float's, whose bias is larger by 127 -
    // 7.
    constexpr float kLacking = 0x1p120f;
    const float value = __int_as_float(magnitude << 20) * kLacking;
    return x.bits & 0x80 ? -value : value;
}
__device__ inline float to_acc(float32 x) {
    return x;
}
__device__ inline double to_acc(float64 x) {
    return x;
}

// The bits of the exponent: only in NaN and infinity all of them are set.
template <class T>
constexpr unsigned int kExponentBits = 0x7c00;
template <>
constexpr unsigned int kExponentBits<bfloat16> = 0x7f80;

template <class T>
__device__ inline bool is_finite(T x) {
    return (x.bits & kExponentBits<T>) != kExponentBits<T>;
}
__device__ inline bool is_finite(float8_e4m3fn x) {
    return (x.bits & 0x7f) != 0x7f;
}
// Only NaN and infinity minus themselves are not 0.
__device__ inline bool is_finite(float32 x) {
    return x - x == 0;
}
// float64 is tested by its bits: the float64 pipe is busy with products.
__device__ inline bool is_finite(float64 x) {
    constexpr int kExponent = 0x7ff00000;  // in the upper half
    return (__double2hiint(x) & kExponent) != kExponent;
}

// Of 16-bit numbers that are not finite: the largest number for infinity, 0 for NaN.
template <class T>
__device__ inline T nearest_finite(T x) {
    const bool is_nan = (x.bits & 0x7fff) > kExponentBits<T>;
    return T{static_cast<unsigned short>(is_nan ? 0 : x.bits - 1)};
}

// Not zero if one of two elements in a word is NaN or infinite. If all bits of an exponent are set,
// adding its lowest bit carries into the sign's place, which is empty.
template <class T>
__device__ inline unsigned int nonfinite_of_pair(unsigned int pair) {
    constexpr unsigned int kMask = kExponentBits<T> << 16 | kExponentBits<T>;
    constexpr unsigned int kLowest = 0x80008000u - kMask;
    return ((pair & kMask) + kLowest) & 0x80008000u;
}

// Rounds to nearest, ties to even.
template <class T>
__device__ inline T from_acc(accumulator_t<T> x) {
    return x;
}
template <>
__device__ inline float16 from_acc<float16>(float x) {
    return {ptx::half_from_float(x)};
}
template <>
__device__ inline bfloat16 from_acc<bfloat16>(float x) {
    return {ptx::bfloat16_from_float(x)};
}
