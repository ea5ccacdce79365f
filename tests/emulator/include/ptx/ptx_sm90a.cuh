// The twin of cufa/kernels/ptx/ptx_sm90a.cuh.
#pragma once

#include "ptx/ptx_sm90.cuh"

namespace ptx {

namespace twin {

inline unsigned int odd_bit(float near) {
    return __builtin_bit_cast(unsigned int, near) & 1;
}
inline unsigned int odd_bit(double near) {
    return __builtin_bit_cast(unsigned long long, near) & 1;
}

// `near`, which has been rounded, or its neighbour on the side of what was cut off, whichever is
// odd: rounded once more, to fewer bits, it becomes what the exact number would have.
template <class Float>
inline Float rounded_to_odd(Float near, double cut_off) {
    if (cut_off == 0 || cut_off != cut_off || odd_bit(near)) return near;
    const double limit = cut_off > 0 ? __builtin_inf() : -__builtin_inf();
    if constexpr (sizeof(Float) == sizeof(float)) {
        return __builtin_nextafterf(near, static_cast<float>(limit));
    } else {
        return __builtin_nextafter(near, limit);
    }
}

// a * b + c with enough bits of it to round the result once more. The product is exact.
inline float multiply_add_odd(float a, float b, float c) {
    const double product = static_cast<double>(a) * b, sum = product + c;
    const double part = sum - product;
    const double odd = rounded_to_odd(sum, product - (sum - part) + (c - part));
    const auto single = static_cast<float>(odd);
    return rounded_to_odd(single, odd - single);
}

}  // namespace twin

template <bool Bfloat16>
inline unsigned int multiply_add_pairs(unsigned int a, unsigned int b, unsigned int c) {
    constexpr auto kToFloat = Bfloat16 ? float_from_bfloat16 : float_from_half;
    constexpr auto kPack = Bfloat16 ? pack_bf16 : pack_f16;
    float sums[2];
    for (int i = 0; i < 2; ++i) {
        const auto half = [&](unsigned int pair) { return kToFloat(pair >> 16 * i & 0xffffu); };
        sums[i] = twin::multiply_add_odd(half(a), half(b), half(c));
    }
    return kPack(sums[0], sums[1]);
}

inline void wgmma_fence() {
    emulator::wgmma_fence();
}

inline void wgmma_commit(EMULATOR_HERE) {
    emulator::wgmma_commit(file, line);
}

template <int Pending>
inline void wgmma_wait(EMULATOR_HERE) {
    static_assert(0 <= Pending && Pending < 8, "wait_group takes 0 to 7");
    emulator::wgmma_wait(Pending, file, line);
}

// Here nothing keeps a register elsewhere while a product works with it.
inline void hold(float&) {}
inline void hold(unsigned int&) {}

namespace twin {

constexpr bool is_register_count(int count) {
    return count % 8 == 0 && 24 <= count && count <= 256;
}

}  // namespace twin

template <int Count>
inline void registers_decrease(EMULATOR_HERE) {
    static_assert(twin::is_register_count(Count), "setmaxnreg takes eights from 24 to 256");
    emulator::set_registers("setmaxnreg.dec", Count, false, file, line);
}
template <int Count>
inline void registers_increase(EMULATOR_HERE) {
    static_assert(twin::is_register_count(Count), "setmaxnreg takes eights from 24 to 256");
    emulator::set_registers("setmaxnreg.inc", Count, true, file, line);
}

template <int N, bool Bfloat16>
struct Wgmma {
    static_assert(N % 8 == 0 && 8 <= N && N <= 256, "wgmma has 8 to 256 columns, in eights");
    static constexpr auto kToFloat = Bfloat16 ? float_from_bfloat16 : float_from_half;

    template <bool TransposedA, bool TransposedB, bool Add>
    static void multiply(float (&d)[N / 2], unsigned long long a, unsigned long long b) {
        emulator::wgmma_issue(
            {d, N, nullptr, a, b, TransposedA, TransposedB, Add, 2, kToFloat, {}});
    }
    template <bool TransposedB, bool Add>
    static void multiply(float (&d)[N / 2], const unsigned int (&a)[4], unsigned long long b) {
        emulator::wgmma_issue({d, N, a, 0, b, false, TransposedB, Add, 2, kToFloat, {}});
    }
};

template <int N>
struct WgmmaE4m3 {
    static_assert(N % 8 == 0 && 8 <= N && N <= 256, "wgmma has 8 to 256 columns, in eights");

    template <bool TransposedA, bool TransposedB, bool Add>
    static void multiply(float (&d)[N / 2], unsigned long long a, unsigned long long b) {
        emulator::wgmma_issue(
            {d, N, nullptr, a, b, TransposedA, TransposedB, Add, 1, twin::float_from_e4m3, {}});
    }
    template <bool TransposedB, bool Add>
    static void multiply(float (&d)[N / 2], const unsigned int (&a)[4], unsigned long long b) {
        emulator::wgmma_issue(
            {d, N, a, 0, b, false, TransposedB, Add, 1, twin::float_from_e4m3, {}});
    }
};

}  // namespace ptx
