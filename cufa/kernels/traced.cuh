// What the code of traced functions (cufa/expression.py) is written with. It computes as NumPy
// does, numbers that are not integers in acc_t.
#pragma once

#include "online_softmax.cuh"

using int64 = long long;

// An array of any strides, in elements, that reaches over less than 2^31 of them. As in C, nobody
// looks whether an index is in it.
template <class T, int Axes>
struct ArrayOf {
    const T* data;
    long long strides[Axes];

    template <class... Indices>
    __device__ const T& at(Indices... indices) const {
        const int of_axes[Axes] = {static_cast<int>(indices)...};
        int offset = 0;
#pragma unroll
        for (int axis = 0; axis < Axes; ++axis) {
            offset += of_axes[axis] * static_cast<int>(strides[axis]);
        }
        return data[offset];
    }
};

__device__ inline acc_t not_a_number() {
    return __int_as_float(0x7fffffff);
}

__device__ inline float exp_of(float x) {
    return expf(x);
}
__device__ inline double exp_of(double x) {
    return exp(x);
}
__device__ inline float log_of(float x) {
    return logf(x);
}
__device__ inline double log_of(double x) {
    return log(x);
}
__device__ inline float log1p_of(float x) {
    return log1pf(x);
}
__device__ inline double log1p_of(double x) {
    return log1p(x);
}
__device__ inline float sqrt_of(float x) {
    return sqrtf(x);
}
__device__ inline double sqrt_of(double x) {
    return sqrt(x);
}
__device__ inline float sin_of(float x) {
    return sinf(x);
}
__device__ inline double sin_of(double x) {
    return sin(x);
}
__device__ inline float cos_of(float x) {
    return cosf(x);
}
__device__ inline double cos_of(double x) {
    return cos(x);
}
__device__ inline float floor_of(float x) {
    return floorf(x);
}
__device__ inline double floor_of(double x) {
    return floor(x);
}
__device__ inline float power(float x, float y) {
    return powf(x, y);
}
__device__ inline double power(double x, double y) {
    return pow(x, y);
}

// Of NaN and anything else these are NaN.
template <class T>
__device__ inline T minimum(T a, T b) {
    return a < b || a != a ? a : b;
}
template <class T>
__device__ inline T maximum(T a, T b) {
    return a > b || a != a ? a : b;
}
template <class T>
__device__ inline T absolute(T x) {
    return x < 0 ? -x : x;
}

// Quotients are rounded down, so that remainders have the divisor's sign.
template <class T>
__device__ inline T floor_divide(T a, T b) {
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
__device__ inline float floor_divide(float a, float b) {
    return floorf(a / b);
}
__device__ inline double floor_divide(double a, double b) {
    return floor(a / b);
}
template <class T>
__device__ inline T remainder_of(T a, T b) {
    return a - b * floor_divide(a, b);
}

template <class T>
__device__ inline T inverted(T x) {
    return ~x;
}
__device__ inline bool inverted(bool x) {
    return !x;
}
