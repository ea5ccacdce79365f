// Stands in for what a CUDA compiler knows without any header: a kernel is compiled with
// -include cuda_builtins.hpp. It includes no system header, as NVRTC offers none and every variant
// is compiled anew. A built-in that no kernel used yet is missing here: add it where it is needed.
#pragma once

#include "emulator.hpp"

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// Which blocks are partners the runtime knows: clusters are pairs.
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// Blocks run on threads of the operating system, one at a time on each.
#define __shared__ __thread

struct uint3 {
    unsigned int x, y, z;
};
struct dim3 {
    unsigned int x, y, z;
};
struct __align__(16) uint4 {
    unsigned int x, y, z, w;
};
// The runtime's, which is loaded once.
extern __thread const uint3 threadIdx __attribute__((tls_model("initial-exec")));
extern __thread const uint3 blockIdx __attribute__((tls_model("initial-exec")));
extern __thread const dim3 blockDim __attribute__((tls_model("initial-exec")));
extern __thread const dim3 gridDim __attribute__((tls_model("initial-exec")));
constexpr int warpSize = 32;

inline void __syncthreads(EMULATOR_HERE) {
    emulator::sync_block("__syncthreads", false, file, line);
}
inline int __syncthreads_or(int predicate, EMULATOR_HERE) {
    return emulator::sync_block("__syncthreads_or", predicate, file, line) > 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_HERE) {
    emulator::sync_warp_memory(mask, file, line);
}

// Warp shuffles (CUDA C++ Programming Guide, "Warp Shuffle Functions"). Like votes, they order no
// memory accesses.
namespace emulator {

template <class T>
struct Offer {
    T value;
    unsigned source;  // the lane whose value this one wants
};
template <class T>
struct Taken {
    T value;
    bool offered;
};

template <class T>
EMULATOR_UNCHECKED void take_offers(const void* const* in, void* const* out, unsigned lanes) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        const unsigned source = static_cast<const Offer<T>*>(in[lane])->source;
        Taken<T>& taken = *static_cast<Taken<T>*>(out[lane]);
        taken.offered = lanes >> source & 1;
        if (taken.offered) taken.value = static_cast<const Offer<T>*>(in[source])->value;
    }
}

template <class T>
T shuffle(const char* operation, unsigned mask, T value, unsigned source, const char* file,
          int line) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    const Offer<T> offer{value, source};
    Taken<T> taken;
    sync_warp(operation, mask, &offer, &taken, take_offers<T>, file, line);
    if (!taken.offered) fail("a shuffle takes the value of a lane that is not in its mask");
    return taken.value;
}

}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_HERE) {
    const unsigned segment = emulator::lane() & ~(width - 1);
    return emulator::shuffle("__shfl_sync", mask, value, segment | (source & (width - 1)), file,
                             line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMULATOR_HERE) {
    const unsigned lane = emulator::lane(), source = lane ^ lane_mask;
    const bool inside = source < (lane & ~(width - 1)) + width;
    return emulator::shuffle("__shfl_xor_sync", mask, value, inside ? source : lane, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_HERE) {
    const unsigned lane = emulator::lane();
    const bool inside = (lane & (width - 1)) + delta < static_cast<unsigned>(width);
    return emulator::shuffle("__shfl_down_sync", mask, value, inside ? lane + delta : lane, file,
                             line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_HERE) {
    const unsigned lane = emulator::lane();
    const bool inside = (lane & (width - 1)) >= delta;
    return emulator::shuffle("__shfl_up_sync", mask, value, inside ? lane - delta : lane, file,
                             line);
}

// Warp votes.
namespace emulator {

struct Votes {
    unsigned ayes, voters;
};

EMULATOR_UNCHECKED inline void count_votes(const void* const* in, void* const* out,
                                           unsigned lanes) {
    unsigned ayes = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (lanes >> lane & 1) ayes |= unsigned(*static_cast<const bool*>(in[lane])) << lane;
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (lanes >> lane & 1) *static_cast<Votes*>(out[lane]) = {ayes, lanes};
    }
}

inline Votes vote(const char* operation, unsigned mask, bool aye, const char* file, int line) {
    Votes result;
    sync_warp(operation, mask, &aye, &result, count_votes, file, line);
    return result;
}

}  // namespace emulator

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return emulator::vote("__ballot_sync", mask, predicate, file, line).ayes;
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return emulator::vote("__any_sync", mask, predicate, file, line).ayes != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    const emulator::Votes votes = emulator::vote("__all_sync", mask, predicate, file, line);
    return votes.ayes == votes.voters;
}

template <class T>
T atomicAdd(T* address, T value) {
    return emulator::atomic_add(address, value);
}
inline unsigned atomicMax(unsigned* address, unsigned value) {
    return emulator::atomic_max(address, value);
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
    return emulator::atomic_increment(address, last);
}

inline void __trap() {
    emulator::fail("__trap");
}

extern "C" {
int printf(const char* format, ...);
float exp2f(float), expf(float), log2f(float), logf(float), sqrtf(float), fabsf(float),
    tanhf(float), expm1f(float), log1pf(float), sinf(float), cosf(float), floorf(float),
    rintf(float), powf(float, float), fmodf(float, float);
double exp2(double), exp(double), log2(double), log(double), sqrt(double), fabs(double),
    tanh(double), expm1(double), log1p(double), sin(double), cos(double), floor(double),
    rint(double), pow(double, double), fmod(double, double);
float fmaf(float, float, float), fmaxf(float, float), fminf(float, float), copysignf(float, float);
double fma(double, double, double), fmax(double, double), fmin(double, double);
}
inline float exp2(float x) {
    return exp2f(x);
}
inline float exp(float x) {
    return expf(x);
}
inline float log2(float x) {
    return log2f(x);
}
inline float log(float x) {
    return logf(x);
}
inline float sqrt(float x) {
    return sqrtf(x);
}

// The place of the lowest bit that is set, from 1 on; 0 if none is.
inline int __ffs(int bits) {
    return __builtin_ffs(bits);
}
// The number of bits that are set.
inline int __popc(unsigned int bits) {
    return __builtin_popcount(bits);
}
// The number of bits above the highest that is set; 32 if none is.
inline int __clz(int bits) {
    return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(bits));
}
inline int __clzll(long long bits) {
    return bits == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(bits));
}

inline int min(int a, int b) {
    return b < a ? b : a;
}
inline int max(int a, int b) {
    return a < b ? b : a;
}
inline unsigned min(unsigned a, unsigned b) {
    return b < a ? b : a;
}
inline unsigned max(unsigned a, unsigned b) {
    return a < b ? b : a;
}
inline long long min(long long a, long long b) {
    return b < a ? b : a;
}
inline long long max(long long a, long long b) {
    return a < b ? b : a;
}
inline float min(float a, float b) {
    return fminf(a, b);
}
inline float max(float a, float b) {
    return fmaxf(a, b);
}
inline double min(double a, double b) {
    return fmin(a, b);
}
inline double max(double a, double b) {
    return fmax(a, b);
}

inline float __int_as_float(int bits) {
    return __builtin_bit_cast(float, bits);
}
// Bytes of two words, each chosen by four bits of the selector (CUDA's "Integer Intrinsics"); the
// fourth, which asks for a sign, is not in use.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
    unsigned chosen = 0;
    for (int i = 0; i < 4; ++i)
        chosen |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return chosen;
}
inline int __float_as_int(float x) {
    return __builtin_bit_cast(int, x);
}
inline float __uint_as_float(unsigned bits) {
    return __builtin_bit_cast(float, bits);
}
inline unsigned __float_as_uint(float x) {
    return __builtin_bit_cast(unsigned, x);
}
inline int __double2hiint(double x) {
    return static_cast<int>(__builtin_bit_cast(unsigned long long, x) >> 32);
}
inline int __double2loint(double x) {
    return static_cast<int>(__builtin_bit_cast(unsigned long long, x));
}
inline double __hiloint2double(int high, int low) {
    return __builtin_bit_cast(
        double, static_cast<unsigned long long>(high) << 32 | static_cast<unsigned>(low));
}
