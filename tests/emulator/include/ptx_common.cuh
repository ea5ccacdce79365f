// The twin of cufa/kernels/ptx_common.cuh.
#pragma once

namespace ptx {

inline int anew(int x) {
    return x;
}
inline float anew_float(float x) {
    return x;
}

constexpr bool kBlackwell = false;

template <int Threads>
inline void named_barrier_sync(int id, EMULATOR_HERE) {
    emulator::named_barrier("bar.sync", id, Threads, true, file, line);
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

// The instruction is within 2 ulp; this is as good as the C library's.
inline float exp2_fast(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

// The instruction is within 1 ulp; this is the nearest.
inline float reciprocal_fast(float x) {
    return 1 / (fabsf(x) < 0x1p-126f ? 0 * x : x);
}

// The instruction is within 2^-11; this is as good as the C library's.
inline float tanh_fast(float x) {
    return tanhf(x);
}

}  // namespace ptx
