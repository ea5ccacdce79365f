// Powers of two that bring numbers into the range of float16, which has few exponents.
#pragma once

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

// The power of two that brings a number to float16's largest exponent, if it is a float32.
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
