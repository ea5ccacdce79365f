// What the built-ins and the twins do, written out for a test to look at: on the emulator and on a
// GPU it must be the same.
#include "ptx/ptx_common.cuh"
#include "ptx/ptx_sm80.cuh"

struct Conversions {
    const float* floats;
    unsigned short *halves, *bfloats;
    unsigned int *half_pairs, *bfloat_pairs;  // of a float and its negative
    float* powers;                            // of 2
    const unsigned short* bits;
    float *from_halves, *from_bfloats;
    int floats_count, bits_count;
};

extern "C" __global__ void conversions(const __grid_constant__ Conversions params) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int i = first; i < params.floats_count; i += step) {
        const float x = params.floats[i];
        params.halves[i] = ptx::half_from_float(x);
        params.bfloats[i] = ptx::bfloat16_from_float(x);
        params.half_pairs[i] = ptx::pack_f16(x, -x);
        params.bfloat_pairs[i] = ptx::pack_bf16(x, -x);
        params.powers[i] = ptx::exp2_fast(x);
    }
    for (int i = first; i < params.bits_count; i += step) {
        params.from_halves[i] = ptx::float_from_half(params.bits[i]);
        params.from_bfloats[i] = ptx::float_from_bfloat16(params.bits[i]);
    }
}

struct Warp {
    const int* values;  // of each thread
    int* results;       // (result, thread)
    double* sum;
    int threads;
};

extern "C" __global__ void warp(const __grid_constant__ Warp params) {
    const int thread = threadIdx.x, lane = thread % 32, value = params.values[thread];
    int* result = params.results + thread;
    const auto store = [&](int x) {
        *result = x;
        result += params.threads;
    };
    store(__shfl_sync(~0u, value, 5));
    store(__shfl_sync(~0u, value, lane + 3, 8));
    store(__shfl_xor_sync(~0u, value, 9));
    store(__shfl_xor_sync(~0u, value, 4, 8));
    store(__shfl_up_sync(~0u, value, 3));
    store(__shfl_up_sync(~0u, value, 1, 4));
    store(__shfl_down_sync(~0u, value, 7));
    store(__shfl_down_sync(~0u, value, 2, 16));
    store(__ballot_sync(~0u, value % 3 == 0));
    store(__any_sync(~0u, value == 7));
    store(__all_sync(~0u, value >= 0));
    // Two parts of each warp, each on its own way.
    if (lane < 12) {
        store(__shfl_xor_sync(0x00000fffu, value, 1));
        store(__all_sync(0x00000fffu, lane < 12));
    } else {
        store(__ballot_sync(0xfffff000u, value % 2));
        store(__shfl_xor_sync(0xfffff000u, value, 2));
    }
    store(__syncthreads_or(value == 7));
    store(__syncthreads_or(value < 0));
    atomicAdd(params.sum, static_cast<double>(value));
}

struct Fragments {
    const unsigned short *a, *b;        // 16x16 each
    unsigned int *loaded, *transposed;  // a, (lane, register)
    float *f16, *bf16, *turing;  // a times the first 8 columns of b, added to 1, (lane, register)
    unsigned short* copied;      // a, its last row replaced by zeros
};

struct Smem {
    unsigned short a[16 * 16], b[16 * 16];
};

extern "C" __global__ void fragments(const __grid_constant__ Fragments params) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(bytes);
    const int lane = threadIdx.x;
    for (int i = lane; i < 16 * 16 / 8; i += 32) {
        ptx::copy_async<16>(smem.a + 8 * i, params.a + 8 * i, true);
        ptx::copy_async<8>(smem.b + 8 * i, params.b + 8 * i, true);
        ptx::copy_async<4>(smem.b + 8 * i + 4, params.b + 8 * i + 4, true);
        ptx::copy_async<2>(smem.b + 8 * i + 6, params.b + 8 * i + 6, true);
        ptx::copy_async<2>(smem.b + 8 * i + 7, params.b + 8 * i + 7, true);
    }
    ptx::wait_copies();
    __syncwarp();

    unsigned int a[4], a_transposed[4], b[4];
    const int offset = lane % 16 * 16 + lane / 16 * 8;
    ptx::ldmatrix_x4(a, smem.a + offset);
    ptx::ldmatrix_x4_trans(a_transposed, smem.a + offset);
    ptx::ldmatrix_x4_trans(b, smem.b + offset);
    float f16[4] = {1, 1, 1, 1}, bf16[4] = {1, 1, 1, 1}, turing[4] = {1, 1, 1, 1};
    ptx::mma_m16n8k16_f16(f16, a, b[0], b[1]);
    ptx::mma_m16n8k16_bf16(bf16, a, b[0], b[1]);
    ptx::mma_m16n8k8_f16(turing, a[0], a[1], b[0]);
    ptx::mma_m16n8k8_f16(turing, a[2], a[3], b[1]);
    for (int i = 0; i < 4; ++i) {
        params.loaded[4 * lane + i] = a[i];
        params.transposed[4 * lane + i] = a_transposed[i];
        params.f16[4 * lane + i] = f16[i];
        params.bf16[4 * lane + i] = bf16[i];
        params.turing[4 * lane + i] = turing[i];
    }

    __syncwarp();
    if (lane < 2) ptx::copy_async<16>(smem.a + 15 * 16 + 8 * lane, params.a, false);
    ptx::wait_copies();
    __syncwarp();
    for (int i = lane; i < 16 * 16; i += 32) params.copied[i] = smem.a[i];
}

struct WideFragments {
    const float *a, *b;       // 16x8, 8x8
    unsigned int* rounded;    // each of a as tf32, with half its size
    float* tf32;              // a times b, added to 1, (lane, register)
    const double *a64, *b64;  // 16x16, 16x8
    double *f64, *small;      // the product, and that of 8x4 and 4x8
};

extern "C" __global__ void wide_fragments(const __grid_constant__ WideFragments params) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    unsigned int a[4], b[2];
    for (int i = 0; i < 4; ++i) {
        const int place = (g + i % 2 * 8) * 8 + t + i / 2 * 4;
        const float x = params.a[place];
        a[i] = __float_as_uint(x);
        params.rounded[place] = ptx::tf32_of(fabsf(x) / 2, x);
    }
    for (int i = 0; i < 2; ++i) b[i] = __float_as_uint(params.b[(t + i * 4) * 8 + g]);
    float tf32[4] = {1, 1, 1, 1};
    ptx::mma_m16n8k8_tf32(tf32, a, b);

    double a64[8], b64[4], f64[4] = {1, 1, 1, 1}, small[2] = {1, 1};
    for (int i = 0; i < 8; ++i) a64[i] = params.a64[(g + i % 2 * 8) * 16 + t + i / 2 * 4];
    for (int i = 0; i < 4; ++i) b64[i] = params.b64[(t + i * 4) * 8 + g];
    ptx::mma_m16n8k16_f64(f64, a64, b64);
    ptx::mma_m8n8k4_f64(small[0], small[1], a64[0], b64[0]);

    for (int i = 0; i < 4; ++i) {
        params.tf32[4 * lane + i] = tf32[i];
        params.f64[4 * lane + i] = f64[i];
    }
    for (int i = 0; i < 2; ++i) params.small[2 * lane + i] = small[i];
}
