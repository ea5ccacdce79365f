// bwd_2_flash_v2: FlashAttention-2's backward on CUDA cores (Dao 2023, Algorithm 2).
//
// Change from bwd_1_naive: P is recomputed, tile by tile, from Q, K and LSE, so nothing of size
// seqlen_q * seqlen_k is stored; rowsum(P o dP) is D = rowsum(dO o O), found beforehand. A block
// owns a tile of keys and walks over the queries that see them, for every query head of the group:
// dK and dV stay in registers, dQ is summed by atomic additions in acc_t and rounded at the end.
//
// Three launches: row_sums (D, and dQ's sums set to zero), key_tiles, round_queries.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     block: BLOCK_N keys of one KV head; thread: kRows rows x kKeys keys of S and dP,
//          kTileKeys keys x kGroups columns of dK and of dV
// Shared   K, V, Q and dO tiles, P and dS tiles, LSE and D of the query tile
// Global   workspace: sums of dQ (batch, heads, seqlen_q, head_dim), then D (batch, heads,
// seqlen_q) Writes   dQ, dK, dV
#include "online_softmax.cuh"
#include "scores.cuh"
#include "warp_rows.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
using Grid = ThreadGrid<THREADS, LANES>;
constexpr int kRows = kBlockM / Grid::kY;
constexpr int kKeys = kBlockN / Grid::kX;
constexpr int kTileKeys = kBlockN / Grid::kY;
constexpr int kHeadGroups = Grid::groups(kHeadDim), kValueGroups = Grid::groups(kValueDim);
static_assert(kRows * Grid::kY == kBlockM, "BLOCK_M must be a multiple of THREADS / LANES");
static_assert(kKeys * Grid::kX == kBlockN, "BLOCK_N must be a multiple of LANES");
static_assert(kTileKeys * Grid::kY == kBlockN, "BLOCK_N must be a multiple of THREADS / LANES");
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "the host passes a different struct");

// The workspace's parts, at the row where a head begins.
struct Workspace {
    acc_t *dq, *d;

    __device__ Workspace(const BackwardParams& params, int batch, int head) {
        const long long row = first_row_of(batch, head, params.sizes);
        const long long rows = first_row_of(params.sizes.batch, 0, params.sizes);
        dq = static_cast<acc_t*>(params.workspace) + row * kHeadDim;
        d = static_cast<acc_t*>(params.workspace) + rows * kHeadDim + row;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    row_sums(const __grid_constant__ BackwardParams params) {
    const WarpRow<THREADS> at(params.sizes, params.sizes.seqlen_q);
    if (at.batch >= params.sizes.batch) return;
    const Workspace workspace(params, at.batch, at.head);
    const acc_t sum = at.dot<kValueDim>(params.o, params.dout);
    if (at.lane == 0) workspace.d[at.row] = sum;
    acc_t* dq = workspace.dq + static_cast<long long>(at.row) * kHeadDim;
    for (int col = at.lane; col < kHeadDim; col += 32) dq[col] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    round_queries(const __grid_constant__ BackwardParams params) {
    const WarpRow<THREADS> at(params.sizes, params.sizes.seqlen_q);
    if (at.batch >= params.sizes.batch) return;
    const Workspace workspace(params, at.batch, at.head);
    const acc_t* sums = workspace.dq + static_cast<long long>(at.row) * kHeadDim;
    scalar_t* dq = matrix_of<scalar_t>(params.dq, at.batch, at.head).row(at.row);
    for (int col = at.lane; col < kHeadDim; col += 32) {
        dq[col] = from_acc<scalar_t>(acc_t(params.softmax_scale) * sums[col]);
    }
}

struct Smem {
    SharedMatrix<kBlockN, Grid::padded(kHeadDim)> k;
    SharedMatrix<kBlockN, kValueDim> v;
    SharedMatrix<kBlockM, Grid::padded(kHeadDim)> q;
    SharedMatrix<kBlockM, Grid::padded(kValueDim)> dout;
    SharedMatrix<kBlockM, kBlockN> p, ds;
    acc_t lse_log2[kBlockM], d[kBlockM];
};

// A query head's rows, as the loop over query tiles reads them.
struct QueryHead {
    Matrix<const scalar_t> q, dout;
    const acc_t* lse;
    Workspace workspace;

    __device__ QueryHead(const BackwardParams& params, int batch, int head)
        : q(matrix_of<const scalar_t>(params.q, batch, head)),
          dout(matrix_of<const scalar_t>(params.dout, batch, head)),
          lse(static_cast<const acc_t*>(params.lse) + first_row_of(batch, head, params.sizes)),
          workspace(params, batch, head) {}
};

__device__ inline void load_queries(Smem& smem, const QueryHead& head, int first_row,
                                    int seqlen_q) {
    load_tile<THREADS, kHeadDim>(smem.q, head.q, first_row, seqlen_q);
    load_tile<THREADS, kValueDim>(smem.dout, head.dout, first_row, seqlen_q);
    for (int i = threadIdx.x; i < kBlockM; i += THREADS) {
        const bool inside = first_row + i < seqlen_q;
        smem.lse_log2[i] = inside ? head.lse[first_row + i] * acc_t(kLog2E) : 0;
        smem.d[i] = inside ? head.workspace.d[first_row + i] : 0;
    }
}

// P = 2^(S - LSE) and dS = P o (dP - D), into shared memory. Where a row does not see a key both
// are set, not computed, to zero: an LSE of -inf or a NaN in the key must not show.
template <bool Masked>
__device__ inline void recompute(Smem& smem, const Grid& grid, Mask mask, acc_t scale_log2,
                                 int first_row, int first_key) {
    ScoreTile<kRows, kKeys> s, dp;
    product_nt<kHeadDim>(s, smem.q, smem.k, grid);
    product_nt<kValueDim>(dp, smem.dout, smem.v, grid);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int row = grid.row(i);
        const int keys_seen = mask.keys_end(first_row + row) - first_key;
        const acc_t lse_log2 = smem.lse_log2[row], d = smem.d[row];
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
            const bool seen = !Masked || grid.key(j) < keys_seen;
            const acc_t p = seen ? exp2_of(s[i][j] * scale_log2 - lse_log2) : 0;
            s[i][j] = p;
            dp[i][j] = seen ? p * (dp[i][j] - d) : 0;
        }
    }
    store_scores(smem.p, s, grid);
    store_scores(smem.ds, dp, grid);
}

__device__ inline void add_to_queries(const OutputTile<kRows, kHeadGroups>& dq, acc_t* sums,
                                      const Grid& grid, int first_row, int seqlen_q) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int row = first_row + grid.row(i);
        if (row >= seqlen_q) continue;
#pragma unroll
        for (int c = 0; c < kHeadGroups; ++c)
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
                const int col = grid.dim(c) + e;
                if (col < kHeadDim)
                    atomicAdd(sums + static_cast<long long>(row) * kHeadDim + col, dq[i][c][e]);
            }
    }
}

// The gradients of a thread's keys.
struct KeyGradients {
    OutputTile<kTileKeys, kHeadGroups> dk;
    OutputTile<kTileKeys, kValueGroups> dv;

    // Takes in one tile of queries.
    template <bool Masked>
    __device__ void attend(Smem& smem, const QueryHead& head, const Grid& grid, Mask mask,
                           acc_t scale_log2, int first_row, int first_key) {
        __syncthreads();  // every warp is done with the previous queries, P and dS
        load_queries(smem, head, first_row, mask.seqlen_q);
        __syncthreads();
        recompute<Masked>(smem, grid, mask, scale_log2, first_row, first_key);
        __syncthreads();
        product_tn<Masked>(dv, smem.p, smem.dout, grid);
        product_tn<Masked>(dk, smem.ds, smem.q, grid);
        OutputTile<kRows, kHeadGroups> dq = {};
        product_nn<Masked>(dq, smem.ds, smem.k, grid);
        add_to_queries(dq, head.workspace.dq, grid, first_row, mask.seqlen_q);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    key_tiles(const __grid_constant__ BackwardParams params) {
    const Sizes& sizes = params.sizes;
    const Mask mask{sizes.seqlen_q, sizes.seqlen_k};
    const acc_t scale_log2 = params.softmax_scale * kLog2E;
    Smem& smem = shared_memory<Smem>();
    const Grid grid;

    // The first keys come first: under a causal mask most queries see those.
    const int heads = sizes.batch * sizes.kv_heads;
    const int first_key = blockIdx.x / heads * kBlockN;
    const int batch = blockIdx.x % heads / sizes.kv_heads;
    const int kv_head = blockIdx.x % heads % sizes.kv_heads;
    const int group = sizes.heads / sizes.kv_heads;
    load_tile<THREADS, kHeadDim>(smem.k, matrix_of<const scalar_t>(params.k, batch, kv_head),
                                 first_key, sizes.seqlen_k);
    load_tile<THREADS, kValueDim>(smem.v, matrix_of<const scalar_t>(params.v, batch, kv_head),
                                  first_key, sizes.seqlen_k);

    // Rows from unmasked_row on see all keys of the tile, if the tile is a whole one.
    const int last_key = first_key + kBlockN - 1;
    const int unmasked_row = last_key < sizes.seqlen_k ? mask.first_row(last_key) : sizes.seqlen_q;
    KeyGradients gradients = {};
    for (int h = 0; h < group; ++h) {
        const QueryHead head(params, batch, kv_head * group + h);
        for (int row = mask.first_row(first_key) / kBlockM * kBlockM; row < sizes.seqlen_q;
             row += kBlockM) {
            if (row >= unmasked_row && row + kBlockM <= sizes.seqlen_q) {
                gradients.attend<false>(smem, head, grid, mask, scale_log2, row, first_key);
            } else {
                gradients.attend<true>(smem, head, grid, mask, scale_log2, row, first_key);
            }
        }
    }

    const auto dk = matrix_of<scalar_t>(params.dk, batch, kv_head);
    const auto dv = matrix_of<scalar_t>(params.dv, batch, kv_head);
#pragma unroll
    for (int j = 0; j < kTileKeys; ++j) {
        const int key = first_key + grid.key_row<kTileKeys>(j);
        if (key >= sizes.seqlen_k) continue;
        store_row<kHeadDim>(dk.row(key), gradients.dk[j], params.softmax_scale, grid);
        store_row<kValueDim>(dv.row(key), gradients.dv[j], 1, grid);
    }
}
