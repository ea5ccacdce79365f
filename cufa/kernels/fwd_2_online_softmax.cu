// fwd_2_online_softmax: standard attention with the softmax in two passes (Milakov and Gimelshein
// 2018).
//
// Change from fwd_1_naive: the maximum and the sum of a row are found in one pass. The sum is
// rescaled whenever the maximum rises. S is read twice instead of three times, but nearly all of
// the time goes to the two products, which are unchanged, with operands from global memory. The
// gain comes in the next rung: a row whose statistics can grow can be processed tile by tile.
//
// Launches: scores, softmax and output, as in fwd_1_naive.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim),
//          V (batch, seqlen_k, kv_heads, value_dim)
// Owns     scores, output: a thread has one element of the result; softmax: a block has one row
// Global   workspace: S, then P in its place, (batch, heads, seqlen_q, seqlen_k)
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key
#include "call/memory.cuh"
#include "cuda_cores/standard.cuh"
#include "softmax/softmax_rows.cuh"

constexpr int kThreads = THREADS;
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");

extern "C" __global__ void __launch_bounds__(kThreads)
    scores(const __grid_constant__ ForwardParams params) {
    scores_element(params, static_cast<acc_t*>(params.workspace));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    softmax(const __grid_constant__ ForwardParams params) {
    const int cols = params.sizes.seqlen_k;
    acc_t* row = static_cast<acc_t*>(params.workspace) + static_cast<long long>(blockIdx.x) * cols;
    const RowSoftmax statistics =
        softmax_two_passes(row, row, cols, shared_memory<RowScratch<kThreads>>());
    if (params.lse && threadIdx.x == 0)
        static_cast<acc_t*>(params.lse)[blockIdx.x] = statistics.lse();
}

extern "C" __global__ void __launch_bounds__(kThreads)
    output(const __grid_constant__ ForwardParams params) {
    output_element(params, static_cast<const acc_t*>(params.workspace));
}
