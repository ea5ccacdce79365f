// Constants and functions of sums, and how threads add them up.
#pragma once

#include "call/config.cuh"

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;
// Where numbers are divided by the scale of scores, it is at least this: a smaller one leaves all
// scores at 0 anyway.
constexpr float kSmallestScale = 1e-30f;

__device__ inline float exp2_of(float x) {
    return ptx::exp2_fast(x);
}

// The coefficients c of 2^r = 1 + r (c[0] + r (c[1] + ...)) for |r| <= 1/2, by interpolation at
// Chebyshev points: within 2^-55 of 2^r.
__device__ constexpr double kExp2Coefficients[] = {
    0x1.62e42fefa39efp-1,  0x1.ebfbdff82c598p-3,  0x1.c6b08d704a0c2p-5,  0x1.3b2ab6fba1ddap-7,
    0x1.5d87fe78a5276p-10, 0x1.430913096fd9fp-13, 0x1.ffcbfc670dcd4p-17, 0x1.62bfd47773353p-20,
    0x1.b524fae627834p-24, 0x1.e6063f7217bc6p-28, 0x1.e9d3fe3952179p-32,
};

// 2^x within 1 ulp, without branches, so that many can be computed at once; 0 below 2^-1021,
// infinity above 2^1021.
__device__ inline double exp2_of(double x) {
    constexpr double kRounds = 0x1.8p52;  // a sum with it ends with the nearest integer
    const double shifted = x + kRounds;
    const double r = x - (shifted - kRounds);
    constexpr int kLast = sizeof(kExp2Coefficients) / sizeof(double) - 1;
    double sum = kExp2Coefficients[kLast];
#pragma unroll
    for (int i = kLast - 1; i >= 0; --i) sum = sum * r + kExp2Coefficients[i];
    const double power = sum * r + 1;
    const unsigned int exponent = static_cast<unsigned int>(__double2loint(shifted)) << 20;
    const unsigned int high = __double2hiint(power) + exponent;

    constexpr unsigned int kInfinity = 0x7ff00000, kLargest = 0x408fe800;  // upper half of 1021
    const unsigned int upper = __double2hiint(x), size = upper & 0x7fffffff;
    if (size < kLargest) return __hiloint2double(high, __double2loint(power));
    const bool vanishes = size != upper && size <= kInfinity;  // otherwise it is positive or NaN
    return __hiloint2double(vanishes ? 0 : max(size, kInfinity), 0);
}
__device__ inline float log2_of(float x) {
    return log2f(x);
}
__device__ inline double log2_of(double x) {
    return log2(x);
}

// tanh. For 8-bit and 16-bit operands, scores are no more precise than the fast tanh.
__device__ inline float tanh_of(float x) {
    return sizeof(scalar_t) <= 2 ? ptx::tanh_fast(x) : tanhf(x);
}
__device__ inline double tanh_of(double x) {
    return tanh(x);
}

__device__ inline acc_t negative_infinity() {
    return -__int_as_float(0x7f800000);
}
__device__ inline acc_t not_a_number() {
    return __int_as_float(0x7fffffff);
}

// max and sum over the Lanes neighbouring threads that share a row. If one has NaN, they may get
// different maxima. That does no harm: such a row's sum of weights is NaN, and so is its output.
template <int Lanes>
__device__ inline acc_t lanes_max(acc_t x) {
#pragma unroll
    for (int offset = Lanes / 2; offset > 0; offset /= 2) {
        const acc_t other = __shfl_xor_sync(0xffffffffu, x, offset);
        x = x > other ? x : other;
    }
    return x;
}
template <int Lanes>
__device__ inline acc_t lanes_sum(acc_t x) {
#pragma unroll
    for (int offset = Lanes / 2; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, offset);
    }
    return x;
}

// The sum over all threads of a block, returned to each of them. `warps` serves one sum: no barrier
// follows, so some threads may still read it.
template <int Threads>
using WarpSums = acc_t[Threads / 32];

template <int Threads>
__device__ inline acc_t block_sum(acc_t x, WarpSums<Threads>& warps) {
    x = lanes_sum<32>(x);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < Threads / 32; ++w) x += warps[w];
    return x;
}
