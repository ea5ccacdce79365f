// Inline PTX from sm_75 on: matrices from shared memory into fragments, and the products of Turing.
#pragma once

namespace ptx {

__device__ inline unsigned int shared_address(const void* pointer) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8, and
// gets elements 2 (l % 4) and the next of row l / 4 of each.
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

}  // namespace ptx
