// Inline PTX from sm_75 on: matrices from shared memory into fragments, and the products of Turing.
#pragma once

namespace ptx {

__device__ inline unsigned int shared_address(const void* pointer) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

// Loads four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l /
// 8, and gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix.
__device__ inline void ldmatrix_x4(unsigned int (&d)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, each matrix transposed on the way.
__device__ inline void ldmatrix_x4_trans(unsigned int (&d)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// d += a b for 16x8 a and 8x8 b, in float32. With g = lane / 4 and t = lane % 4, a lane has
//   of a: (row g, columns 2t, 2t+1), (g+8, same)
//   of b: (rows 2t, 2t+1, column g)
//   of d: (row g, columns 2t, 2t+1), (row g+8, same)
__device__ inline void mma_m16n8k8_f16(float (&d)[4], unsigned int a0, unsigned int a1,
                                       unsigned int b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace ptx
