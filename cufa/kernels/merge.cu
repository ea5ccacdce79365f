// merge: merges two partial results of the same queries, each over its own keys.
//
// out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b, with lse = log(e^lse_a + e^lse_b) (Milakov
// and Gimelshein 2018, section 3.1, for softmaxes whose values are already summed). A part with LSE
// -inf saw no key and is ignored, whatever its output is.
//
// Shapes   out_a, out_b, out (batch, seqlen, heads, value_dim); LSE (batch, heads, seqlen)
// Owns     warp: one row of one head
// Writes   out and LSE, which may be a part's own arrays
#include "call/columns.cuh"
#include "call/grid.cuh"
#include "call/numbers.cuh"
#include "call/tensor.cuh"

constexpr int kThreads = THREADS;
static_assert(sizeof(MergeParams) == PARAMS_BYTES, "the host passes a different struct");

constexpr int kChunk = kChunkOfRow<scalar_t, kValueDim>;
using Chunk = Pack<scalar_t, kChunk>;

// A part's weight relative to the larger one.
__device__ inline acc_t weight(acc_t lse, acc_t largest) {
    return lse == negative_infinity() ? acc_t(0) : exp2_of((lse - largest) * acc_t(kLog2E));
}

__device__ inline acc_t product(acc_t weight, scalar_t value) {
    return weight == 0 ? acc_t(0) : weight * to_acc(value);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    merge(const __grid_constant__ MergeParams params) {
    const long long index = warp_of_grid<kThreads>();
    const int row = index % params.seqlen, head = index / params.seqlen % params.heads;
    const int batch = index / params.seqlen / params.heads;
    if (batch >= params.batch) return;

    const acc_t lse_a = static_cast<const acc_t*>(params.lse_a)[index];
    const acc_t lse_b = static_cast<const acc_t*>(params.lse_b)[index];
    __syncwarp();  // the merged LSE may overwrite one of them
    const acc_t largest = lse_a > lse_b ? lse_a : lse_b;
    acc_t a = weight(lse_a, largest), b = weight(lse_b, largest);
    const acc_t sum = a + b;
    if (threadIdx.x % 32 == 0) {
        static_cast<acc_t*>(params.lse)[index] =
            sum == 0 ? negative_infinity() : largest + log2_of(sum) * acc_t(kLn2);
    }
    if (sum != 0) {
        a /= sum;
        b /= sum;
    }
    const scalar_t* out_a = matrix_of<const scalar_t>(params.out_a, batch, head).row(row);
    const scalar_t* out_b = matrix_of<const scalar_t>(params.out_b, batch, head).row(row);
    scalar_t* out = matrix_of<scalar_t>(params.out, batch, head).row(row);
    for (int col = threadIdx.x % 32 * kChunk; col < kValueDim; col += 32 * kChunk) {
        const Chunk from_a = *reinterpret_cast<const Chunk*>(out_a + col);
        const Chunk from_b = *reinterpret_cast<const Chunk*>(out_b + col);
        Chunk merged;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
            merged[e] = from_acc<scalar_t>(product(a, from_a[e]) + product(b, from_b[e]));
        }
        *reinterpret_cast<Chunk*>(out + col) = merged;
    }
}
