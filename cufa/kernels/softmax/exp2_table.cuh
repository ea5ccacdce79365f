// 2^x of many scores, with the shared memory that it needs.
#pragma once

#include "call/numbers.cuh"

// Without a table.
struct Exp2 {
    template <class T>
    __device__ T power(T x) const {
        return exp2_of(x);
    }
};

// No table for types that have an instruction.
template <class T, int RootBits>
struct Exp2Table : Exp2 {
    template <int AtOnce = 1>
    __device__ void init() {}
};

// The coefficients c of 2^r = 1 + r (c[0] + r (c[1] + ...)), by interpolation at Chebyshev points:
// for |r| <= 1/256 and 1/2048, within 0x1.4p-53 and 0x1.3p-53 of 2^r.
template <int RootBits>
struct Exp2Coefficients;
template <>
struct Exp2Coefficients<7> {
    static constexpr int kCount = 4;
    static constexpr double kOf[kCount] = {0x1.62e42fefa3892p-1, 0x1.ebfbdff82c4edp-3,
                                           0x1.c6b0985c8a1bcp-5, 0x1.3b2abc07c93d0p-7};
};
template <>
struct Exp2Coefficients<10> {
    static constexpr int kCount = 3;
    static constexpr double kOf[kCount] = {0x1.62e42fefa39efp-1, 0x1.ebfbe033445b4p-3,
                                           0x1.c6b08d910ecbdp-5};
};

// For float64: 8 additions and multiplications, or 7, instead of the 14 of exp2_of. x is split into
// a multiple of 1 / kRoots, whose power is looked up, and a rest that needs few coefficients. The
// exponent of power i is stored i / kRoots too small: adding all parts of x to it, not just whole
// ones, corrects it.
template <int RootBits>
struct Exp2Table<double, RootBits> {
    static constexpr int kRoots = 1 << RootBits;
    static constexpr int kPart = 20 - RootBits;  // the bit of a number's upper half for 1 / kRoots
    alignas(128) double roots[kRoots];           // 2^(i / kRoots), its exponent less i / kRoots

    // Called by the whole block, which must pass a barrier before powers are used. Each thread
    // computes AtOnce roots at a time, because one by one they would wait for each other. AtOnce
    // must divide the number of roots of each thread.
    template <int AtOnce = 1>
    __device__ void init() {
        for (int first = threadIdx.x; first < kRoots; first += AtOnce * blockDim.x)
#pragma unroll
            for (int n = 0; n < AtOnce; ++n) {
                const int i = first + n * blockDim.x;
                const double root = exp2_of(i / double(kRoots));
                roots[i] =
                    __hiloint2double(__double2hiint(root) - (i << kPart), __double2loint(root));
            }
    }

    // 2^x within 3 ulp for x up to 1021; 0 below -1021.
    __device__ double power(double x) const {
        using Coefficients = Exp2Coefficients<RootBits>;
        constexpr double kRounds = 0x1.8p52 / kRoots;  // added to x, rounds it to whole parts

        // The upper halves of -1021 and -infinity. If that of x is between them, its power
        // vanishes. x is then replaced by -1023 + 2^-11: the power of that has exponent 0, so it is
        // the number 0.
        constexpr unsigned int kVanishing = 0xc08fe800, kNegativeInfinity = 0xfff00000;
        constexpr int kVanished = 0xc08ff7ff;
        const unsigned int upper = __double2hiint(x);
        if (upper - kVanishing <= kNegativeInfinity - kVanishing)
            x = __hiloint2double(kVanished, __double2loint(x));
        const double shifted = x + kRounds;
        const double r = x - (shifted - kRounds);
        double sum = Coefficients::kOf[Coefficients::kCount - 1];
#pragma unroll
        for (int i = Coefficients::kCount - 2; i >= 0; --i) sum = sum * r + Coefficients::kOf[i];

        const unsigned int parts = __double2loint(shifted);
        const double root = roots[parts % kRoots];
        const double scale =
            __hiloint2double(__double2hiint(root) + (parts << kPart), __double2loint(root));
        return scale * (sum * r) + scale;
    }
};
