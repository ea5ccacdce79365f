// Inline PTX from sm_80 on: asynchronous copies into shared memory, and matrix products of 16-bit
// types.
#pragma once

#include "ptx_sm75.cuh"

namespace ptx {

// Starts a copy of Bytes from global to shared memory; if not `inside`, `from` is not read and
// zeros are written. Fewer than 4 bytes are beyond cp.async: those are copied at once.
template <int Bytes>
__device__ inline void copy_async(void* to, const void* from, bool inside) {
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                     "l"(from), "r"(inside ? 16 : 0)
                     : "memory");
    } else if constexpr (Bytes >= 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                     "l"(from), "n"(Bytes), "r"(inside ? Bytes : 0)
                     : "memory");
    } else {
        static_assert(Bytes == 2, "elements have 2 bytes");
        *static_cast<unsigned short*>(to) = inside ? *static_cast<const unsigned short*>(from) : 0;
    }
}

// Waits until all copies that this thread has started are in shared memory.
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// d += a b for 16x16 a and 16x8 b, in float32. With g = lane / 4 and t = lane % 4, a lane has
//   of a: (row g, columns 2t, 2t+1), (g+8, same), (g, columns 2t+8, 2t+9), (g+8, same)
//   of b: (rows 2t, 2t+1, column g), (rows 2t+8, 2t+9, column g)
//   of d: (row g, columns 2t, 2t+1), (row g+8, same)
__device__ inline void mma_m16n8k16_f16(float (&d)[4], const unsigned int (&a)[4], unsigned int b0,
                                        unsigned int b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned int (&a)[4], unsigned int b0,
                                         unsigned int b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to 16 bits each, `low` in the lower half.
__device__ inline unsigned int pack_f16(float low, float high) {
    unsigned int pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline unsigned int pack_bf16(float low, float high) {
    unsigned int pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

}  // namespace ptx
