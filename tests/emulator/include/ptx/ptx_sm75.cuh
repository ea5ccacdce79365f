// The twin of cufa/kernels/ptx/ptx_sm75.cuh.
#pragma once

#include "ptx/ptx_common.cuh"

namespace ptx {

inline unsigned shared_address(const void* pointer) {
    return emulator::shared_address(pointer);
}

namespace twin {

// The fragments of four 8x8 matrices, of which lane l offers row l % 8 of matrix l / 8 (PTX ISA,
// "ldmatrix").
template <bool Transposed>
EMULATOR_UNCHECKED void load_matrices(const void* const* rows, void* const* fragments, unsigned) {
    for (int lane = 0; lane < 32; ++lane) {
        auto& d = *static_cast<unsigned (*)[4]>(fragments[lane]);
        for (int matrix = 0; matrix < 4; ++matrix) {
            d[matrix] = 0;
            for (int e = 0; e < 2; ++e) {
                const int along = lane % 4 * 2 + e, across = lane / 4;
                const int row = Transposed ? along : across, col = Transposed ? across : along;
                const auto* elements =
                    *static_cast<const unsigned short* const*>(rows[8 * matrix + row]);
                d[matrix] |= static_cast<unsigned>(elements[col]) << 16 * e;
            }
        }
    }
}

struct SmallMmaOperands {
    unsigned a[2], b;
    const float (&d)[4];
};

// D += A B for 16x8 A and 8x8 B of float16 (PTX ISA, "Matrix Fragments for mma.m16n8k8").
EMULATOR_UNCHECKED inline void multiply_small_half(const void* const* in, void* const* out,
                                                   unsigned) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operands = *static_cast<const SmallMmaOperands*>(in[lane]);
        const int group = lane / 4, thread = lane % 4;
        for (int i = 0; i < 4; ++i)
            a[group + i / 2 * 8][thread * 2 + i % 2] =
                float_from_half(operands.a[i / 2] >> i % 2 * 16 & 0xffffu);
        for (int i = 0; i < 2; ++i)
            b[thread * 2 + i][group] = float_from_half(operands.b >> i * 16 & 0xffffu);
    }
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operands = *static_cast<const SmallMmaOperands*>(in[lane]);
        auto& d = *static_cast<float (*)[4]>(out[lane]);
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
            float sum = operands.d[i];
            for (int k = 0; k < 8; ++k) sum += a[row][k] * b[k][col];
            d[i] = sum;
        }
    }
}

}  // namespace twin

inline void ldmatrix_x4(unsigned (&d)[4], const void* row, EMULATOR_HERE) {
    emulator::read_shared(row, 16);
    emulator::sync_warp("ldmatrix", ~0u, &row, &d, twin::load_matrices<false>, file, line);
}

inline void ldmatrix_x4_trans(unsigned (&d)[4], const void* row, EMULATOR_HERE) {
    emulator::read_shared(row, 16);
    emulator::sync_warp("ldmatrix.trans", ~0u, &row, &d, twin::load_matrices<true>, file, line);
}

inline void mma_m16n8k8_f16(float (&d)[4], unsigned a0, unsigned a1, unsigned b, EMULATOR_HERE) {
    const twin::SmallMmaOperands operands{{a0, a1}, b, d};
    emulator::sync_warp("mma.m16n8k8.f16", ~0u, &operands, &d, twin::multiply_small_half, file,
                        line);
}

}  // namespace ptx
