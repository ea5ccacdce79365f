// fwd_4_flash_v2: FlashAttention-2 on CUDA cores (Dao 2023, Algorithm 1).
//
// Change from fwd_3_flash_v1: the loops are swapped. A block owns a tile of queries and walks over
// the keys in one launch, so O, the running maximum and the running sum stay in registers from the
// first key to the last; O is divided by the sum once, at the end. exp2 with log2(e) folded into
// the scale.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (...,
// value_dim) Owns     block: BLOCK_M queries of one head; warp: whole rows of them; thread: TM rows
// x TN keys of S,
//          the same rows of O
// Shared   Q tile, K tile, V tile, P tile
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key
#include "online_softmax.cuh"
#include "scores.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
using Grid = ThreadGrid<THREADS, LANES>;
constexpr int kRows = kBlockM / Grid::kY;  // of S and O, per thread
constexpr int kKeys = kBlockN / Grid::kX;  // of S, per thread
constexpr int kGroups = Grid::groups(kValueDim);
static_assert(kRows * Grid::kY == kBlockM, "BLOCK_M must be a multiple of THREADS / LANES");
static_assert(kKeys * Grid::kX == kBlockN, "BLOCK_N must be a multiple of LANES");
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");

struct Smem {
    SharedMatrix<kBlockM, kHeadDim> q;
    SharedMatrix<kBlockN, kHeadDim> k;
    SharedMatrix<kBlockN, Grid::padded(kValueDim)> v;
    SharedMatrix<kBlockM, kBlockN> p;
};

// A thread's rows of the output tile.
struct Accumulator {
    OnlineSoftmax softmax[kRows];
    OutputTile<kRows, kGroups> o;

    // Takes in one tile of scores: raises the maxima, rescales O, turns the scores into P.
    __device__ void exponentiate(ScoreTile<kRows, kKeys>& scores) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const acc_t shrink = softmax[i].raise_max(lanes_max<Grid::kX>(max_of(scores[i])));
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
__device__ inline void attend(Accumulator& acc, Smem& smem, Matrix<const scalar_t> k,
                              Matrix<const scalar_t> v, const Grid& grid, Mask mask,
                              acc_t scale_log2, int first_row, int first_key) {
    __syncthreads();  // every warp is done with the previous K and V (and, the first time, none has
                      // Q)
    load_tile<THREADS, kHeadDim>(smem.k, k, first_key, mask.seqlen_k);
    load_tile<THREADS, kValueDim>(smem.v, v, first_key, mask.seqlen_k);
    __syncthreads();

    ScoreTile<kRows, kKeys> scores;
    product_nt<kHeadDim>(scores, smem.q, smem.k, grid);
    scale_and_mask<Masked>(scores, scale_log2, grid, mask, first_row, first_key);
    acc.exponentiate(scores);

    // A row of P is written and read by lanes of one warp only.
    store_scores(smem.p, scores, grid);
    __syncwarp();
    product_nn<Masked>(acc.o, smem.p, smem.v, grid);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    fwd_4_flash_v2(const __grid_constant__ ForwardParams params) {
    const Sizes& sizes = params.sizes;
    const Mask mask{sizes.seqlen_q, sizes.seqlen_k};
    const acc_t scale_log2 = params.softmax_scale * kLog2E;
    Smem& smem = shared_memory<Smem>();
    const Grid grid;

    const auto [sequence, head, kv_head, first_row] = query_tile_of_block<kBlockM>(params);
    const int batch = sequence.batch;
    const auto q = matrix_of<const scalar_t>(params.q, batch, head);
    const auto k = matrix_of<const scalar_t>(params.k, batch, kv_head);
    const auto v = matrix_of<const scalar_t>(params.v, batch, kv_head);
    load_tile<THREADS, kHeadDim>(smem.q, q, first_row, sizes.seqlen_q);

    Accumulator acc = {};
    // Every row of the tile sees the keys that its first row sees; none sees more than the last
    // does.
    const int last_row = min(first_row + kBlockM, sizes.seqlen_q) - 1;
    const int unmasked_end = mask.keys_end(first_row) / kBlockN * kBlockN;
    const int end = mask.keys_end(last_row);
    int key = 0;
    for (; key < unmasked_end; key += kBlockN)
        attend<false>(acc, smem, k, v, grid, mask, scale_log2, first_row, key);
    for (; key < end; key += kBlockN)
        attend<true>(acc, smem, k, v, grid, mask, scale_log2, first_row, key);

    const auto o = matrix_of<scalar_t>(params.o, batch, head);
    acc_t* lse = static_cast<acc_t*>(params.lse);
    if (lse) lse += first_row_of(batch, head, sizes);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        acc.softmax[i].total<Grid::kX>();
        const int row = first_row + grid.row(i);
        if (row >= sizes.seqlen_q) continue;
        if (lse && grid.x == 0) lse[row] = acc.softmax[i].lse();
        store_row<kValueDim>(o.row(row), acc.o[i], acc.softmax[i].normalizer(), grid);
    }
}
