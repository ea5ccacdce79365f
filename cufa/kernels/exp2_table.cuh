// 2^x of many scores, with what that needs of shared memory.
#pragma once

#include "online_softmax.cuh"

// Without a table.
struct Exp2 {
    template <class T>
    __device__ T power(T x) const {
        return exp2_of(x);
    }
};

// For types that have an instruction for it: no table.
template <class T>
struct Exp2Table : Exp2 {
    __device__ void init() {}
};

// For float64: 8 additions and multiplications where exp2_of takes 14. x is a multiple of 1/256,
// whose power is looked up, and a rest for which few coefficients will do. The exponent of power i
// is too small by i / 256: adding all parts of x, and not just whole ones, makes it right.
template <>
struct Exp2Table<double> {
    static constexpr int kRootBits = 8, kRoots = 1 << kRootBits;
    static constexpr int kPart = 20 - kRootBits;  // the bit of a number's upper half for 1 / 256
    alignas(128) double roots[kRoots];            // 2^(i / 256), its exponent less i / 256

    // By the whole block, which must meet at a barrier before powers are asked for.
    __device__ void init() {
        for (int i = threadIdx.x; i < kRoots; i += blockDim.x) {
            const double root = exp2_of(i / double(kRoots));
            roots[i] = __hiloint2double(__double2hiint(root) - (i << kPart), __double2loint(root));
        }
    }

    // 2^x within 2 ulp for x up to 1021; 0 below -1021.
    __device__ double power(double x) const {
        // The coefficients c of 2^r = 1 + r (c[0] + r (c[1] + ...)) for |r| <= 1/512, by
        // interpolation at Chebyshev's points: within 2^-57 of itself.
        constexpr double kCoefficients[] = {0x1.62e42fefa39d9p-1, 0x1.ebfbdff82c585p-3,
                                            0x1.c6b0902b5a0abp-5, 0x1.3b2ab83eadfb0p-7};
        constexpr int kLast = sizeof(kCoefficients) / sizeof(double) - 1;
        constexpr double kRounds = 0x1.8p52 / kRoots;  // with it a sum ends with whole parts
        const double shifted = x + kRounds;
        const double r = x - (shifted - kRounds);
        double sum = kCoefficients[kLast];
#pragma unroll
        for (int i = kLast - 1; i >= 0; --i) sum = sum * r + kCoefficients[i];

        const unsigned int parts = __double2loint(shifted);
        const double root = roots[parts % kRoots];
        const double scale =
            __hiloint2double(__double2hiint(root) + (parts << kPart), __double2loint(root));
        const double power = scale * (sum * r) + scale;

        // Upper halves of -1021 and of -infinity: those of all that vanishes lie in between.
        constexpr unsigned int kVanishing = 0xc08fe800, kNegativeInfinity = 0xfff00000;
        const unsigned int upper = __double2hiint(x);
        return upper - kVanishing <= kNegativeInfinity - kVanishing ? 0 : power;
    }
};
