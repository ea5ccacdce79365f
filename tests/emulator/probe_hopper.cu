// What the twins of ptx_sm90.cuh and ptx_sm90a.cuh do, written out for a test to look at: on the
// emulator and on a GPU it must be the same.
#include "ptx/ptx_sm90a.cuh"

constexpr int kRows = BOX_ROWS, kBoxColumns = BOX_COLUMNS, kColumns = PRODUCT_COLUMNS;
constexpr bool kPairedRows = PAIRED_ROWS;
constexpr bool kTransposedA = TRANSPOSED_A, kTransposedB = TRANSPOSED_B, kBfloat16 = BFLOAT16;
constexpr int kWarpgroup = 128, kSteps = 4, kLine = 32;

template <bool E4m3>
struct ProductOf {
    using type = ptx::Wgmma<kColumns, kBfloat16>;
};
template <>
struct ProductOf<true> {
    using type = ptx::WgmmaE4m3<kColumns>;
};
using Product = ProductOf<E4M3>::type;

__device__ inline void wait_for(ptx::Barrier& barrier, unsigned int parity) {
    while (!ptx::barrier_try_wait(barrier, parity)) {
    }
}

template <class Smem>
__device__ inline Smem& shared_memory() {
    static_assert(sizeof(Smem) <= SMEM_BYTES, "the test has less shared memory");
    extern __shared__ __align__(1024) unsigned char bytes[];
    return *reinterpret_cast<Smem*>(bytes);
}

struct Boxes {
    TensorMap from, to;
    unsigned short *tile, *line;
    const unsigned short* line_from;
    int x[4], y[4];  // where the box begins in one and in the other
};

struct BoxesSmem {
    alignas(1024) unsigned short tile[kRows * 64];
    alignas(16) unsigned short line[kLine];
    ptx::Barrier full;
};

// A box into shared memory and out again, and a line.
extern "C" __global__ void boxes(const __grid_constant__ Boxes params) {
    BoxesSmem& smem = shared_memory<BoxesSmem>();
    if (threadIdx.x == 0) {
        ptx::barrier_init(smem.full, 1);
        ptx::barrier_init_fence();
        ptx::prefetch_tensor_map(params.from);
        constexpr int kBoxBytes = kRows * kBoxColumns * sizeof(unsigned short);
        ptx::barrier_arrive_expecting(smem.full, kBoxBytes + sizeof smem.line);
        const auto& x = params.x;
        if (kPairedRows) {
            ptx::copy_box(smem.tile, params.from, smem.full, x[0], x[1] % 4, x[1] / 4, x[2], x[3]);
        } else {
            ptx::copy_box(smem.tile, params.from, smem.full, x[0], x[1], x[2], x[3]);
        }
        ptx::copy_bytes(smem.line, params.line_from, sizeof smem.line, smem.full);
    }
    __syncthreads();
    wait_for(smem.full, 0);
    for (int i = threadIdx.x; i < kRows * 64; i += blockDim.x) params.tile[i] = smem.tile[i];
    for (int i = threadIdx.x; i < kLine; i += blockDim.x) params.line[i] = smem.line[i];
    if (threadIdx.x == 0) {
        const auto& y = params.y;
        ptx::store_box(params.to, smem.tile, y[0], y[1], y[2], y[3]);
        ptx::commit_stores();
        ptx::wait_stores_read();
    }
}

struct Products {
    const uint4 *a, *b;             // as they shall lie in shared memory
    const unsigned int* fragments;  // of a, (step, thread, register)
    float *shared, *registers;      // 1 + a b with a from there, (thread, register)
    // Descriptions of a and b at address 0, and what is added to them for the next 32 bytes of the
    // depth.
    unsigned long long a_description, b_description, a_step, b_step;
};

struct ProductsSmem {
    alignas(1024) uint4 a[A_BYTES / 16];
    alignas(1024) uint4 b[B_BYTES / 16];
};

extern "C" __global__ void products(const __grid_constant__ Products params) {
    ProductsSmem& smem = shared_memory<ProductsSmem>();
    const int thread = threadIdx.x;
    for (int i = thread; i < A_BYTES / 16; i += kWarpgroup) smem.a[i] = params.a[i];
    for (int i = thread; i < B_BYTES / 16; i += kWarpgroup) smem.b[i] = params.b[i];
    ptx::proxy_fence();
    __syncthreads();

    const auto a = params.a_description + (ptx::shared_address(smem.a) >> 4);
    const auto b = params.b_description + (ptx::shared_address(smem.b) >> 4);
    float shared[kColumns / 2], registers[kColumns / 2];
    unsigned int fragments[kSteps][4];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) shared[i] = registers[i] = 1;
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            fragments[k][i] = params.fragments[(k * kWarpgroup + thread) * 4 + i];
        }
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        Product::multiply<kTransposedA, kTransposedB, true>(shared, a + k * params.a_step,
                                                            b + k * params.b_step);
    }
    ptx::wgmma_commit();
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        Product::multiply<kTransposedB, true>(registers, fragments[k], b + k * params.b_step);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
        ptx::hold(shared[i]);
        params.shared[thread * kColumns / 2 + i] = shared[i];
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
        ptx::hold(registers[i]);
        params.registers[thread * kColumns / 2 + i] = registers[i];
    }
}

struct Packed {
    const float* values;
    unsigned int* packed;
    int words;
};

// Fours of floats in e4m3.
extern "C" __global__ void packed(const __grid_constant__ Packed params) {
    for (int i = threadIdx.x; i < params.words; i += blockDim.x) {
        const float* const x = params.values + 4 * i;
        params.packed[i] = ptx::pack_e4m3(x[0], x[1], x[2], x[3]);
    }
}

struct Barriers {
    const int* values;  // of 96 threads
    int *exchanged, *handed, *sums;
    const unsigned int* matrices;  // (lane, register)
    unsigned int* stored;          // 8 x 4 matrices, row by row
    unsigned int* transposed;      // of each lane its part of the first, turned over
    unsigned int *counter, *counted;
    const unsigned int* pairs;  // a, b, c
    unsigned int* fused;
    float* total;
    int pair_count;
};

struct BarriersSmem {
    alignas(16) unsigned int matrices[4][8][4];
    int exchanged[96], handed[32], sent;
    ptx::Barrier full, empty;
};

__device__ inline void meet_in(int warp) {
    if (warp < 2) {
        ptx::named_barrier_sync<64>(1);
    } else {
        ptx::named_barrier_sync<32>(2);
    }
}

extern "C" __global__ void barriers(const __grid_constant__ Barriers params) {
    BarriersSmem& smem = shared_memory<BarriersSmem>();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int value = params.values[thread];
    if (thread == 0) {
        ptx::barrier_init(smem.full, 1);
        ptx::barrier_init(smem.empty, 32);
        ptx::barrier_init_fence();
    }
    __syncthreads();

    // Two warps exchange values at a barrier, over and over; the third warp has one of its own.
    for (int round = 0; round < 2; ++round) {
        smem.exchanged[thread] = value + round;
        meet_in(warp);
        params.exchanged[96 * round + thread] = smem.exchanged[thread ^ (warp < 2 ? 63 : 31)];
        meet_in(warp);
    }

    // The first warp hands over and goes on.
    if (warp == 0) {
        smem.handed[lane] = value;
        ptx::named_barrier_arrive<64>(3);
    } else if (warp == 1) {
        ptx::named_barrier_sync<64>(3);
        params.handed[lane] = smem.handed[31 - lane];
    }

    // One thread sends all values to the third warp, one after the other.
    if (thread == 0) {
        for (int i = 0; i < 96; ++i) {
            wait_for(smem.empty, i & 1 ^ 1);
            smem.sent = params.values[i];
            ptx::barrier_arrive(smem.full);
        }
    } else if (warp == 2) {
        int sum = 0;
        for (int i = 0; i < 96; ++i) {
            wait_for(smem.full, i & 1);
            sum += smem.sent;
            ptx::barrier_arrive(smem.empty);
        }
        params.sums[lane] = sum;
    }

    if (warp == 1) {
        unsigned int matrices[4];
        for (int i = 0; i < 4; ++i) matrices[i] = params.matrices[4 * lane + i];
        ptx::stmatrix_x4(smem.matrices[lane / 8][lane % 8], matrices);
        __syncwarp();
        for (int i = lane; i < 128; i += 32)
            params.stored[i] = smem.matrices[i / 32][i / 4 % 8][i % 4];
        params.transposed[lane] = ptx::transpose_matrix(matrices[0]);
    }
    params.counted[thread] = atomicInc(params.counter, 40);
    for (int i = thread; i < params.pair_count; i += 96) {
        const unsigned int* pair = params.pairs + 3 * i;
        params.fused[i] = ptx::multiply_add_pairs<kBfloat16>(pair[0], pair[1], pair[2]);
    }
    const float ones[4] = {1, 2, 3, static_cast<float>(value)};
    ptx::add_to_global(params.total, ones);
}

struct Endless {
    const volatile int* stop;
};

extern "C" __global__ void endless(const __grid_constant__ Endless params) {
    while (!*params.stop) {
    }
}
