// fwd_4_flash_v2: FlashAttention-2 on CUDA cores (Dao 2023, Algorithm 1).
//
// Change from fwd_3_flash_v1: the loops are swapped. A block owns a tile of queries and loops over
// the keys in one launch. O, the running maximum and the running sum stay in registers. O is
// divided by the sum once, at the end. Tiles of keys that no query sees are skipped, and only tiles
// that a mask may cut through are masked.
//
// Launches: fwd_4_flash_v2.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim),
//          V (batch, seqlen_k, kv_heads, value_dim); packed sequences: (tokens, heads, dim); K and
//          V in pages: (pages, page_size, kv_heads, dim)
// Owns     block: BLOCK_M queries of one head; warp: whole rows of them; thread: kRows rows x kKeys
//          keys of S, and the same rows of O
// Shared   Q tile, K tile, V tile, P tile
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key, unless
//          there is a sink
#include "call/key_tiles.cuh"
#include "cuda_cores/scores.cuh"

constexpr int kThreads = THREADS, kBlocksPerSm = BLOCKS_PER_SM;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
using Layout = ThreadLayout<kThreads, LANES>;
constexpr int kRows = kBlockM / Layout::kY;  // of S and O, per thread
constexpr int kKeys = kBlockN / Layout::kX;  // of S, per thread
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

// A thread's rows of the output tile.
struct Accumulator {
    OnlineSoftmax softmax[kRows];
    OutputTile<kRows, kGroups> o;

    // Processes one tile of scores: raises the maxima, rescales O, turns the scores into P.
    __device__ void exponentiate(ScoreTile<kRows, kKeys>& scores) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const acc_t shrink = softmax[i].raise_max(lanes_max<Layout::kX>(max_of(scores[i])));
#pragma unroll
            for (int c = 0; c < kGroups; ++c)
#pragma unroll
                for (int e = 0; e < kVec; ++e) o[i][c][e] *= shrink;
#pragma unroll
            for (int j = 0; j < kKeys; ++j) scores[i][j] = softmax[i].weight(scores[i][j]);
        }
    }
};

template <bool Masked>
__device__ inline void attend(Accumulator& acc, Smem& smem, const ScoreRules& rules,
                              const KeyMatrix<const scalar_t>& k,
                              const KeyMatrix<const scalar_t>& v, const Layout& layout,
                              int first_row, int first_key) {
    __syncthreads();  // every warp is done with the previous K and V
    load_tile<kThreads, kHeadDim>(smem.k, k, first_key, rules.mask.seqlen_k);
    load_tile<kThreads, kValueDim>(smem.v, v, first_key, rules.mask.seqlen_k);
    __syncthreads();

    ScoreTile<kRows, kKeys> scores;
    product_nt<kHeadDim>(scores, smem.q, smem.k, layout);
    apply<Masked>(rules, scores, layout, first_row, first_key);
    acc.exponentiate(scores);
    if constexpr (kDropout) drop(rules, scores, layout, first_row, first_key);
    if constexpr (Masked) {
        mark_unseen(scores, layout,
                    [&](int row, int key) { return rules.sees(first_row + row, first_key + key); });
    }

    // A row of P is written and read by lanes of one warp only.
    store_scores(smem.p, scores, layout);
    __syncwarp();
    product_nn<Masked>(acc.o, smem.p, smem.v, layout);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    fwd_4_flash_v2(const __grid_constant__ ForwardParams params) {
    Smem& smem = shared_memory<Smem>();
    const Layout layout;
    const auto [sequence, head, kv_head, first_row] = query_tile_of_block<kBlockM>(params);
    const int seqlen_q = sequence.seqlen_q;
    if (kPacked && first_row >= seqlen_q) return;  // the sequence does not have this tile

    const ScoreRules rules(params, sequence, head);
    const KeyTiles<kBlockN> tiles(rules.mask, first_row, kBlockM);
    const auto q = sequence.queries<const scalar_t>(params.q, head);
    const auto k = sequence.keys<const scalar_t>(params.k, kv_head);
    const auto v = sequence.keys<const scalar_t>(params.v, kv_head);
    load_tile<kThreads, kHeadDim>(smem.q, q, first_row, seqlen_q);

    Accumulator acc = {};
    for (int key = tiles.begin; key < tiles.end; key += kBlockN) {
        if (tiles.masked(key)) {
            attend<true>(acc, smem, rules, k, v, layout, first_row, key);
        } else {
            attend<false>(acc, smem, rules, k, v, layout, first_row, key);
        }
    }

    const auto o = sequence.queries<scalar_t>(params.o, head);
    acc_t* lse = static_cast<acc_t*>(params.lse);
    if (lse) lse += sequence.first_row(head, params.sizes);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const acc_t factor = end_row<Layout::kX>(acc.softmax[i], rules);
        const int row = first_row + layout.row(i);
        if (row >= seqlen_q) continue;
        if (lse && layout.x == 0) lse[row] = acc.softmax[i].lse();
        store_row<kValueDim>(o.row(row), acc.o[i], factor, layout);
    }
}
