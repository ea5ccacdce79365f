// attn_probs: the probabilities of attention, P = exp(S - LSE), for inspection.
//
// The LSE comes from the forward, and S is recomputed tile by tile. With dropout, P is what the
// forward multiplied by V: 0 if dropped, otherwise scaled up.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim)
// Owns     block: BLOCK_M queries of one head; thread: rows x keys of a tile of S
// Shared   Q tile, K tile
// Writes   O: P (batch, heads, seqlen_q, seqlen_k), 0 where a row does not see a key
#include "call/key_tiles.cuh"
#include "cuda_cores/scores.cuh"

constexpr int kThreads = THREADS, kBlocksPerSm = BLOCKS_PER_SM;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
using Layout = ThreadLayout<kThreads, LANES>;
constexpr int kRows = kBlockM / Layout::kY;  // of S, per thread
constexpr int kKeys = kBlockN / Layout::kX;  // of S, per thread
static_assert(kRows * Layout::kY == kBlockM, "BLOCK_M must be a multiple of THREADS / LANES");
static_assert(kKeys * Layout::kX == kBlockN, "BLOCK_N must be a multiple of LANES");
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");

struct Smem {
    SharedMatrix<kBlockM, kHeadDim> q;
    SharedMatrix<kBlockN, kHeadDim> k;
};

using Probabilities = ScoreTile<kRows, kKeys>;

// What to subtract from the scores of a thread's rows, in log 2.
__device__ inline void load_shifts(acc_t (&shift)[kRows], const acc_t* lse, const Layout& layout,
                                   int first_row, int end_row) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int row = first_row + layout.row(i);
        shift[i] = row < end_row ? lse[row] * acc_t(kLog2E) : acc_t(0);
        if (shift[i] == negative_infinity()) shift[i] = 0;  // all scores of the row are -inf, too
    }
}

// Turns products into probabilities. Those of unseen keys are 0, also in a row whose LSE is NaN.
__device__ inline void exponentiate(const ScoreRules& rules, Probabilities& p,
                                    const acc_t (&shift)[kRows], const Layout& layout,
                                    int first_row, int first_key) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
            const int row = first_row + layout.row(i), key = first_key + layout.key(j);
            p[i][j] = rules.sees(row, key) ? exp2_of(rules.score(p[i][j], row, key) - shift[i])
                                           : acc_t(0);
        }
}

__device__ inline void store(Matrix<scalar_t> to, const Probabilities& p, acc_t factor,
                             const Layout& layout, int first_row, int first_key,
                             const Sizes& sizes) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
            const int row = first_row + layout.row(i), key = first_key + layout.key(j);
            if (row < sizes.seqlen_q && key < sizes.seqlen_k)
                to.row(row)[key] = from_acc<scalar_t>(p[i][j] * factor);
        }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    attn_probs(const __grid_constant__ ForwardParams params) {
    Smem& smem = shared_memory<Smem>();
    const Layout layout;
    const auto [sequence, head, kv_head, first_row] = query_tile_of_block<kBlockM>(params);
    const ScoreRules rules(params, sequence, head);
    const KeyTiles<kBlockN> tiles(rules.mask, first_row, kBlockM);
    const auto q = sequence.queries<const scalar_t>(params.q, head);
    const auto k = sequence.keys<const scalar_t>(params.k, kv_head);
    const auto out = sequence.queries<scalar_t>(params.o, head);
    load_tile<kThreads, kHeadDim>(smem.q, q, first_row, sequence.seqlen_q);

    acc_t shift[kRows];
    const acc_t* lse = static_cast<const acc_t*>(params.lse);
    load_shifts(shift, lse + sequence.first_row(head, params.sizes), layout, first_row,
                sequence.seqlen_q);
    const acc_t factor = kDropout ? kept_scale(rules.features) : acc_t(1);
    for (int key = 0; key < params.sizes.seqlen_k; key += kBlockN) {
        Probabilities p = {};
        if (key >= tiles.begin && key < tiles.end) {
            __syncthreads();  // every warp is done with the previous K
            load_tile<kThreads, kHeadDim>(smem.k, k, key, tiles.end);
            __syncthreads();
            product_nt<kHeadDim>(p, smem.q, smem.k, layout);
            exponentiate(rules, p, shift, layout, first_row, key);
            if constexpr (kDropout) drop(rules, p, layout, first_row, key);
        }
        store(out, p, factor, layout, first_row, key, params.sizes);
    }
}
