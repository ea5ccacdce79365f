// bwd_3_mma: FlashAttention-2's backward on tensor cores (Dao 2023, Algorithm 2).
//
// Change from bwd_2_flash_v2: mma.sync on 16-bit operands with float32 sums, and S and dP are
// computed transposed, S^T = K Q^T and dP^T = V dO^T. A warp owns rows of keys; P^T and dS^T are
// then left operands of dV += P^T dO and dK += dS^T Q straight from the registers. Only dS^T goes
// to shared memory, for dQ = dS K. Where dK and dV are too wide for a warp's registers (SPLIT 2),
// two warps share the rows of keys: each computes half of the queries' columns of S^T and dP^T and
// owns half of the head dims of dK and dV.
//
// Three launches: row_sums (D = rowsum(dO o O), and dQ's sums set to zero), key_tiles,
// round_queries.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     block: BLOCK_N keys of one KV head; warp: kTiles 16-row tiles of them
// Shared   K, V, STAGES Q and dO tiles with LSE and D, dS^T and, if SPLIT, P^T
// Global   workspace: sums of dQ in fragments (batch, heads, seqlen_q / BLOCK_M, BLOCK_M,
// head_dim), rounded
//          up; then D (batch, heads, seqlen_q)
// Writes   dQ, dK, dV
#include "mask.cuh"
#include "mma_tiles.cuh"
#include "online_softmax.cuh"
#include "warp_rows.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kStages = STAGES, kSplit = SPLIT;
constexpr int kWarps = THREADS / 32;
constexpr int kTiles = kBlockN / (kWarps / kSplit * kMmaM);
constexpr int kQueries = kBlockM / kSplit;  // columns of S^T that a warp computes
// How the warps share dQ: rows of 16 queries first, then columns.
constexpr int kQueryRows = min_of(kWarps, kBlockM / kMmaM);
constexpr int kQueryTiles = kBlockM / kMmaM / kQueryRows;
constexpr int kQueryParts = kWarps / kQueryRows;
// Head dims, padded so that all who share them have whole fragments; a warp's part of those of dK,
// dV and dQ.
constexpr int kHead = round_up(kHeadDim, kMmaK*(kSplit > kQueryParts ? kSplit : kQueryParts));
constexpr int kValue = round_up(kValueDim, kMmaK* kSplit);
constexpr int kHeadPart = kHead / kSplit, kValuePart = kValue / kSplit;
constexpr int kQueryCols = kHead / kQueryParts;
static_assert(kTiles * (kWarps / kSplit) * kMmaM == kBlockN,
              "a warp must own whole 16-row tiles of keys");
static_assert(kQueries % kMmaK == 0, "a warp must own whole fragments of queries");
static_assert(kQueryRows * kQueryTiles * kMmaM == kBlockM,
              "the warps must share out the rows of dQ");
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "the host passes a different struct");

struct Smem {
    HalfTile<kBlockN, kHead> k;
    HalfTile<kBlockN, kValue> v;
    HalfTile<kBlockM, kHead> q[kStages];
    HalfTile<kBlockM, kValue> dout[kStages];
    HalfTile<kBlockN, kBlockM> ds;                   // dS^T
    HalfTile<kSplit == 1 ? 1 : kBlockN, kBlockM> p;  // P^T, if it must be shared
    alignas(16) float lse[kStages][kBlockM], d[kStages][kBlockM];
};

using Scores = Accumulators<kTiles, kQueries>;

// The workspace's parts. The sums of dQ are kept as the warps have them: 16x8 fragments of 4 x 32
// values, so that an addition by a warp is 128 bytes in a row.
struct Workspace {
    static constexpr int kFragment = kMmaM * kMmaN;
    float *dq, *d;

    __device__ Workspace(const BackwardParams& params, int batch, int head) {
        const Sizes& sizes = params.sizes;
        const long long padded_rows = ceil_div(sizes.seqlen_q, kBlockM) * kBlockM;
        const long long heads = static_cast<long long>(sizes.batch) * sizes.heads;
        const long long at = static_cast<long long>(batch) * sizes.heads + head;
        dq = static_cast<float*>(params.workspace) + at * padded_rows * kHead;
        d = static_cast<float*>(params.workspace) + heads * padded_rows * kHead +
            at * sizes.seqlen_q;
    }

    // The fragment of 16 rows and 8 columns that begins at (row, col).
    __device__ float* fragment(int row, int col) const {
        return dq + static_cast<long long>(row) * kHead + col / kMmaN * kFragment;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    row_sums(const __grid_constant__ BackwardParams params) {
    const int padded_rows = ceil_div(params.sizes.seqlen_q, kBlockM) * kBlockM;
    const WarpRow<THREADS> at(params.sizes, padded_rows);
    if (at.batch >= params.sizes.batch) return;
    const Workspace workspace(params, at.batch, at.head);
    if (at.row < params.sizes.seqlen_q) {
        const float sum = at.dot<kValueDim>(params.o, params.dout);
        if (at.lane == 0) workspace.d[at.row] = sum;
    }
    using Vector = Pack<float, 4>;
    auto* dq = reinterpret_cast<Vector*>(workspace.dq + static_cast<long long>(at.row) * kHead);
    for (int i = at.lane; i < kHead / 4; i += 32) dq[i] = {};
}

// A warp has 16 rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    round_queries(const __grid_constant__ BackwardParams params) {
    const int seqlen_q = params.sizes.seqlen_q;
    const WarpRow<THREADS> at(params.sizes, ceil_div(seqlen_q, kMmaM));
    if (at.batch >= params.sizes.batch) return;
    const Workspace workspace(params, at.batch, at.head);
    const auto dq = matrix_of<scalar_t>(params.dq, at.batch, at.head);
    const int first_row = at.row * kMmaM;
    for (int col = 0; col < kHeadDim; col += kMmaN) {
        const float* sums = workspace.fragment(first_row, col);
        Fragment values[1];
#pragma unroll
        for (int e = 0; e < 4; ++e) values[0][e] = sums[e * 32 + at.lane];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + half * 8 + at.lane / 4;
            if (row < seqlen_q)
                store_row<kHeadDim>(dq.row(row), values, half, params.softmax_scale, col);
        }
    }
}

// A warp's place: its rows of keys, and which part of queries and head dims is its own.
struct Place {
    int first_row = threadIdx.x / 32 / kSplit * kTiles * kMmaM;
    int part = threadIdx.x / 32 % kSplit;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

    // The row of keys of a lane's half (0: row g, 1: row g + 8) of its fragments m.
    __device__ int key(int m, int half) const { return first_row + m * kMmaM + half * 8 + g; }
    // The first of the two queries that a lane has of fragment n.
    __device__ int query(int n) const { return part * kQueries + n * kMmaN + 2 * t; }
};

// The part of a tile of dQ that a warp computes.
struct QueryPlace {
    int first_row = threadIdx.x / 32 % kQueryRows * kQueryTiles * kMmaM;
    int first_col = threadIdx.x / 32 / kQueryRows * kQueryCols;
};
using QuerySums = Accumulators<kQueryTiles, kQueryCols>;

// A query head, as the loop over tiles of queries reads it.
struct QueryHead {
    Matrix<const scalar_t> q, dout;
    const float* lse;
    Workspace workspace;

    __device__ QueryHead(const BackwardParams& params, int batch, int head)
        : q(matrix_of<const scalar_t>(params.q, batch, head)),
          dout(matrix_of<const scalar_t>(params.dout, batch, head)),
          lse(static_cast<const float*>(params.lse) + first_row_of(batch, head, params.sizes)),
          workspace(params, batch, head) {}

    __device__ void start_copy(Smem& smem, int stage, int first_row, int seqlen_q) const {
        copy_tile<THREADS, kHeadDim>(smem.q[stage], q, first_row, seqlen_q);
        copy_tile<THREADS, kValueDim>(smem.dout[stage], dout, first_row, seqlen_q);
        for (int i = threadIdx.x; i < kBlockM; i += THREADS) {
            const bool inside = first_row + i < seqlen_q;
            ptx::copy_async<sizeof(float)>(&smem.lse[stage][i], lse + first_row + i, inside);
            ptx::copy_async<sizeof(float)>(&smem.d[stage][i], workspace.d + first_row + i, inside);
        }
    }
};

// P^T = 2^(S^T - LSE) in place of S^T and dS^T = P^T o (dP^T - D) in place of dP^T. Where a row
// does not see a key both are set, not computed, to zero: an LSE of -inf or a NaN in the key must
// not show.
template <bool Masked>
__device__ inline void exponentiate(Scores& s, Scores& dp, const Place& place, const float* lse,
                                    const float* d, Mask mask, float scale_log2, int first_query,
                                    int first_key) {
#pragma unroll
    for (int n = 0; n < kQueries / kMmaN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int query = place.query(n) + e;
            const float lse_log2 = lse[query] * static_cast<float>(kLog2E), sum = d[query];
            const int keys_seen = Masked ? mask.keys_end(first_query + query) - first_key : 0;
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool seen = !Masked || place.key(m, half) < keys_seen;
                    float& weight = s[m][n][2 * half + e];
                    float& gradient = dp[m][n][2 * half + e];
                    weight = seen ? exp2_of(weight * scale_log2 - lse_log2) : 0.0f;
                    gradient = seen ? weight * (gradient - sum) : 0.0f;
                }
        }
}

// o += w v as add_product_nn computes it, but one multiply-add at a time and only where row and key
// see each other.
template <int Tiles, int Cols, class Tile, class Weight>
__device__ inline void add_seen(Accumulators<Tiles, Cols>& o, const Tile& v, int first_row,
                                int first_col, const Weight& weight) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int k = 0; k < Tile::kRows; ++k)
#pragma unroll
        for (int m = 0; m < Tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const scalar_t* w = weight(first_row + m * kMmaM + half * 8 + g, k);
                if (w == nullptr) continue;
#pragma unroll
                for (int n = 0; n < Cols / kMmaN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const scalar_t value = *v.at(k, first_col + n * kMmaN + 2 * t + e);
                        o[m][n][2 * half + e] += to_acc(*w) * to_acc(value);
                    }
            }
}

// The gradients of a warp's keys, in its part of the head dims.
struct KeyGradients {
    Accumulators<kTiles, kHeadPart> dk;
    Accumulators<kTiles, kValuePart> dv;

    // Takes in one tile of queries.
    __device__ void attend(Smem& smem, int stage, const Workspace& workspace, const Place& place,
                           Mask mask, float scale_log2, int first_query, int first_key,
                           bool masked) {
        Scores s = {}, dp = {};
        product_of_queries(s, smem.k, smem.q[stage], place);
        product_of_queries(dp, smem.v, smem.dout[stage], place);
        if (masked) {
            exponentiate<true>(s, dp, place, smem.lse[stage], smem.d[stage], mask, scale_log2,
                               first_query, first_key);
        } else {
            exponentiate<false>(s, dp, place, smem.lse[stage], smem.d[stage], mask, scale_log2,
                                first_query, first_key);
        }
        // Where a mask cuts through a tile, NaN or infinity in a row or a key must not reach those
        // that it does not see; but 0 * NaN is NaN, and a product over the whole tile would
        // multiply by it.
        if (kCausal && masked) {
            const bool found = finds_nonfinite<THREADS>(smem.q[stage]) ||
                               finds_nonfinite<THREADS>(smem.dout[stage]) ||
                               finds_nonfinite<THREADS>(smem.k);
            if (__syncthreads_or(found)) {
                multiply_seen(s, dp, smem, stage, workspace, place, mask, first_query, first_key);
                return;
            }
        }
        multiply(s, dp, smem, stage, workspace, place, first_query);
    }

  private:
    // dV += P^T dO, dK += dS^T Q and dQ += dS K.
    __device__ void multiply(const Scores& p, const Scores& ds, Smem& smem, int stage,
                             const Workspace& workspace, const Place& place, int first_query) {
        store_tile<kTiles, kQueries>(smem.ds, ds, place.first_row, place.part * kQueries);
        if constexpr (kSplit == 1) {
            add_product_pn<kTiles, kQueries, kValuePart>(dv, p, smem.dout[stage]);
            add_product_pn<kTiles, kQueries, kHeadPart>(dk, ds, smem.q[stage]);
            __syncthreads();  // dS^T is whole
        } else {
            store_tile<kTiles, kQueries>(smem.p, p, place.first_row, place.part * kQueries);
            __syncthreads();  // dS^T and P^T are whole
            add_product_nn<kTiles, kValuePart>(dv, smem.p, place.first_row, smem.dout[stage],
                                               place.part * kValuePart);
            add_product_nn<kTiles, kHeadPart>(dk, smem.ds, place.first_row, smem.q[stage],
                                              place.part * kHeadPart);
        }
        const QueryPlace to;
        QuerySums dq = {};
        add_product_tn<kQueryTiles, kQueryCols>(dq, smem.ds, to.first_row, smem.k, to.first_col);
        add_to_queries(dq, to, workspace, first_query);
    }

    // The same without what is not seen, slowly.
    __device__ void multiply_seen(const Scores& p, const Scores& ds, Smem& smem, int stage,
                                  const Workspace& workspace, const Place& place, Mask mask,
                                  int first_query, int first_key) {
        const auto weight = [&](int key, int query) -> const scalar_t* {
            const bool seen = first_key + key < mask.keys_end(first_query + query);
            return seen ? smem.ds.at(key, query) : nullptr;
        };
        store_tile<kTiles, kQueries>(smem.ds, p, place.first_row, place.part * kQueries);
        __syncthreads();  // P^T is whole, in the place of dS^T
        add_seen<kTiles, kValuePart>(dv, smem.dout[stage], place.first_row, place.part * kValuePart,
                                     weight);
        __syncthreads();  // every warp is done with P^T
        store_tile<kTiles, kQueries>(smem.ds, ds, place.first_row, place.part * kQueries);
        __syncthreads();  // dS^T is whole
        add_seen<kTiles, kHeadPart>(dk, smem.q[stage], place.first_row, place.part * kHeadPart,
                                    weight);
        const QueryPlace to;
        QuerySums dq = {};
        const auto transposed = [&](int query, int key) { return weight(key, query); };
        add_seen<kQueryTiles, kQueryCols>(dq, smem.k, to.first_row, to.first_col, transposed);
        add_to_queries(dq, to, workspace, first_query);
    }

    // The warp's rows of keys by its columns of queries.
    template <class Keys, class Queries>
    __device__ static void product_of_queries(Scores& s, const Keys& keys, const Queries& queries,
                                              const Place& place) {
        add_product_nt<kTiles, kQueries>(s, keys, place.first_row, queries, place.part * kQueries);
    }

    __device__ static void add_to_queries(const QuerySums& dq, const QueryPlace& to,
                                          const Workspace& workspace, int first_query) {
#pragma unroll
        for (int m = 0; m < kQueryTiles; ++m)
#pragma unroll
            for (int n = 0; n < kQueryCols / kMmaN; ++n) {
                float* sums = workspace.fragment(first_query + to.first_row + m * kMmaM,
                                                 to.first_col + n * kMmaN);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    atomicAdd(sums + e * 32 + threadIdx.x % 32, dq[m][n][e]);
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    key_tiles(const __grid_constant__ BackwardParams params) {
    const Sizes& sizes = params.sizes;
    const Mask mask{sizes.seqlen_q, sizes.seqlen_k};
    const float scale_log2 = params.softmax_scale * kLog2E;
    Smem& smem = shared_memory<Smem>();
    const Place place;

    // The first keys come first: under a causal mask most queries see those.
    const int heads = sizes.batch * sizes.kv_heads;
    const int first_key = blockIdx.x / heads * kBlockN;
    const int batch = blockIdx.x % heads / sizes.kv_heads;
    const int kv_head = blockIdx.x % heads % sizes.kv_heads;
    const int group = sizes.heads / sizes.kv_heads;

    clear_padding<THREADS, kHeadDim>(smem.k);
    clear_padding<THREADS, kValueDim>(smem.v);
    for (int stage = 0; stage < kStages; ++stage) {
        clear_padding<THREADS, kHeadDim>(smem.q[stage]);
        clear_padding<THREADS, kValueDim>(smem.dout[stage]);
    }
    copy_tile<THREADS, kHeadDim>(smem.k, matrix_of<const scalar_t>(params.k, batch, kv_head),
                                 first_key, sizes.seqlen_k);
    copy_tile<THREADS, kValueDim>(smem.v, matrix_of<const scalar_t>(params.v, batch, kv_head),
                                  first_key, sizes.seqlen_k);

    // Rows from unmasked_row on see all keys of the tile, if the tile is a whole one.
    const int last_key = first_key + kBlockN - 1;
    const int unmasked_row = last_key < sizes.seqlen_k ? mask.first_row(last_key) : sizes.seqlen_q;
    const int begin = mask.first_row(first_key) / kBlockM * kBlockM;
    KeyGradients gradients = {};
    for (int h = 0; h < group; ++h) {
        const QueryHead head(params, batch, kv_head * group + h);
        int stage = 0;
        for (int row = begin; row < sizes.seqlen_q; row += kBlockM) {
            const bool first = row == begin;
            if (first || kStages == 1) {
                __syncthreads();  // every warp is done with the queries before
                head.start_copy(smem, stage, row, sizes.seqlen_q);
            }
            ptx::wait_copies();
            __syncthreads();  // Q and dO are there, and every warp is done with the stage before
                              // and with dS
            if (kStages > 1 && row + kBlockM < sizes.seqlen_q) {
                head.start_copy(smem, (stage + 1) % kStages, row + kBlockM, sizes.seqlen_q);
            }
            const bool masked = row < unmasked_row || row + kBlockM > sizes.seqlen_q;
            gradients.attend(smem, stage, head.workspace, place, mask, scale_log2, row, first_key,
                             masked);
            stage = (stage + 1) % kStages;
        }
    }
    ptx::wait_copies();

    const auto dk = matrix_of<scalar_t>(params.dk, batch, kv_head);
    const auto dv = matrix_of<scalar_t>(params.dv, batch, kv_head);
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = first_key + place.key(m, half);
            if (key >= sizes.seqlen_k) continue;
            store_row<kHeadDim>(dk.row(key), gradients.dk[m], half, params.softmax_scale,
                                place.part * kHeadPart);
            store_row<kValueDim>(dv.row(key), gradients.dv[m], half, 1, place.part * kValuePart);
        }
}
