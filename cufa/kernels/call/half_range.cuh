// Powers of two that bring numbers into the range of float16, which has few exponents.
#pragma once

#include "call/dtype.cuh"
#include "call/memory.cuh"
#include "ptx/ptx_sm80.cuh"

// Of float32.
constexpr int kExponentBias = 127, kMantissaBits = 23;

__device__ inline float power_of_two(int exponent) {
    return __int_as_float((exponent + kExponentBias) << kMantissaBits);
}
// The exponent of a number that is not negative, but at least Least.
template <int Least>
__device__ inline int exponent_of(float x) {
    return max((__float_as_int(x) >> kMantissaBits) - kExponentBias, Least);
}

// How rows in bfloat16, which has more exponents, become float16: a row is multiplied by the power
// of two that brings its largest number to float16's largest exponent, if it is a float32, and
// products by the inverse. Numbers small enough to lose bits are below what float32 sums lose
// anyway.
struct PowerToHalf {
    float factor, inverse;

    __device__ explicit PowerToHalf(float number) {
        constexpr int kLargest = 15;
        const int exponent = __float_as_int(number) >> kMantissaBits;
        // For smaller numbers the factor would not be a float.
        const int up = kExponentBias + kLargest - max(exponent, kLargest + 1);
        factor = power_of_two(up);
        inverse = power_of_two(-up);
    }
};

// Raises `largest` to the largest magnitude of some elements of a row.
template <class T, int Count>
__device__ inline void take_largest(float& largest, const Pack<T, Count>& elements) {
#pragma unroll
    for (int e = 0; e < Count; ++e) largest = fmaxf(largest, fabsf(to_acc(elements[e])));
}
// The elements times `factor` in float16, two in a word.
template <class T, int Count>
__device__ inline Pack<unsigned int, Count / 2> float16_pairs(const Pack<T, Count>& elements,
                                                              float factor) {
    Pack<unsigned int, Count / 2> pairs;
#pragma unroll
    for (int e = 0; e < Count; e += 2)
        pairs[e / 2] =
            ptx::pack_f16(to_acc(elements[e]) * factor, to_acc(elements[e + 1]) * factor);
    return pairs;
}
