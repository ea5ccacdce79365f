// The twin of cufa/kernels/ptx_sm80.cuh.
#pragma once

#include "ptx_common.cuh"
#include "ptx_sm75.cuh"

namespace ptx {

template <int Bytes>
inline void copy_async(void* to, const void* from, bool inside) {
    if constexpr (Bytes == 2) {
        *static_cast<unsigned short*>(to) = inside ? *static_cast<const unsigned short*>(from) : 0;
    } else {
        static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
        emulator::copy_async(to, from, Bytes, inside ? Bytes : 0);
    }
}

inline void wait_copies() {
    emulator::wait_copies();
}

namespace twin {

using ToFloat = float (*)(unsigned short);

struct MmaOperands {
    const unsigned (&a)[4];
    unsigned b[2];
    const float (&d)[4];
};

// D += A B for 16x16 A and 16x8 B, from and to the fragments of a warp (PTX ISA, "Matrix Fragments
// for mma.m16n8k16 with floating point type").
template <ToFloat to_float>
EMULATOR_UNCHECKED void multiply(const void* const* in, void* const* out, unsigned) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operands = *static_cast<const MmaOperands*>(in[lane]);
        const int group = lane / 4, thread = lane % 4;
        for (int i = 0; i < 8; ++i) {
            const int row = group + i / 2 % 2 * 8, col = thread * 2 + i % 2 + i / 4 * 8;
            a[row][col] = to_float(operands.a[i / 2] >> i % 2 * 16 & 0xffffu);
        }
        for (int i = 0; i < 4; ++i) {
            const int row = thread * 2 + i % 2 + i / 2 * 8;
            b[row][group] = to_float(operands.b[i / 2] >> i % 2 * 16 & 0xffffu);
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operands = *static_cast<const MmaOperands*>(in[lane]);
        auto& d = *static_cast<float (*)[4]>(out[lane]);
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
            float sum = operands.d[i];
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][col];
            d[i] = sum;
        }
    }
}

template <ToFloat to_float>
inline void mma(const char* operation, float (&d)[4], const unsigned (&a)[4], unsigned b0,
                unsigned b1, const char* file, int line) {
    const MmaOperands operands{a, {b0, b1}, d};
    emulator::sync_warp(operation, ~0u, &operands, &d, multiply<to_float>, file, line);
}

}  // namespace twin

inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                             EMULATOR_HERE) {
    twin::mma<float_from_half>("mma.f16", d, a, b0, b1, file, line);
}

inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                              EMULATOR_HERE) {
    twin::mma<float_from_bfloat16>("mma.bf16", d, a, b0, b1, file, line);
}

inline unsigned pack_f16(float low, float high) {
    return static_cast<unsigned>(half_from_float(high)) << 16 | half_from_float(low);
}

inline unsigned pack_bf16(float low, float high) {
    return static_cast<unsigned>(bfloat16_from_float(high)) << 16 | bfloat16_from_float(low);
}

}  // namespace ptx
