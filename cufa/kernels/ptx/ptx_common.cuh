// Inline PTX that every arch from sm_75 on has: barriers, conversions and fast functions.
#pragma once

namespace ptx {

// Returns x, which the compiler takes for a new number: what depends on it is recomputed where it
// is needed and not kept in registers in between.
__device__ inline int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ inline unsigned int anew(unsigned int x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ inline float anew(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

// All 64 bits of a product. For a product of 64-bit numbers, the compiler would add zeros to its
// upper half.
struct WideProduct {
    unsigned int low, high;

    __device__ WideProduct(unsigned int a, unsigned int b) {
        asm("{\n"
            ".reg .b64 product;\n"
            "mul.wide.u32 product, %2, %3;\n"
            "mov.b64 {%0, %1}, product;\n"
            "}\n"
            : "=r"(low), "=r"(high)
            : "r"(a), "r"(b));
    }
};

// Copies the highest bit of each half of a word to all bits of that half.
__device__ inline unsigned int spread_signs(unsigned int word) {
    unsigned int spread;
    asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(spread) : "r"(word));
    return spread;
}

// Whether this is compiled by Blackwell's ptxas, which loads operands further ahead.
#if __CUDA_ARCH__ >= 1000
constexpr bool kBlackwell = true;
#else
constexpr bool kBlackwell = false;
#endif

// Barrier `id` of Threads threads of the block: arrive and wait, or only arrive.
template <int Threads>
__device__ inline void named_barrier_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
// The same; returns whether any thread says aye.
template <int Threads>
__device__ inline bool named_barrier_or(int id, bool aye) {
    int any;
    asm volatile(
        "{\n"
        ".reg .pred aye, any;\n"
        "setp.ne.s32 aye, %3, 0;\n"
        "bar.red.or.pred any, %1, %2, aye;\n"
        "selp.s32 %0, 1, 0, any;\n"
        "}\n"
        : "=r"(any)
        : "r"(id), "n"(Threads), "r"(int(aye))
        : "memory");
    return any;
}
template <int Threads>
__device__ inline void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

__device__ inline float float_from_half(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ inline unsigned short half_from_float(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// bfloat16 is the upper half of a float32.
__device__ inline float float_from_bfloat16(unsigned short bits) {
    float x;
    asm("mov.b32 %0, {%1, %2};" : "=f"(x) : "h"(static_cast<unsigned short>(0)), "h"(bits));
    return x;
}

__device__ inline unsigned short bfloat16_from_float(float x) {
    unsigned short bits;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    // Turing has no such conversion: add half of the last kept place, or just less on an even tie.
    unsigned int word;
    asm("mov.b32 %0, %1;" : "=r"(word) : "f"(x));
    const bool nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? 0x7fffu : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
#endif
    return bits;
}

// Rounds to the nearest e4m3, ties to even. What exceeds the largest finite e4m3 becomes that.
__device__ inline unsigned char e4m3_from_float(float x) {
#if __CUDA_ARCH__ >= 890
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(x));
    return bits;
#else
    // There is no such conversion before sm_89.
    constexpr float kLargest = 448, kSmallestNormal = 0x1p-6f;
    constexpr int kDroppedBits = 20, kLowerBias = 127 - 7;
    const unsigned int word = __float_as_uint(x);
    const unsigned int sign = word >> 24 & 0x80u, magnitude = word & 0x7fffffffu;
    const float size = __uint_as_float(magnitude);
    if (size != size) return 0x7fu;
    if (size >= kLargest) return sign | 0x7eu;
    if (size < kSmallestNormal) {
        // A float's last place at 2^14 is that of e4m3's subnormals, so an addition rounds to it.
        constexpr float kShift = 0x1p14f;
        return sign | (__float_as_uint(size + kShift) - __float_as_uint(kShift));
    }
    // Adds half of the last kept place, or just less on an even tie.
    const unsigned int even = magnitude >> kDroppedBits & 1u;
    const unsigned int rounded = magnitude + (1u << (kDroppedBits - 1)) - 1 + even;
    return sign | ((rounded >> kDroppedBits) - (kLowerBias << (23 - kDroppedBits)));
#endif
}

// Four e4m3, the first one in the low byte.
__device__ inline unsigned int pack_e4m3(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
    unsigned int bytes;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(bytes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return bytes;
#else
    return e4m3_from_float(a) | e4m3_from_float(b) << 8 | e4m3_from_float(c) << 16 |
           static_cast<unsigned int>(e4m3_from_float(d)) << 24;
#endif
}

// 2^x within 2 ulp; 0 for -inf; subnormal results are flushed to 0.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2 of x, within 2^-22 between 1/2 and 2, elsewhere within 2^-22 of itself; exact for powers of
// two from 1 on; subnormal x count as 0.
__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x within 1 ulp; subnormal x count as 0.
__device__ inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// a / b within 2 ulp.
__device__ inline float quotient_fast(float a, float b) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// tanh within 2^-11 of itself.
__device__ inline float tanh_fast(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace ptx
