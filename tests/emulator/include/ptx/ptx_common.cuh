// The twin of cufa/kernels/ptx/ptx_common.cuh.
#pragma once

namespace ptx {

inline int anew(int x) {
    return x;
}
inline unsigned int anew(unsigned int x) {
    return x;
}
inline float anew(float x) {
    return x;
}

struct WideProduct {
    unsigned int low, high;

    WideProduct(unsigned int a, unsigned int b) {
        const unsigned long long product = static_cast<unsigned long long>(a) * b;
        low = static_cast<unsigned int>(product);
        high = static_cast<unsigned int>(product >> 32);
    }
};

inline unsigned int spread_signs(unsigned int word) {
    return (word >> 31 & 1) * 0xffff0000u | (word >> 15 & 1) * 0x0000ffffu;
}

constexpr bool kBlackwell = false;

template <int Threads>
inline void named_barrier_sync(int id, EMULATOR_HERE) {
    emulator::named_barrier("bar.sync", id, Threads, true, file, line);
}
template <int Threads>
inline bool named_barrier_or(int id, bool aye, EMULATOR_HERE) {
    return emulator::vote_at_named_barrier("barrier.red", id, Threads, aye, file, line) > 0;
}
template <int Threads>
inline void named_barrier_arrive(int id, EMULATOR_HERE) {
    emulator::named_barrier("bar.arrive", id, Threads, false, file, line);
}

inline float float_from_half(unsigned short bits) {
    const unsigned magnitude = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
    // Moved to where a float32 has its exponent and mantissa, it is 2^112 times too small, and so
    // are subnormal ones.
    float x = __uint_as_float(magnitude << 13) * 0x1p112f;
    if (magnitude >= 0x7c00u) x = __uint_as_float(0x7f800000u | magnitude << 13);  // infinity, NaN
    return __uint_as_float(__float_as_uint(x) | sign);
}

// Adding 2^k rounds to a multiple of the last place of 2^k, to nearest and ties to even.
inline unsigned short half_from_float(float x) {
    const unsigned word = __float_as_uint(x), sign = word >> 16 & 0x8000u;
    const unsigned magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // from 65520 on: infinity
    if (magnitude < 0x38800000u) {                        // below 2^-14: subnormal
        return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
    }
    const unsigned rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return sign | (rounded - 0x38000000u) >> 13;
}

inline float float_from_bfloat16(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

inline unsigned short bfloat16_from_float(float x) {
    const unsigned word = __float_as_uint(x);
    if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (word + 0x7fffu + (word >> 16 & 1u)) >> 16;
}

namespace twin {

constexpr int kE4m3Bias = 7, kE4m3MantissaBits = 3;
constexpr unsigned kE4m3Nan = 0x7f;

inline float float_from_e4m3(unsigned short bits) {
    const unsigned magnitude = bits & 0x7f, mantissa = magnitude & 7;
    const int exponent = magnitude >> kE4m3MantissaBits;
    float value = exponent == 0 ? mantissa : mantissa + 8;
    value = __builtin_ldexpf(value, (exponent == 0 ? 1 : exponent) - kE4m3Bias - kE4m3MantissaBits);
    if (magnitude == kE4m3Nan) value = __builtin_nanf("");
    return bits & 0x80 ? -value : value;
}

// To the nearest, ties to even; the largest finite for what is beyond it.
inline unsigned e4m3_from_float(float x) {
    const unsigned sign = __builtin_signbit(x) ? 0x80 : 0;
    if (x != x) return kE4m3Nan;
    const float magnitude = fabsf(x);
    // Codes are in the order of their values: the last one that is not above, or the next.
    unsigned low = 0, high = kE4m3Nan;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        (float_from_e4m3(middle) <= magnitude ? low : high) = middle;
    }
    if (high == kE4m3Nan) return sign | low;
    const float below = magnitude - float_from_e4m3(low), above = float_from_e4m3(high) - magnitude;
    return sign | (above < below || (above == below && low % 2 == 1) ? high : low);
}

}  // namespace twin

inline unsigned char e4m3_from_float(float x) {
    return twin::e4m3_from_float(x);
}
inline unsigned int pack_e4m3(float a, float b, float c, float d) {
    return twin::e4m3_from_float(a) | twin::e4m3_from_float(b) << 8 |
           twin::e4m3_from_float(c) << 16 | twin::e4m3_from_float(d) << 24;
}

// The instruction is within 2 ulp; this is as good as the C library's.
inline float exp2_fast(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

// The instruction is within 2^-22; this is as good as the C library's.
inline float log2_fast(float x) {
    return log2f(fabsf(x) < 0x1p-126f ? 0 * x : x);
}

// The instruction is within 1 ulp; this is the nearest.
inline float reciprocal_fast(float x) {
    return 1 / (fabsf(x) < 0x1p-126f ? 0 * x : x);
}

// The instruction is within 2 ulp; this is the nearest.
inline float quotient_fast(float a, float b) {
    return a / b;
}

// The instruction is within 2^-11; this is as good as the C library's.
inline float tanh_fast(float x) {
    return tanhf(x);
}

}  // namespace ptx
