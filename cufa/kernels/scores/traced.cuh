// The functions that generated code for traced functions (cufa/traced/expression.py) uses. They
// compute as NumPy does; numbers that are not integers are acc_t.
#pragma once

#include "call/numbers.cuh"

using int64 = long long;

// A query's or a key's index, or a sum of such indices, in two parts. `base` is the same for many
// of a thread's scores; `offset` is a constant where loops are unrolled. So converting it to float
// is one addition to a base that is converted once, and elements that it selects have one address
// and constants from it.
struct SplitIndex {
    int base, offset;

    __device__ SplitIndex(int base, int offset = 0) : base(base), offset(offset) {}

    __device__ explicit operator int() const { return base + offset; }
    __device__ explicit operator acc_t() const {
        return static_cast<acc_t>(base) + static_cast<acc_t>(offset);
    }
};
__device__ inline SplitIndex operator+(SplitIndex a, SplitIndex b) {
    return {a.base + b.base, a.offset + b.offset};
}
__device__ inline SplitIndex operator-(SplitIndex a, SplitIndex b) {
    return {a.base - b.base, a.offset - b.offset};
}
__device__ inline SplitIndex operator-(SplitIndex a) {
    return {-a.base, -a.offset};
}

__device__ inline SplitIndex split(SplitIndex index) {
    return index;
}
__device__ inline SplitIndex split(int64 index) {
    return static_cast<int>(index);
}

// An array with any strides, in elements. If it is Adjacent, the last stride counts as 1. Offsets
// of elements, also without that of the last index, fit into an int: the host checks this. As in C,
// indices are not checked.
template <class T, int Axes, bool Adjacent>
struct ArrayOf {
    const T* data;
    long long strides[Axes];

    // Elements whose last indices have the same base are read at constants from one address.
    template <class... Indices>
    __device__ const T& at(Indices... indices) const {
        const SplitIndex of_axes[Axes] = {split(indices)...};
        int base = 0;
#pragma unroll
        for (int axis = 0; axis + Adjacent < Axes; ++axis)
            base += int(of_axes[axis]) * static_cast<int>(strides[axis]);
        if constexpr (!Adjacent) return data[base];
        const auto& [last_base, last_offset] = of_axes[Axes - 1];
        return (data + (base + last_base))[last_offset];
    }
};

// The gradient of such an array, contiguous. Its sums in the workspace begin at `first`.
template <class T, int Axes>
struct GradientOf {
    T* data;
    long long first;
    long long lengths[Axes];

    __device__ int count() const {
        int count = 1;
#pragma unroll
        for (int axis = 0; axis < Axes; ++axis) count *= static_cast<int>(lengths[axis]);
        return count;
    }

    // The index of an element's sum.
    template <class... Indices>
    __device__ int place(Indices... indices) const {
        const SplitIndex of_axes[Axes] = {split(indices)...};
        int row = 0;
#pragma unroll
        for (int axis = 0; axis < Axes - 1; ++axis)
            row = (row + int(of_axes[axis])) * static_cast<int>(lengths[axis + 1]);
        const auto& [base, offset] = of_axes[Axes - 1];
        return static_cast<int>(first) + row + base + offset;
    }

    // Rounds the sum at `place`, if it belongs to this array.
    __device__ void write(const acc_t* sums, int place) const {
        const int element = place - static_cast<int>(first);
        if (element < 0 || element >= count()) return;
        data[element] = from_acc<T>(static_cast<accumulator_t<T>>(sums[place]));
    }
};

// The derivative of a score by an element of an array, and the index of that element's sum.
struct ElementSlope {
    int place;
    acc_t slope;
};

// A quotient by a constant c with all bits of its reciprocal: exact where a float is, otherwise
// within 1 ulp, and without the branch of a division.
__device__ inline float quotient_by(float x, float c) {
    const float reciprocal = 1 / c;
    const float quotient = x * reciprocal;
    const float corrected = fmaf(fmaf(-quotient, c, x), reciprocal, quotient);
    return fabsf(quotient) <= 0x1.fffffep127f ? corrected : quotient;
}
__device__ inline double quotient_by(double x, double c) {
    return x / c;
}

// For 8-bit and 16-bit operands, scores are no more precise than a fast quotient or logarithm.
__device__ inline acc_t quotient_of_score(acc_t a, acc_t b) {
    return sizeof(scalar_t) <= 2 ? ptx::quotient_fast(a, b) : a / b;
}
__device__ inline float logarithm(float x) {
    if constexpr (sizeof(scalar_t) > 2) return logf(x);
    // ln 2 in two parts, of one sign for infinities: logarithms of powers of two are as precise as
    // a float.
    constexpr float kUpper = 0x1.62e42ep-1f, kLower = kLn2 - kUpper;
    const float log2 = ptx::log2_fast(x);
    return fmaf(log2, kUpper, log2 * kLower);
}
__device__ inline double logarithm(double x) {
    return log(x);
}
__device__ inline acc_t binary_logarithm(acc_t x) {
    return sizeof(scalar_t) <= 2 ? ptx::log2_fast(x) : log2_of(x);
}

__device__ inline float exp_of(float x) {
    return expf(x);
}
__device__ inline double exp_of(double x) {
    return exp(x);
}
__device__ inline float expm1_of(float x) {
    return expm1f(x);
}
__device__ inline double expm1_of(double x) {
    return expm1(x);
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
__device__ inline float rint_of(float x) {
    return rintf(x);
}
__device__ inline double rint_of(double x) {
    return rint(x);
}
__device__ inline float power(float x, float y) {
    return powf(x, y);
}
__device__ inline double power(double x, double y) {
    return pow(x, y);
}

// NaN if either argument is NaN.
template <class T>
__device__ inline T minimum(T a, T b) {
    return a < b || a != a ? a : b;
}
template <class T>
__device__ inline T maximum(T a, T b) {
    return a > b || a != a ? a : b;
}

// Integers wrap around.
template <class T>
__device__ inline T sum_of(T a, T b) {
    return static_cast<T>(static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b));
}
template <class T>
__device__ inline T difference_of(T a, T b) {
    return static_cast<T>(static_cast<unsigned long long>(a) - static_cast<unsigned long long>(b));
}
template <class T>
__device__ inline T product_of(T a, T b) {
    return static_cast<T>(static_cast<unsigned long long>(a) * static_cast<unsigned long long>(b));
}
template <class T>
__device__ inline T negative_of(T x) {
    return difference_of<T>(0, x);
}
template <class T>
__device__ inline T absolute(T x) {
    return x < 0 ? negative_of(x) : x;
}
__device__ inline float absolute(float x) {
    return fabsf(x);
}
__device__ inline double absolute(double x) {
    return fabs(x);
}

// The remainder of a by b, with a's sign. NumPy defines what C does not: integers by 0 give 0.
template <class T>
__device__ inline T rest_of(T a, T b) {
    return b == 0 || b == -1 ? 0 : a % b;
}
__device__ inline float rest_of(float a, float b) {
    return fmodf(a, b);
}
__device__ inline double rest_of(double a, double b) {
    return fmod(a, b);
}
template <class T>
__device__ inline bool is_across(T rest, T b) {
    return rest != 0 && (rest < 0) != (b < 0);
}

// Quotients are rounded down, so remainders have the divisor's sign, even if they are 0.
template <class T>
__device__ inline T remainder_of(T a, T b) {
    const T rest = rest_of(a, b);
    return is_across(rest, b) ? rest + b : rest;
}
__device__ inline float remainder_of(float a, float b) {
    const float remainder = remainder_of<float>(a, b);
    return remainder == 0 ? (b < 0 ? -0.0f : 0.0f) : remainder;
}
__device__ inline double remainder_of(double a, double b) {
    const double remainder = remainder_of<double>(a, b);
    return remainder == 0 ? (b < 0 ? -0.0 : 0.0) : remainder;
}
// For integers, 0 if b is 0. The least integer is its own negative.
template <class T>
__device__ inline T floor_divide(T a, T b) {
    if (b == 0) return 0;
    if (b == -1) return negative_of(a);
    return a / b - is_across(a % b, b);
}
// After subtracting the remainder, which is exact, the quotient is whole except for rounding. If it
// is 0, it has the sign of a / b, which is finite then.
__device__ inline float floor_divide(float a, float b) {
    const float quotient = a / b, rest = rest_of(a, b);
    const float whole = rintf((a - rest) / b - is_across(rest, b));
    return b == 0 ? quotient : whole == 0 ? quotient * 0 : whole;
}
__device__ inline double floor_divide(double a, double b) {
    const double quotient = a / b, rest = rest_of(a, b);
    const double whole = rint((a - rest) / b - is_across(rest, b));
    return b == 0 ? quotient : whole == 0 ? quotient * 0 : whole;
}

// Shifts by a negative number, or by more bits than there are, shift out all bits.
template <class T>
__device__ inline bool has_bit(T number) {
    return number >= 0 && number < static_cast<T>(8 * sizeof(T));
}
template <class T>
__device__ inline T shifted_left(T x, T by) {
    return has_bit(by) ? static_cast<T>(static_cast<unsigned long long>(x) << by) : 0;
}
template <class T>
__device__ inline T shifted_right(T x, T by) {
    return has_bit(by) ? x >> by : x < 0 ? -1 : 0;
}

template <class T>
__device__ inline T inverted(T x) {
    return ~x;
}
__device__ inline bool inverted(bool x) {
    return !x;
}
