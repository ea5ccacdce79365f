// bwd_1_naive: standard backward with P and dS in global memory (Dao et al. 2022, Algorithm 3 with
// blocks of one element).
//
// Launches: probabilities, which writes P = exp(S - LSE); grad_values, dV = P^T dO;
// grad_probabilities, dP = dO V^T; grad_scores, dS = P o (dP - rowsum(P o dP)), in place of dP;
// grad_queries, dQ = scale dS K; grad_keys, dK = scale dS^T Q.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V; dK and dV are summed over the query
//          heads of a group
// Owns     a thread has one element of the result; grad_scores: a block has one row
// Global   workspace: P, then dP and dS, each (batch, heads, seqlen_q, seqlen_k)
// Writes   dQ, dK, dV; zero for rows that see no key and keys that no row sees
#include "call/memory.cuh"
#include "cuda_cores/standard.cuh"

constexpr int kThreads = THREADS;
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "the host passes a different struct");

// P, and dS in the place of dP.
struct Workspace {
    acc_t *p, *ds;

    __device__ explicit Workspace(const BackwardParams& params)
        : p(static_cast<acc_t*>(params.workspace)), ds(p + elements(params.sizes)) {}

    __device__ static long long elements(const Sizes& sizes) {
        return rows_of_heads(sizes) * sizes.seqlen_k;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    probabilities(const __grid_constant__ BackwardParams params) {
    const Sizes& sizes = params.sizes;
    const long long index = thread_index();
    if (index >= Workspace::elements(sizes)) return;
    const Element at(index, sizes.heads, sizes.seqlen_q, sizes.seqlen_k);
    acc_t p = 0;
    if (at.col < mask_of(sizes).keys_end(at.row)) {
        const auto q = matrix_of<const scalar_t>(params.q, at.batch, at.head);
        const auto k = matrix_of<const scalar_t>(params.k, at.batch, kv_head_of(at.head, sizes));
        const acc_t score = params.softmax_scale * dot_rows<kHeadDim>(q, at.row, k, at.col);
        const acc_t lse = static_cast<const acc_t*>(params.lse)[at.matrix_row];
        if (lse != negative_infinity()) p = exp2_of((score - lse) * acc_t(kLog2E));
    }
    Workspace(params).p[index] = p;
}

// One element of W^T X, where W is P or dS and X is dO or Q. It is summed over the rows that see
// the key, and over the query heads that share the KV head.
template <int Dims>
__device__ inline void key_gradient(const Sizes& sizes, const acc_t* weights, const Tensor& x,
                                    const Tensor& gradient, acc_t scale) {
    const long long index = thread_index();
    const long long keys = static_cast<long long>(sizes.batch) * sizes.kv_heads * sizes.seqlen_k;
    if (index >= keys * Dims) return;
    const Element at(index, sizes.kv_heads, sizes.seqlen_k, Dims);
    const int group = group_of(sizes);

    acc_t sum = 0;
    for (int head = at.head * group; head < (at.head + 1) * group; ++head) {
        const auto rows = matrix_of<const scalar_t>(x, at.batch, head);
        const long long first = first_row_of(at.batch, head, sizes);
        for (int i = mask_of(sizes).first_row(at.row); i < sizes.seqlen_q; ++i) {
            sum += weights[(first + i) * sizes.seqlen_k + at.row] * to_acc(rows.row(i)[at.col]);
        }
    }
    matrix_of<scalar_t>(gradient, at.batch, at.head).row(at.row)[at.col] =
        from_acc<scalar_t>(scale * sum);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    grad_values(const __grid_constant__ BackwardParams params) {
    key_gradient<kValueDim>(params.sizes, Workspace(params).p, params.dout, params.dv, 1);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    grad_probabilities(const __grid_constant__ BackwardParams params) {
    const Sizes& sizes = params.sizes;
    const long long index = thread_index();
    if (index >= Workspace::elements(sizes)) return;
    const Element at(index, sizes.heads, sizes.seqlen_q, sizes.seqlen_k);
    acc_t dp = 0;
    if (at.col < mask_of(sizes).keys_end(at.row)) {
        const auto dout = matrix_of<const scalar_t>(params.dout, at.batch, at.head);
        const auto v = matrix_of<const scalar_t>(params.v, at.batch, kv_head_of(at.head, sizes));
        dp = dot_rows<kValueDim>(dout, at.row, v, at.col);
    }
    Workspace(params).ds[index] = dp;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    grad_scores(const __grid_constant__ BackwardParams params) {
    const int cols = params.sizes.seqlen_k;
    const acc_t* p = Workspace(params).p + static_cast<long long>(blockIdx.x) * cols;
    acc_t* ds = Workspace(params).ds + static_cast<long long>(blockIdx.x) * cols;

    acc_t sum = 0;
    for (int j = threadIdx.x; j < cols; j += kThreads) sum += p[j] * ds[j];
    sum = block_sum<kThreads>(sum, shared_memory<WarpSums<kThreads>>());

    const int keys = mask_of(params.sizes).keys_end(blockIdx.x % params.sizes.seqlen_q);
    for (int j = threadIdx.x; j < keys; j += kThreads) ds[j] = p[j] * (ds[j] - sum);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    grad_queries(const __grid_constant__ BackwardParams params) {
    const Sizes& sizes = params.sizes;
    const long long index = thread_index();
    if (index >= rows_of_heads(sizes) * kHeadDim) return;
    const Element at(index, sizes.heads, sizes.seqlen_q, kHeadDim);
    const auto k = matrix_of<const scalar_t>(params.k, at.batch, kv_head_of(at.head, sizes));
    const acc_t* ds = Workspace(params).ds + at.matrix_row * sizes.seqlen_k;

    acc_t sum = 0;
    const int keys = mask_of(sizes).keys_end(at.row);
    for (int j = 0; j < keys; ++j) sum += ds[j] * to_acc(k.row(j)[at.col]);
    matrix_of<scalar_t>(params.dq, at.batch, at.head).row(at.row)[at.col] =
        from_acc<scalar_t>(params.softmax_scale * sum);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    grad_keys(const __grid_constant__ BackwardParams params) {
    key_gradient<kHeadDim>(params.sizes, Workspace(params).ds, params.q, params.dk,
                           params.softmax_scale);
}
