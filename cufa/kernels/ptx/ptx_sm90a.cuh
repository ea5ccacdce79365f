// Inline PTX that only sm_90a has, warpgroup products (wgmma) and register reallocation, and what
// only their kernels need.
//
// A warpgroup is four consecutive warps, the first with an index that is a multiple of four. All of
// its threads execute these functions together.
#pragma once

#include "hopper/watchdog.cuh"
#include "ptx/ptx_sm90.cuh"

namespace ptx {

// a b + c for two 16-bit floats at once.
template <bool Bfloat16>
__device__ inline unsigned int multiply_add_pairs(unsigned int a, unsigned int b, unsigned int c) {
    unsigned int sum;
    if constexpr (Bfloat16) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    }
    return sum;
}

// Makes what this warpgroup's threads wrote to registers visible to the products that follow.
__device__ inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a group of products.
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all groups but the last Pending are done.
template <int Pending>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Holds the compiler to the order in which these registers are touched: it takes a product's result
// for ready as soon as it is issued.
__device__ inline void hold(float& x) {
    asm volatile("" : "+f"(x)::"memory");
}
__device__ inline void hold(unsigned int& x) {
    asm volatile("" : "+r"(x)::"memory");
}

// Gives up registers, or takes those that others gave up, until each thread has Count. With a
// watchdog nothing changes: its printf needs more registers than a producer would keep.
template <int Count>
__device__ inline void registers_decrease() {
    if (kWatchdogSeconds == 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ inline void registers_increase() {
    if (kWatchdogSeconds == 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// d = a b, or d += a b if Add, for 64x16 a, 16xN b and 64xN d in float32. With w the warp's index
// in the warpgroup, g = lane / 4 and t = lane % 4, d[4i] and d[4i + 1] are columns 8i + 2t and 8i +
// 2t + 1 of row 16w + g, and d[4i + 2] and d[4i + 3] the same columns of row 16w + g + 8. Both
// operands are descriptors of shared memory, or `a` is four registers: (row g, columns 2t, 2t + 1),
// (g + 8, same), (g, columns 2t + 8, 2t + 9), (g + 8, same). In a transposed operand the depth, 16,
// is the slower axis in memory.
template <int N, bool Bfloat16>
struct Wgmma;

// The same for 64x32 a and 32xN b in e4m3, which cannot be transposed. The registers of `a` are
// (row g, columns 4t to 4t + 3), (g + 8, same), (g, columns 4t + 16 to 4t + 19), (g + 8, same).
template <int N>
struct WgmmaE4m3;

// The instruction names every register of d, so each N has its own text: the lists of registers are
// built from groups of eight.
#define WGMMA_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_D16 WGMMA_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D24 WGMMA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_D32 WGMMA_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D40 WGMMA_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_D48 WGMMA_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D56 WGMMA_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_D64 WGMMA_D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D72 WGMMA_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_D80 WGMMA_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_D88 WGMMA_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_D96 WGMMA_D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D104 WGMMA_D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_D112 WGMMA_D104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_D120 WGMMA_D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_D128 WGMMA_D120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_OUT(i)                                                                            \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_OUT8 WGMMA_OUT(0)
#define WGMMA_OUT16 WGMMA_OUT8, WGMMA_OUT(8)
#define WGMMA_OUT24 WGMMA_OUT16, WGMMA_OUT(16)
#define WGMMA_OUT32 WGMMA_OUT24, WGMMA_OUT(24)
#define WGMMA_OUT40 WGMMA_OUT32, WGMMA_OUT(32)
#define WGMMA_OUT48 WGMMA_OUT40, WGMMA_OUT(40)
#define WGMMA_OUT56 WGMMA_OUT48, WGMMA_OUT(48)
#define WGMMA_OUT64 WGMMA_OUT56, WGMMA_OUT(56)
#define WGMMA_OUT72 WGMMA_OUT64, WGMMA_OUT(64)
#define WGMMA_OUT80 WGMMA_OUT72, WGMMA_OUT(72)
#define WGMMA_OUT88 WGMMA_OUT80, WGMMA_OUT(80)
#define WGMMA_OUT96 WGMMA_OUT88, WGMMA_OUT(88)
#define WGMMA_OUT104 WGMMA_OUT96, WGMMA_OUT(96)
#define WGMMA_OUT112 WGMMA_OUT104, WGMMA_OUT(104)
#define WGMMA_OUT120 WGMMA_OUT112, WGMMA_OUT(112)
#define WGMMA_OUT128 WGMMA_OUT120, WGMMA_OUT(120)

// Operands after those of d, from %P0 on: a, b, whether they are transposed, whether to add.
#define WGMMA_OF(BFLOAT16, TYPE, N, SUMS, P0, P1, P2, P3, P4, P5, P6)                            \
    template <>                                                                                  \
    struct Wgmma<N, BFLOAT16> {                                                                  \
        template <bool TransposedA, bool TransposedB, bool Add>                                  \
        __device__ static void multiply(float (&d)[N / 2], unsigned long long a,                 \
                                        unsigned long long b) {                                  \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P4                              \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE   \
                         " {" WGMMA_D##SUMS "}, " P0 ", " P1 ", add, 1, 1, " P2 ", " P3 ";\n}"   \
                         : WGMMA_OUT##SUMS                                                       \
                         : "l"(a), "l"(b), "n"(TransposedA), "n"(TransposedB), "n"(Add)          \
                         : "memory");                                                            \
        }                                                                                        \
        template <bool TransposedB, bool Add>                                                    \
        __device__ static void multiply(float (&d)[N / 2], const unsigned int (&a)[4],           \
                                        unsigned long long b) {                                  \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P6                              \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE   \
                         " {" WGMMA_D##SUMS "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4           \
                                            ", add, 1, 1, " P5 ";\n}"                            \
                         : WGMMA_OUT##SUMS                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TransposedB), \
                           "n"(Add)                                                              \
                         : "memory");                                                            \
        }                                                                                        \
    };

#define WGMMA_OF_E4M3(N, SUMS, P0, P1, P2, P3, P4, P5, P6)                                      \
    template <>                                                                                 \
    struct WgmmaE4m3<N> {                                                                       \
        template <bool TransposedA, bool TransposedB, bool Add>                                 \
        __device__ static void multiply(float (&d)[N / 2], unsigned long long a,                \
                                        unsigned long long b) {                                 \
            static_assert(!TransposedA && !TransposedB, "bytes are not transposed");            \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P2                             \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                           \
                         "k32.f32.e4m3.e4m3 {" WGMMA_D##SUMS "}, " P0 ", " P1 ", add, 1, 1;\n}" \
                         : WGMMA_OUT##SUMS                                                      \
                         : "l"(a), "l"(b), "n"(Add)                                             \
                         : "memory");                                                           \
        }                                                                                       \
        template <bool TransposedB, bool Add>                                                   \
        __device__ static void multiply(float (&d)[N / 2], const unsigned int (&a)[4],          \
                                        unsigned long long b) {                                 \
            static_assert(!TransposedB, "bytes are not transposed");                            \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P5                             \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                           \
                         "k32.f32.e4m3.e4m3 {" WGMMA_D##SUMS "}, {" P0 ", " P1 ", " P2 ", " P3  \
                                                             "}, " P4 ", add, 1, 1;\n}"         \
                         : WGMMA_OUT##SUMS                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(Add)         \
                         : "memory");                                                           \
        }                                                                                       \
    };
#define WGMMA(N, ...)                      \
    WGMMA_OF(false, "f16", N, __VA_ARGS__) \
    WGMMA_OF(true, "bf16", N, __VA_ARGS__) \
    WGMMA_OF_E4M3(N, __VA_ARGS__)

WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA(48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA(144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
WGMMA(176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WGMMA(208, 104, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
WGMMA(224, 112, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
WGMMA(240, 120, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef WGMMA
#undef WGMMA_OF
#undef WGMMA_OF_E4M3
#undef WGMMA_OUT
#undef WGMMA_D8
#undef WGMMA_OUT8
#undef WGMMA_D16
#undef WGMMA_OUT16
#undef WGMMA_D24
#undef WGMMA_OUT24
#undef WGMMA_D32
#undef WGMMA_OUT32
#undef WGMMA_D40
#undef WGMMA_OUT40
#undef WGMMA_D48
#undef WGMMA_OUT48
#undef WGMMA_D56
#undef WGMMA_OUT56
#undef WGMMA_D64
#undef WGMMA_OUT64
#undef WGMMA_D72
#undef WGMMA_OUT72
#undef WGMMA_D80
#undef WGMMA_OUT80
#undef WGMMA_D88
#undef WGMMA_OUT88
#undef WGMMA_D96
#undef WGMMA_OUT96
#undef WGMMA_D104
#undef WGMMA_OUT104
#undef WGMMA_D112
#undef WGMMA_OUT112
#undef WGMMA_D120
#undef WGMMA_OUT120
#undef WGMMA_D128
#undef WGMMA_OUT128

}  // namespace ptx
