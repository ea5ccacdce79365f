// bwd_2_flash_v2: FlashAttention-2's backward on CUDA cores (Dao 2023, Algorithm 2).
//
// Change from bwd_1_naive: P is recomputed tile by tile from Q, K and the LSE, so nothing of size
// seqlen_q * seqlen_k is stored. rowsum(P o dP) is D = rowsum(dO o O), computed beforehand. A block
// owns a tile of keys and loops over the queries that see them, for every query head of the group.
// dK and dV stay in registers. dQ is summed by atomic additions in acc_t and rounded at the end.
// Where every run must give the same bits, blocks that own queries compute dQ instead. Wide tiles
// do not fit into shared memory: it holds one slice of the head dims at a time. S and dP are summed
// slice by slice, then each slice is loaded again for its columns of dK, dV and dQ.
//
// Launches: row_sums (LSE and D; sets the sums in the workspace to zero), key_tiles, round_queries
// or, if deterministic, query_tiles; bias_gradient, array_gradients and sink_gradient, each if it
// is wanted.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     block: BLOCK_N keys of one KV head, or BLOCK_M queries of one head;
//          thread: kRows rows x kKeys keys of S and dP; some columns of kTileKeys keys of dK and
//          dV, or of kRows rows of dQ
// Shared   K, V, Q and dO tiles, of SLICES slices one; P and dS tiles, LSE and D of the query tile
// Global   workspace: LSE and D (batch, heads, seqlen_q, 2); sums of dQ (batch, heads, seqlen_q,
//          head_dim), unless deterministic; sums of the gradients of score_mod's arrays and of the
//          bias, each if wanted
// Writes   dQ, dK, dV
#include "call/grid.cuh"
#include "call/query_tiles.cuh"
#include "call/warp_rows.cuh"
#include "cuda_cores/scores.cuh"
#include "gradients/array_gradients.cuh"
#include "gradients/bias_sums.cuh"
#include "gradients/score_gradients.cuh"
#include "gradients/sink_gradient.cuh"
#include "softmax/exp2_table.cuh"

constexpr int kThreads = THREADS, kBlocksPerSm = BLOCKS_PER_SM;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
using Layout = ThreadLayout<kThreads, LANES>;
constexpr int kRows = kBlockM / Layout::kY;
constexpr int kKeys = kBlockN / Layout::kX;
constexpr int kTileKeys = kBlockN / Layout::kY;
// Slices of the head dims, of which shared memory holds one at a time; the columns of a slice, in
// groups of a thread, and without padding if there is one slice; how many slices have any.
constexpr int kSlices = SLICES;
constexpr int kHeadCols = Layout::padded(ceil_div(kHeadDim, kSlices));
constexpr int kValueCols = Layout::padded(ceil_div(kValueDim, kSlices));
constexpr int kHeadGroups = Layout::groups(kHeadCols), kValueGroups = Layout::groups(kValueCols);
constexpr int kHeadDepth = min_of(kHeadDim, kHeadCols);
constexpr int kValueDepth = min_of(kValueDim, kValueCols);
constexpr int kHeadSlices = ceil_div(kHeadDim, kHeadCols);
constexpr int kValueSlices = ceil_div(kValueDim, kValueCols);
static_assert(kRows * Layout::kY == kBlockM, "BLOCK_M must be a multiple of THREADS / LANES");
static_assert(kKeys * Layout::kX == kBlockN, "BLOCK_N must be a multiple of LANES");
static_assert(kTileKeys * Layout::kY == kBlockN, "BLOCK_N must be a multiple of THREADS / LANES");
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "the host passes a different struct");

struct Tiles {
    SharedMatrix<kBlockN, kHeadCols> k;
    SharedMatrix<kBlockN, kValueDepth> v;
    SharedMatrix<kBlockM, kHeadCols> q;
    SharedMatrix<kBlockM, kValueCols> dout;
    SharedMatrix<kBlockM, kBlockN> p, ds;
    RowStats rows[kBlockM];
};

// The workspace's parts, each for all heads. The first needs the strictest alignment.
struct Workspace {
    RowStats* stats;
    acc_t *dq, *arrays, *bias;

    __device__ explicit Workspace(const BackwardParams& params) {
        const long long rows = rows_of_heads(params.sizes);
        stats = static_cast<RowStats*>(params.workspace);
        dq = reinterpret_cast<acc_t*>(stats + rows);
        arrays = dq + (kDeterministic ? 0 : rows * kHeadDim);
        bias = arrays + array_sums(params.features);
    }
};

// A query head of a sequence.
struct QueryHead {
    ScoreRules rules;
    Matrix<const scalar_t> q, dout;
    const RowStats* stats;
    Matrix<acc_t> dq_sums;
    acc_t* arrays;
    BiasSums bias;

    __device__ QueryHead(const BackwardParams& params, const Sequence& sequence, int head)
        : QueryHead(params, sequence, head, Workspace(params),
                    sequence.first_row(head, params.sizes)) {}

  private:
    __device__ QueryHead(const BackwardParams& params, const Sequence& sequence, int head,
                         const Workspace& workspace, long long first_row)
        : rules(params, sequence, head),
          q(sequence.queries<const scalar_t>(params.q, head)),
          dout(sequence.queries<const scalar_t>(params.dout, head)),
          stats(workspace.stats + first_row),
          dq_sums{workspace.dq + first_row * kHeadDim, kHeadDim},
          arrays(workspace.arrays),
          bias(params, sequence, head, workspace.bias) {}
};

// A tile of keys, with their values.
struct KeysAt {
    Matrix<const scalar_t> k, v;
    int first, end;
};

// Loads a slice of a tile. With several, a thread recomputes its rows and columns for each, so that
// they take no registers in between.
template <int Dims, class Tile>
__device__ inline void load_slice(Tile& tile, Matrix<const scalar_t> source, int first_row,
                                  int end_row, int first_col) {
    const unsigned int thread = kSlices > 1 ? ptx::anew(threadIdx.x) : threadIdx.x;
    load_tile<kThreads, Dims>(tile, source, first_row, end_row, first_col, thread);
}

__device__ inline void load_queries(Tiles& smem, const QueryHead& head, int first_row, int slice) {
    const int seqlen_q = head.rules.mask.seqlen_q;
    load_slice<kHeadDim>(smem.q, head.q, first_row, seqlen_q, slice * kHeadCols);
    load_slice<kValueDim>(smem.dout, head.dout, first_row, seqlen_q, slice * kValueCols);
    if (slice > 0) return;
    for (int i = threadIdx.x; i < kBlockM; i += kThreads) {
        const bool inside = first_row + i < seqlen_q;
        smem.rows[i] = inside ? head.stats[first_row + i] : RowStats{};
    }
}

__device__ inline void load_keys(Tiles& smem, const KeysAt& keys, int slice) {
    load_slice<kHeadDim>(smem.k, keys.k, keys.first, keys.end, slice * kHeadCols);
}
__device__ inline void load_values(Tiles& smem, const KeysAt& keys, int slice) {
    load_slice<kValueDim>(smem.v, keys.v, keys.first, keys.end, slice * kValueCols);
}

// Loads all slices in turn, and calls `use` with each.
template <class Load, class Use>
__device__ inline void for_slices(const Load& load, const Use& use) {
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
        __syncthreads();  // every warp is done with what was there
        load(slice);
        __syncthreads();
        use(slice);
    }
}
// The same in reverse, where the last slice is there. Unrolled: each has its registers.
template <class Load, class Use>
__device__ inline void for_slices_back(const Load& load, const Use& use) {
#pragma unroll
    for (int slice = kSlices - 1; slice >= 0; --slice) {
        if (slice < kSlices - 1) {
            __syncthreads();  // every warp is done with the slice before
            load(slice);
            __syncthreads();
        }
        use(slice);
    }
}

// P and dS of a thread.
struct ScoreGradients {
    ScoreTile<kRows, kKeys> p = {}, ds = {};

    // Adds a slice's part of S and dP.
    __device__ void add_products(const Tiles& smem, const Layout& layout, int slice) {
        if (slice < kHeadSlices) add_product<kHeadDepth>(p, smem.q, smem.k, layout);
        if (slice < kValueSlices) add_product<kValueDepth>(ds, smem.dout, smem.v, layout);
    }

    // Turns S into P and dP into dS. Where a row does not see a key, neither is computed: an LSE of
    // -inf or a NaN in the key must have no effect. `add_up` adds to the other gradients, score by
    // score.
    template <bool Masked, class AddUp>
    __device__ void differentiate(const Tiles& smem, const ScoreRules& rules, const Layout& layout,
                                  int first_row, int first_key, const AddUp& add_up) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = first_row + layout.row(i);
            const RowStats stats = smem.rows[layout.row(i)];
#pragma unroll
            for (int j = 0; j < kKeys; ++j) {
                const int key = first_key + layout.key(j);
                if (Masked && !rules.sees(row, key)) {
                    p[i][j] = ds[i][j] = unseen_weight();
                    continue;
                }
                const bool kept = !kDropout || rules.keeps(row, key);
                const ScoreGradient gradient =
                    score_gradient(Exp2(), rules, p[i][j], ds[i][j], row, key, stats, kept);
                add_up(row, key, p[i][j], gradient);
                p[i][j] = gradient.p;
                ds[i][j] = gradient.product + 0;  // never -0
            }
        }
    }

  private:
    // The sum of a slice is complete before it is added: so it rounds less.
    template <int Depth, class A, class B>
    __device__ static void add_product(ScoreTile<kRows, kKeys>& sums, const A& a, const B& b,
                                       const Layout& layout) {
        if constexpr (kSlices == 1) {
            product_nt<Depth>(sums, a, b, layout);
        } else {
            ScoreTile<kRows, kKeys> of_slice;
            product_nt<Depth>(of_slice, a, b, layout);
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int j = 0; j < kKeys; ++j) sums[i][j] += of_slice[i][j];
        }
    }
};

// The gradients of a thread's keys.
struct KeyGradients {
    OutputTile<kTileKeys, kHeadGroups> dk[kHeadSlices];
    OutputTile<kTileKeys, kValueGroups> dv[kValueSlices];
    PendingSums<1> of_arrays;

    // Processes one tile of queries. The keys are there if there is one slice.
    template <bool Masked>
    __device__ void attend(Tiles& smem, const QueryHead& head, const KeysAt& keys,
                           const Layout& layout, int first_row) {
        const auto load = [&](int slice) {
            load_queries(smem, head, first_row, slice);
            if (kSlices > 1) load_keys(smem, keys, slice);
        };
        const auto load_all = [&](int slice) {
            load(slice);
            if (kSlices > 1) load_values(smem, keys, slice);
        };
        ScoreGradients scores;
        for_slices(load_all, [&](int slice) { scores.add_products(smem, layout, slice); });
        const auto add_up = [&](int row, int key, acc_t product, const ScoreGradient& gradient) {
            if constexpr (kBiasGradient) head.bias.add(row, key, gradient.score);
            if constexpr (kArrayGradients) {
                ElementSlopes slopes;
                head.rules.element_slopes_at(product, row, key, slopes);
                of_arrays.add(head.arrays, 0, 0, slopes, gradient.modified);
            }
        };
        scores.differentiate<Masked>(smem, head.rules, layout, first_row, keys.first, add_up);
        store_scores(smem.p, scores.p, layout);
        store_scores(smem.ds, scores.ds, layout);
        __syncthreads();
        for_slices_back(load, [&](int slice) {
            if (slice < kValueSlices) product_tn<Masked>(dv[slice], smem.p, smem.dout, layout);
            if (slice >= kHeadSlices) return;
            product_tn<Masked>(dk[slice], smem.ds, smem.q, layout);
            if constexpr (!kDeterministic)
                add_to_queries<Masked>(smem, head, layout, first_row, slice * kHeadCols);
        });
    }

  private:
    // dQ += dS K, in the columns of a slice. With several, rows are found anew for each.
    template <bool Masked>
    __device__ static void add_to_queries(const Tiles& smem, const QueryHead& head,
                                          const Layout& layout, int first_query, int first_col) {
        const int first_row = kSlices > 1 ? ptx::anew(first_query) : first_query;
        OutputTile<kRows, kHeadGroups> dq = {};
        product_nn<Masked>(dq, smem.ds, smem.k, layout);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = first_row + layout.row(i);
            if (row >= head.rules.mask.seqlen_q) continue;
#pragma unroll
            for (int c = 0; c < kHeadGroups; ++c)
#pragma unroll
                for (int e = 0; e < kVec; ++e) {
                    const int col = first_col + layout.dim(c) + e;
                    if (col < kHeadDim) atomicAdd(head.dq_sums.row(row) + col, dq[i][c][e]);
                }
        }
    }
};

// The gradients of a thread's queries.
struct QueryGradients {
    OutputTile<kRows, kHeadGroups> dq[kHeadSlices];

    // Processes one tile of keys. The queries are there if there is one slice.
    template <bool Masked>
    __device__ void attend(Tiles& smem, const QueryHead& head, const KeysAt& keys,
                           const Layout& layout, int first_row) {
        const auto load = [&](int slice) { load_keys(smem, keys, slice); };
        const auto load_all = [&](int slice) {
            load(slice);
            load_values(smem, keys, slice);
            if (kSlices > 1) load_queries(smem, head, first_row, slice);
        };
        ScoreGradients scores;
        for_slices(load_all, [&](int slice) { scores.add_products(smem, layout, slice); });
        const auto nothing_else = [](int, int, acc_t, const ScoreGradient&) {};
        scores.differentiate<Masked>(smem, head.rules, layout, first_row, keys.first, nothing_else);
        // A row of dS is written and read by lanes of one warp only.
        store_scores(smem.ds, scores.ds, layout);
        __syncwarp();
        for_slices_back(load, [&](int slice) {
            if (slice < kHeadSlices) product_nn<Masked>(dq[slice], smem.ds, smem.k, layout);
        });
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    row_sums(const __grid_constant__ BackwardParams params) {
    const Workspace workspace(params);
    write_row_stats<kThreads>(params, workspace.stats);
    const long long row = warp_of_grid<kThreads>();
    if (!kDeterministic && row < rows_of_heads(params.sizes)) {
        for (int col = threadIdx.x % 32; col < kHeadDim; col += 32)
            workspace.dq[row * kHeadDim + col] = 0;
    }
    if constexpr (kBiasGradient) clear_bias_sums<kThreads>(params, workspace.bias);
    if constexpr (kArrayGradients)
        clear_sums<kThreads>(workspace.arrays, array_sums(params.features));
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    key_tiles(const __grid_constant__ BackwardParams params) {
    Tiles& smem = shared_memory<Tiles>();
    const Layout layout;
    const auto [sequence, kv_head, first_key] = key_tile_of_block<kBlockN>(params);
    const int keys_end = end_of_keys(params, sequence);
    if (kPacked && first_key >= keys_end) return;  // the sequence does not have this tile

    const KeysAt keys = {sequence.keys<const scalar_t>(params.k, kv_head),
                         sequence.keys<const scalar_t>(params.v, kv_head), first_key,
                         sequence.seqlen_k};
    if (kSlices == 1) {
        load_keys(smem, keys, 0);
        load_values(smem, keys, 0);
    }
    KeyGradients gradients = {};
    const int group = group_of(params.sizes);
    for (int h = 0; h < group; ++h) {
        const QueryHead head(params, sequence, kv_head * group + h);
        const QueryTiles<kBlockM> tiles(head.rules.mask, first_key, kBlockN);
        for (int row = tiles.begin; row < tiles.end; row += kBlockM) {
            if (tiles.masked(row)) {
                gradients.attend<true>(smem, head, keys, layout, row);
            } else {
                gradients.attend<false>(smem, head, keys, layout, row);
            }
        }
    }

    if constexpr (kArrayGradients) gradients.of_arrays.flush(Workspace(params).arrays);
    const auto dk = sequence.keys<scalar_t>(params.dk, kv_head);
    const auto dv = sequence.keys<scalar_t>(params.dv, kv_head);
#pragma unroll
    for (int j = 0; j < kTileKeys; ++j) {
        const int key = first_key + layout.key_row<kTileKeys>(j);
        if (key >= keys_end) continue;
#pragma unroll
        for (int slice = 0; slice < kHeadSlices; ++slice)
            store_row<kHeadDim>(dk.row(key), gradients.dk[slice][j], params.softmax_scale, layout,
                                slice * kHeadCols);
#pragma unroll
        for (int slice = 0; slice < kValueSlices; ++slice)
            store_row<kValueDim>(dv.row(key), gradients.dv[slice][j], 1, layout,
                                 slice * kValueCols);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    query_tiles(const __grid_constant__ BackwardParams params) {
    if constexpr (kDeterministic) {
        Tiles& smem = shared_memory<Tiles>();
        const Layout layout;
        const auto [sequence, head, kv_head, first_row] = query_tile_of_block<kBlockM>(params);
        if (kPacked && first_row >= sequence.seqlen_q) return;  // the sequence lacks this tile

        const QueryHead queries(params, sequence, head);
        const KeyTiles<kBlockN> tiles(queries.rules.mask, first_row, kBlockM);
        const auto k = sequence.keys<const scalar_t>(params.k, kv_head);
        const auto v = sequence.keys<const scalar_t>(params.v, kv_head);
        if (kSlices == 1) load_queries(smem, queries, first_row, 0);
        QueryGradients gradients = {};
        for (int key = tiles.begin; key < tiles.end; key += kBlockN) {
            const KeysAt keys = {k, v, key, sequence.seqlen_k};
            if (tiles.masked(key)) {
                gradients.attend<true>(smem, queries, keys, layout, first_row);
            } else {
                gradients.attend<false>(smem, queries, keys, layout, first_row);
            }
        }

        const auto dq = sequence.queries<scalar_t>(params.dq, head);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = first_row + layout.row(i);
            if (row >= sequence.seqlen_q) continue;
#pragma unroll
            for (int slice = 0; slice < kHeadSlices; ++slice)
                store_row<kHeadDim>(dq.row(row), gradients.dq[slice][i], params.softmax_scale,
                                    layout, slice * kHeadCols);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    round_queries(const __grid_constant__ BackwardParams params) {
    if constexpr (!kDeterministic) {
        const long long index = warp_of_grid<kThreads>();
        if (index >= rows_of_heads(params.sizes)) return;
        const WarpRow at(params.sizes, index);
        if (!at.is_of_a_sequence(params)) return;
        const acc_t* sums = Workspace(params).dq + index * kHeadDim;
        scalar_t* dq = matrix_of<scalar_t>(params.dq, at.batch, at.head).row(at.row);
        for (int col = at.lane; col < kHeadDim; col += 32)
            dq[col] = from_acc<scalar_t>(params.softmax_scale * sums[col]);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    bias_gradient(const __grid_constant__ BackwardParams params) {
    if constexpr (kBiasGradient)
        write_bias_gradient<bias_t, kThreads>(params, Workspace(params).bias);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    array_gradients(const __grid_constant__ BackwardParams params) {
    if constexpr (kArrayGradients) round_array_sums<kThreads>(params, Workspace(params).arrays);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    sink_gradient(const __grid_constant__ BackwardParams params) {
    if constexpr (kSink)
        write_sink_gradient<kThreads>(params, StatsInOrder{params, Workspace(params).stats},
                                      shared_memory<WarpSums<kThreads>, SINK_SMEM_BYTES>());
}
