// 2^x of many scores, with what that needs of shared memory.
#pragma once

#include "online_softmax.cuh"

// For types that have an instruction for it: nothing.
template <class T>
struct Exp2Table {
    __device__ void init() {}
    __device__ T power(T x) const { return exp2_of(x); }
};

// For float64, whose tensor cores share a pipe with additions and multiplications: 10 of these
// where exp2_of takes 14. x is a multiple of 1/16, whose power is looked up, and a rest for which
// few coefficients will do. The 16 powers lie in all banks, each in its own.
template <>
struct Exp2Table<double> {
    static constexpr int kRoots = 16;
    alignas(128) double roots[kRoots];  // 2^(i / 16)

    // By the whole block, which must meet at a barrier before powers are asked for.
    __device__ void init() {
        if (threadIdx.x < kRoots) roots[threadIdx.x] = exp2_of(threadIdx.x / double(kRoots));
    }

    // 2^x within 2 ulp for x up to 1021; 0 below -1021.
    __device__ double power(double x) const {
        // The coefficients c of 2^r = 1 + r (c[0] + r (c[1] + ...)) for |r| <= 1/32, by
        // interpolation at Chebyshev's points: within 2^-56 of itself.
        constexpr double kCoefficients[] = {
            0x1.62e42fefa39f3p-1, 0x1.ebfbdff82c590p-3,  0x1.c6b08d6f2a289p-5,
            0x1.3b2ab6fb41213p-7, 0x1.5d897e525c216p-10, 0x1.430a1d08ec681p-13,
        };
        constexpr int kLast = sizeof(kCoefficients) / sizeof(double) - 1;
        constexpr double kRounds = 0x1.8p52 / kRoots;  // with it a sum ends with whole sixteenths
        const double shifted = x + kRounds;
        const double r = x - (shifted - kRounds);
        double sum = kCoefficients[kLast];
#pragma unroll
        for (int i = kLast - 1; i >= 0; --i) sum = sum * r + kCoefficients[i];

        const unsigned int sixteenths = __double2loint(shifted), part = sixteenths % kRoots;
        const unsigned int exponent = (sixteenths - part) / kRoots << 20;
        const double root = roots[part];
        const double scale =
            __hiloint2double(__double2hiint(root) + exponent, __double2loint(root));
        const double power = scale * (sum * r) + scale;

        // Upper halves of -1021 and of -infinity: those of all that vanishes lie in between.
        constexpr unsigned int kVanishing = 0xc08fe800, kNegativeInfinity = 0xfff00000;
        const unsigned int upper = __double2hiint(x);
        return upper - kVanishing <= kNegativeInfinity - kVanishing ? 0 : power;
    }
};
