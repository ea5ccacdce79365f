// The twin of cufa/kernels/ptx/ptx_sm80.cuh.
#pragma once

#include "ptx/ptx_common.cuh"
#include "ptx/ptx_sm75.cuh"

namespace ptx {

constexpr int kCopiesAtOnce = 256;

template <int Bytes>
__forceinline__ void copy_async(void* to, const void* from, bool inside) {
    if constexpr (Bytes == 1) {
        *static_cast<unsigned char*>(to) = inside ? *static_cast<const unsigned char*>(from) : 0;
    } else if constexpr (Bytes == 2) {
        *static_cast<unsigned short*>(to) = inside ? *static_cast<const unsigned short*>(from) : 0;
    } else {
        static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
        emulator::copy_async(to, from, Bytes, inside ? Bytes : 0);
    }
}

inline void wait_copies() {
    emulator::commit_copies();
    emulator::wait_copies(0);
}

inline void commit_copies() {
    emulator::commit_copies();
}

template <int Groups>
inline void wait_copies_but() {
    emulator::wait_copies(Groups);
}

namespace twin {

using ToFloat = float (*)(unsigned short);

struct HalfOperands {
    const unsigned (&a)[4];
    unsigned b[2];
    const float (&d)[4];
};

// D += A B for 16x16 A and 16x8 B, from and to the fragments of a warp (PTX ISA, "Matrix Fragments
// for mma.m16n8k16 with floating point type").
template <ToFloat to_float>
EMULATOR_UNCHECKED void multiply_half(const void* const* in, void* const* out, unsigned) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operands = *static_cast<const HalfOperands*>(in[lane]);
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
        const auto& operands = *static_cast<const HalfOperands*>(in[lane]);
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
inline void mma_half(const char* operation, float (&d)[4], const unsigned (&a)[4], unsigned b0,
                     unsigned b1, const char* file, int line) {
    const HalfOperands operands{a, {b0, b1}, d};
    emulator::sync_warp(operation, ~0u, &operands, &d, multiply_half<to_float>, file, line);
}

template <class Sum, class Word>
struct WideOperands {
    const Word *a, *b;
    const Sum (&d)[4];
};

// What tensor cores take of a float32 as tf32.
EMULATOR_UNCHECKED inline double value_of(unsigned bits) {
    return __uint_as_float(bits & 0xffffe000u);
}
EMULATOR_UNCHECKED inline double value_of(double x) {
    return x;
}

// A sum as tensor cores keep it: cut off, if it is float32.
EMULATOR_UNCHECKED inline void store_sum(double sum, float& d) {
    d = static_cast<float>(sum);
    if (fabs(static_cast<double>(d)) > fabs(sum)) d = __uint_as_float(__float_as_uint(d) - 1);
}
EMULATOR_UNCHECKED inline void store_sum(double sum, double& d) {
    d = sum;
}

// D += A B for 16 x Depth A and Depth x 8 B (PTX ISA, "Matrix Fragments for mma.m16n8k8" of .tf32
// and "for mma.m16n8k16" of .f64).
template <int Depth, class Sum, class Word>
EMULATOR_UNCHECKED void multiply_wide(const void* const* in, void* const* out, unsigned) {
    double a[16][Depth], b[Depth][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operands = *static_cast<const WideOperands<Sum, Word>*>(in[lane]);
        const int group = lane / 4, thread = lane % 4;
        for (int i = 0; i < Depth / 2; ++i)
            a[group + i % 2 * 8][thread + i / 2 * 4] = value_of(operands.a[i]);
        for (int i = 0; i < Depth / 4; ++i) b[thread + i * 4][group] = value_of(operands.b[i]);
    }
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operands = *static_cast<const WideOperands<Sum, Word>*>(in[lane]);
        auto& d = *static_cast<Sum(*)[4]>(out[lane]);
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
            double sum = operands.d[i];
            for (int k = 0; k < Depth; ++k) sum += a[row][k] * b[k][col];
            store_sum(sum, d[i]);
        }
    }
}

// D += A B for 8x4 A and 4x8 B (PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f64 type").
EMULATOR_UNCHECKED inline void multiply_small(const void* const* in, void* const* out, unsigned) {
    double a[8][4], b[4][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operands = *static_cast<const double (*)[4]>(in[lane]);
        a[lane / 4][lane % 4] = operands[0];
        b[lane % 4][lane / 4] = operands[1];
    }
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operands = *static_cast<const double (*)[4]>(in[lane]);
        auto& d = *static_cast<double (*)[2]>(out[lane]);
        for (int i = 0; i < 2; ++i) {
            d[i] = operands[2 + i];
            for (int k = 0; k < 4; ++k) d[i] += a[lane / 4][k] * b[k][lane % 4 * 2 + i];
        }
    }
}

}  // namespace twin

inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                             EMULATOR_HERE) {
    twin::mma_half<float_from_half>("mma.f16", d, a, b0, b1, file, line);
}

inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                              EMULATOR_HERE) {
    twin::mma_half<float_from_bfloat16>("mma.bf16", d, a, b0, b1, file, line);
}

inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned* a, const unsigned* b, EMULATOR_HERE) {
    const twin::WideOperands<float, unsigned> operands{a, b, d};
    emulator::sync_warp("mma.tf32", ~0u, &operands, &d, twin::multiply_wide<8, float, unsigned>,
                        file, line);
}

inline void mma_m16n8k16_f64(double (&d)[4], const double (&a)[8], const double (&b)[4],
                             EMULATOR_HERE) {
    const twin::WideOperands<double, double> operands{a, b, d};
    emulator::sync_warp("mma.f64", ~0u, &operands, &d, twin::multiply_wide<16, double, double>,
                        file, line);
}

inline void mma_m8n8k4_f64(double& d0, double& d1, double a, double b, EMULATOR_HERE) {
    const double operands[] = {a, b, d0, d1};
    double d[2];
    emulator::sync_warp("mma.m8n8k4.f64", ~0u, &operands, &d, twin::multiply_small, file, line);
    d0 = d[0], d1 = d[1];
}

inline unsigned tf32_of(float size, float x) {
    const unsigned sign = __float_as_uint(x) & 0x80000000u;
    return sign | (__float_as_uint(size) & 0x7fffe000u);
}

inline unsigned pack_f16(float low, float high) {
    return static_cast<unsigned>(half_from_float(high)) << 16 | half_from_float(low);
}

inline unsigned pack_finite_f16(float low, float high) {
    constexpr float kLargest = 65504;
    const auto finite = [&](float x) { return fabsf(x) > kLargest ? copysignf(kLargest, x) : x; };
    return pack_f16(finite(low), finite(high));
}

inline unsigned pack_bf16(float low, float high) {
    return static_cast<unsigned>(bfloat16_from_float(high)) << 16 | bfloat16_from_float(low);
}

}  // namespace ptx
