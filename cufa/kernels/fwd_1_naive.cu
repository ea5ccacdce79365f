// fwd_1_naive: standard attention, the baseline of the FlashAttention papers (Dao et al. 2022,
// Algorithm 0).
//
// S and P take O(seqlen_q * seqlen_k) of global memory. The softmax is the safe one, with three
// passes over each row: maximum, sum, quotients.
//
// Launches: scores, which writes S = Q K^T; softmax, P = softmax(S); output, O = P V.
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
        softmax_three_passes(row, row, cols, shared_memory<RowScratch<kThreads>>());
    if (params.lse && threadIdx.x == 0)
        static_cast<acc_t*>(params.lse)[blockIdx.x] = statistics.lse();
}

extern "C" __global__ void __launch_bounds__(kThreads)
    output(const __grid_constant__ ForwardParams params) {
    output_element(params, static_cast<const acc_t*>(params.workspace));
}
