// Inline PTX from sm_89 on: conversions of 8-bit floats.
#pragma once

namespace ptx {

// Four e4m3 as float16, in the order of memory; exact, and NaN stays NaN.
__device__ inline void half_from_e4m3(unsigned int (&pairs)[2], unsigned int four) {
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(four));
}

}  // namespace ptx
