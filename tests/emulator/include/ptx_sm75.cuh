// The twin of cufa/kernels/ptx_sm75.cuh.
#pragma once

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

}  // namespace twin

inline void ldmatrix_x4(unsigned (&d)[4], const void* row, EMULATOR_HERE) {
    emulator::read_shared(row, 16);
    emulator::sync_warp("ldmatrix", ~0u, &row, &d, twin::load_matrices<false>, file, line);
}

inline void ldmatrix_x4_trans(unsigned (&d)[4], const void* row, EMULATOR_HERE) {
    emulator::read_shared(row, 16);
    emulator::sync_warp("ldmatrix.trans", ~0u, &row, &d, twin::load_matrices<true>, file, line);
}

}  // namespace ptx
