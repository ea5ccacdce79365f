// Inline PTX from sm_80 on: asynchronous copies into shared memory, and matrix products. For
// float16, sm_75 has another way to do it.
#pragma once

#include "ptx/ptx_common.cuh"
#include "ptx/ptx_sm75.cuh"

namespace ptx {

// At most how many copies are started together. Before sm_80, each occupies registers until it
// arrives, and eight per thread are enough to keep memory busy.
#if __CUDA_ARCH__ >= 800
constexpr int kCopiesAtOnce = 256;
#else
constexpr int kCopiesAtOnce = 8;
#endif

// Starts a copy of Bytes from global to shared memory. If not `inside`, `from` is not read and
// zeros are written. cp.async cannot copy fewer than 4 bytes: those copies are synchronous, as all
// are before sm_80.
template <int Bytes>
__device__ inline void copy_async(void* to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                     "l"(from), "r"(inside ? 16 : 0)
                     : "memory");
        return;
    } else if constexpr (Bytes >= 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                     "l"(from), "n"(Bytes), "r"(inside ? Bytes : 0)
                     : "memory");
        return;
    }
#endif
    if constexpr (Bytes == 1) {
        *static_cast<unsigned char*>(to) = inside ? *static_cast<const unsigned char*>(from) : 0;
    } else {
        struct alignas(Bytes) Chunk {
            unsigned short halves[Bytes / 2];
        };
        *static_cast<Chunk*>(to) = inside ? *static_cast<const Chunk*>(from) : Chunk{};
    }
}

// Waits until all copies that this thread has started are in shared memory.
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Makes a group of the copies that this thread has started since the group before.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until this thread's copies are in shared memory, except those of its last Groups groups.
template <int Groups>
__device__ inline void wait_copies_but() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
#endif
}

// d += a b for 16x16 a and 16x8 b, in float32. With g = lane / 4 and t = lane % 4, a lane has
//   of a: (row g, columns 2t, 2t+1), (g+8, same), (g, columns 2t+8, 2t+9), (g+8, same)
//   of b: (rows 2t, 2t+1, column g), (rows 2t+8, 2t+9, column g)
//   of d: (row g, columns 2t, 2t+1), (row g+8, same)
__device__ inline void mma_m16n8k16_f16(float (&d)[4], const unsigned int (&a)[4], unsigned int b0,
                                        unsigned int b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    mma_m16n8k8_f16(d, a[0], a[1], b0);
    mma_m16n8k8_f16(d, a[2], a[3], b1);
#endif
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

// d += a b for 16x8 a and 8x8 b. Of each float32 operand only the upper 19 bits count; sums are
// float32, truncated. With g = lane / 4 and t = lane % 4, a lane has
//   of a: (row g, column t), (g+8, t), (g, t+4), (g+8, t+4)
//   of b: (row t, column g), (t+4, g)
//   of d: (row g, columns 2t, 2t+1), (row g+8, same)
__device__ inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned int* a,
                                        const unsigned int* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A tf32 with the magnitude `size`, which is not negative, and the sign of x. If size is |x|, x
// truncated.
__device__ inline unsigned int tf32_of(float size, float x) {
    constexpr unsigned int kElsewhere = 0x80001fff;  // the sign, and bits that a tf32 lacks
    unsigned int bits;
    // kElsewhere ? x & ~size : size, bit by bit.
    asm("lop3.b32 %0, %1, %2, %3, 0x58;" : "=r"(bits) : "f"(size), "f"(x), "n"(kElsewhere));
    return bits;
}

// d0, d1 += a b for 8x4 a and 4x8 b; a lane has (row g, column t) of a, (t, g) of b and (g, 2t),
// (g, 2t+1) of d.
__device__ inline void mma_m8n8k4_f64(double& d0, double& d1, double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d0), "+d"(d1)
                 : "d"(a), "d"(b));
}

// d += a b for 16x16 a and 16x8 b. With g = lane / 4 and t = lane % 4, a lane has
//   of a: (row g, column t), (g+8, t), then the same of columns t+4, t+8 and t+12
//   of b: (row t, column g), then the same of rows t+4, t+8 and t+12
//   of d: (row g, columns 2t, 2t+1), (row g+8, same)
__device__ inline void mma_m16n8k16_f64(double (&d)[4], const double (&a)[8],
                                        const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
          "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
#else
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            mma_m8n8k4_f64(d[2 * half], d[2 * half + 1], a[2 * k + half], b[k]);
#endif
}

// Two floats rounded to 16 bits each, `low` in the lower half.
__device__ inline unsigned int pack_f16(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned int pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return static_cast<unsigned int>(half_from_float(high)) << 16 | half_from_float(low);
#endif
}
// The same, but numbers that are too large become the largest one.
__device__ inline unsigned int pack_finite_f16(float low, float high) {
    unsigned int pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline unsigned int pack_bf16(float low, float high) {
    unsigned int pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

}  // namespace ptx
