// fwd_3_flash_v1: FlashAttention (Dao et al. 2022, Algorithm 1), one launch per block of keys.
//
// Change from fwd_2_online_softmax: S and P never reach global memory. The outer loop, over blocks
// of keys, is on the host: each launch applies one block of keys to all tiles of queries. Between
// launches O, l and m are in global memory. O is normalised each time, as in line 12 of the paper.
// Scores are in log 2, which changes nothing but m.
//
// Launches: fwd_3_flash_v1, once for each block of keys.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim),
//          V (batch, seqlen_k, kv_heads, value_dim)
// Owns     block: BLOCK_M queries of one head; thread: kRows rows x kKeys keys of S, and the same
//          rows of O
// Shared   Q tile, K tile, V tile, P tile
// Global   workspace: O (batch, heads, seqlen_q, value_dim), then l and m (batch, heads, seqlen_q)
// Writes   O and LSE in the last launch; LSE is natural log, -inf for a row that sees no key
#include "cuda_cores/scores.cuh"
#include "softmax/online_softmax.cuh"

constexpr int kThreads = THREADS;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
using Layout = ThreadLayout<kThreads, LANES>;
constexpr int kRows = kBlockM / Layout::kY;
constexpr int kKeys = kBlockN / Layout::kX;
constexpr int kGroups = Layout::groups(kValueDim);
static_assert(kRows * Layout::kY == kBlockM, "BLOCK_M must be a multiple of THREADS / LANES");
static_assert(kKeys * Layout::kX == kBlockN, "BLOCK_N must be a multiple of LANES");
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");

struct Smem {
    SharedMatrix<kBlockM, kHeadDim> q;
    SharedMatrix<kBlockN, kHeadDim> k;
    SharedMatrix<kBlockN, Layout::padded(kValueDim)> v;
    SharedMatrix<kBlockM, kBlockN> p;
};

// The block of keys that this launch is for.
struct KeyBlock {
    int first_key;
    bool is_first, is_last;

    __device__ explicit KeyBlock(const Sizes& sizes)
        : first_key(sizes.step * kBlockN),
          is_first(sizes.step == 0),
          is_last(first_key + kBlockN >= sizes.seqlen_k) {}
};

// O, l and m of a head, as they are between launches.
struct State {
    acc_t *o, *l, *m;

    __device__ State(const ForwardParams& params, int batch, int head) {
        const Sizes& sizes = params.sizes;
        const long long rows = rows_of_heads(sizes);
        const long long row = first_row_of(batch, head, sizes);
        o = static_cast<acc_t*>(params.workspace) + row * kValueDim;
        l = static_cast<acc_t*>(params.workspace) + rows * kValueDim + row;
        m = l + rows;
    }
};

// l and m of a thread's rows.
struct Statistics {
    OnlineSoftmax softmax[kRows];
    acc_t old_sum[kRows];  // l of the keys of earlier launches, in units of the new maximum

    // Turns a tile of scores into P and updates the statistics of earlier launches.
    __device__ void exponentiate(ScoreTile<kRows, kKeys>& scores, const State& state,
                                 const KeyBlock& keys, const Layout& layout, int first_row,
                                 int seqlen_q) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = first_row + layout.row(i);
            const bool resumes = row < seqlen_q && !keys.is_first;
            if (resumes) softmax[i].max = state.m[row];
            old_sum[i] = resumes ? state.l[row] : 0;
            old_sum[i] *= softmax[i].raise_max(lanes_max<Layout::kX>(max_of(scores[i])));
#pragma unroll
            for (int j = 0; j < kKeys; ++j) scores[i][j] = softmax[i].weight(scores[i][j]);
            softmax[i].total<Layout::kX>();
            softmax[i].sum += old_sum[i];
        }
    }

    // Turns row i of P V into O (line 12): adds the old O, weighted with the old sum, and divides
    // by the new sum.
    __device__ void join_output(Vec (&o)[kGroups], int i, acc_t* old_o, const KeyBlock& keys,
                                const Layout& layout) const {
        const acc_t normalizer = softmax[i].normalizer();
#pragma unroll
        for (int c = 0; c < kGroups; ++c)
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
                const int col = layout.dim(c) + e;
                if (col >= kValueDim) continue;
                if (!keys.is_first) o[c][e] += old_sum[i] * old_o[col];
                o[c][e] *= normalizer;
                if (!keys.is_last) old_o[col] = o[c][e];
            }
    }
};

// Adds a thread's part of P V to O. After the last block of keys it writes O and the LSE, otherwise
// O, l and m for the next launch.
__device__ inline void end_launch(OutputTile<kRows, kGroups>& o, const Statistics& statistics,
                                  const State& state, const ForwardParams& params, int batch,
                                  int head, int first_row, const KeyBlock& keys,
                                  const Layout& layout) {
    const Sizes& sizes = params.sizes;
    acc_t* lse = static_cast<acc_t*>(params.lse);
    if (lse) lse += first_row_of(batch, head, sizes);
    const auto out = matrix_of<scalar_t>(params.o, batch, head);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int row = first_row + layout.row(i);
        if (row >= sizes.seqlen_q) continue;
        statistics.join_output(o[i], i, state.o + static_cast<long long>(row) * kValueDim, keys,
                               layout);
        if (keys.is_last) {
            store_row<kValueDim>(out.row(row), o[i], 1, layout);
            if (lse && layout.x == 0) lse[row] = statistics.softmax[i].lse();
        } else if (layout.x == 0) {
            state.l[row] = statistics.softmax[i].sum;
            state.m[row] = statistics.softmax[i].max;
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fwd_3_flash_v1(const __grid_constant__ ForwardParams params) {
    const Sizes& sizes = params.sizes;
    const Mask mask{sizes.seqlen_q, sizes.seqlen_k};
    const auto [sequence, head, kv_head, first_row] = query_tile_of_block<kBlockM>(params);
    const int batch = sequence.batch;
    const KeyBlock keys(sizes);

    // A tile that sees none of these keys has work only in the first and the last launch.
    const int last_row = min(first_row + kBlockM, sizes.seqlen_q) - 1;
    if (keys.first_key >= mask.keys_end(last_row) && !keys.is_first && !keys.is_last) return;

    Smem& smem = shared_memory<Smem>();
    const Layout layout;
    load_tile<kThreads, kHeadDim>(smem.q, matrix_of<const scalar_t>(params.q, batch, head),
                                  first_row, sizes.seqlen_q);
    load_tile<kThreads, kHeadDim>(smem.k, matrix_of<const scalar_t>(params.k, batch, kv_head),
                                  keys.first_key, sizes.seqlen_k);
    load_tile<kThreads, kValueDim>(smem.v, matrix_of<const scalar_t>(params.v, batch, kv_head),
                                   keys.first_key, sizes.seqlen_k);
    __syncthreads();

    ScoreTile<kRows, kKeys> scores;
    product_nt<kHeadDim>(scores, smem.q, smem.k, layout);
    scale_and_mask<true>(scores, params.scale_log2, layout, mask, first_row, keys.first_key);

    const State state(params, batch, head);
    Statistics statistics;
    statistics.exponentiate(scores, state, keys, layout, first_row, sizes.seqlen_q);
    mark_unseen(scores, layout, [&, first = first_row](int row, int key) {
        return keys.first_key + key < mask.keys_end(first + row);
    });

    // A row of P is written and read by lanes of one warp only.
    store_scores(smem.p, scores, layout);
    __syncwarp();
    OutputTile<kRows, kGroups> o = {};
    product_nn<true>(o, smem.p, smem.v, layout);
    end_launch(o, statistics, state, params, batch, head, first_row, keys, layout);
}
