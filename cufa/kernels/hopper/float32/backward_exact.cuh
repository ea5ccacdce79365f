// What the float32 backwards do with pairs of tiles that halves cannot hold: a mask hides NaN,
// infinity or numbers that leave others no bits from some rows, D of a row leaves dS of others
// none, or elements are beyond the range of units. CUDA cores compute these few pairs from the
// caller's tensors and add to the results of all others: once for the gradients of the keys and
// once for those of the queries, so that each block is the only one to add to its rows.
#pragma once

#include "gradients/score_gradients.cuh"
#include "hopper/float32/backward_walks.cuh"
#include "softmax/exp2_table.cuh"

constexpr int kExactThreads = EXACT_THREADS;

// P and dS of a pair.
struct ExactSmem {
    float p[kBlockM][kBlockN], ds[kBlockM][kBlockN];
};

// The rows of a pair of tiles.
struct ExactPair {
    const KeyTile& work;
    const Statistics& queries;
    ScoreRules rules;
    Matrix<const float> q, k, v, dout;
    Matrix<float> dk, dv;

    __device__ ExactPair(const BackwardParams& call, const KeyTile& work, int head, int first_row)
        : work(work),
          queries(Workspace(call).queries_from(work.sequence, head, first_row).statistics),
          rules(call, work.sequence, head),
          q(rows_of<const float>(call.q, head)),
          k(keys_of<const float>(call.k)),
          v(keys_of<const float>(call.v)),
          dout(rows_of<const float>(call.dout, head)),
          dk(keys_of<float>(call.dk)),
          dv(keys_of<float>(call.dv)) {}

    __device__ int row(int i) const { return queries.first_row + i; }
    __device__ int key(int j) const { return work.first_key + j; }
    __device__ bool sees(int i, int j) const { return rules.sees(row(i), key(j)); }

    template <class T>
    __device__ Matrix<T> rows_of(const Tensor& tensor, int head) const {
        return work.sequence.queries<T>(tensor, head).from(queries.first_row);
    }

  private:
    template <class T>
    __device__ Matrix<T> keys_of(const Tensor& tensor) const {
        return work.sequence.keys<T>(tensor, work.kv_head).from(work.first_key);
    }
};

template <int Dims>
__device__ inline float dot(const float* a, const float* b) {
    float sum = 0;
#pragma unroll 4
    for (int col = 0; col < Dims; ++col) sum += a[col] * b[col];
    return sum;
}

__device__ inline void make_exact_scores(ExactSmem& smem, const ExactPair& pair) {
    __syncthreads();  // nobody reads the old contents
    for (int at = threadIdx.x; at < kBlockM * kBlockN; at += kExactThreads) {
        const int i = at / kBlockN, j = at % kBlockN, row = pair.row(i), key = pair.key(j);
        ScoreGradient gradient;
        if (pair.sees(i, j)) {
            const float product = dot<kHeadDim>(pair.q.row(i), pair.k.row(j));
            const float dp = dot<kValueDim>(pair.dout.row(i), pair.v.row(j));
            const RowStats stats = {pair.queries.lse_log2[i], pair.queries.d[i]};
            const bool kept = kDropout && pair.rules.keeps(row, key);
            gradient = score_gradient(Exp2(), pair.rules, product, dp, row, key, stats, kept);
        }
        smem.p[i][j] = gradient.p;
        smem.ds[i][j] = gradient.product;
    }
    __syncthreads();
}

// rows += scale * weights^T values, where they are seen, as in dV += P^T dO.
template <int Dims>
__device__ inline void add_exact_keys(const Matrix<float>& rows, const ExactPair& pair,
                                      const float (&weights)[kBlockM][kBlockN],
                                      const Matrix<const float>& values, float scale) {
    for (int at = threadIdx.x; at < kBlockN * Dims; at += kExactThreads) {
        const int j = at / Dims, col = at % Dims;
        float sum = 0;
        bool any = false;
        for (int i = 0; i < kBlockM; ++i) {
            if (!pair.sees(i, j)) continue;
            sum += weights[i][j] * values.row(i)[col];
            any = true;
        }
        if (any) rows.row(j)[col] += sum * scale;
    }
}

// dQ += scale * dS K, where they are seen.
__device__ inline void add_exact_queries(const Matrix<float>& rows, const ExactSmem& smem,
                                         const ExactPair& pair, float scale) {
    for (int at = threadIdx.x; at < kBlockM * kHeadDim; at += kExactThreads) {
        const int i = at / kHeadDim, col = at % kHeadDim;
        float sum = 0;
        bool any = false;
        for (int j = 0; j < kBlockN; ++j) {
            if (!pair.sees(i, j)) continue;
            sum += smem.ds[i][j] * pair.k.row(j)[col];
            any = true;
        }
        if (any) rows.row(i)[col] += sum * scale;
    }
}

// Whether a pair of tiles is left to this launch.
__device__ inline bool is_left(const BackwardParams& call, const KeyTile& work, const Tiles& tiles,
                               int head, int first_row) {
    bool cut = false;
    if constexpr (kKeyMask) {
        const Seen seen(seen_parts(call), call, work.sequence, head);
        if (!seen.shows_any(first_row, work.first_key)) return false;
        cut = seen.cuts(first_row, work.first_key);
    }
    const Workspace workspace(call);
    const Statistics& queries = workspace.queries_from(work.sequence, head, first_row).statistics;
    const KeyUnits& keys = workspace.keys_from(work.sequence, work.kv_head, work.first_key).units;
    return !halves_hold(queries, keys, tiles.masked(first_row, cut));
}

// Adds what is left to the gradients of a tile of keys.
__device__ inline void add_left_to_keys(ExactSmem& smem, const BackwardParams& call,
                                        const KeyTile& work) {
    if (kPacked && work.first_key >= end_of_keys(call, work.sequence)) return;
    const auto left = [&](const RangeWalk& walk) {
        return is_left(call, work, walk.tiles, walk.head(), walk.first_row());
    };
    bool any_left = false;
    for (RangeWalk walk(call, work, threadIdx.x, kExactThreads); !walk.at_end(); walk.advance())
        any_left |= left(walk);
    if (!__syncthreads_or(any_left)) return;

    for (RangeWalk walk(call, work, 0, 1); !walk.at_end(); walk.advance()) {
        if (!left(walk)) continue;
        const ExactPair pair(call, work, walk.head(), walk.first_row());
        make_exact_scores(smem, pair);
        add_exact_keys<kValueDim>(pair.dv, pair, smem.p, pair.dout, 1);
        add_exact_keys<kHeadDim>(pair.dk, pair, smem.ds, pair.q, call.softmax_scale);
    }
}

// Adds what is left to the gradients of a tile of queries.
__device__ inline void add_left_to_queries(ExactSmem& smem, const BackwardParams& call, int head,
                                           int tile) {
    const Sizes& sizes = call.sizes;
    const RowTile place =
        row_tile<kBlockM>(tile, sizes.batch, sizes.seqlen_q, call.features.cu_seqlens_q);
    const int first_row = place.first_row;
    const Sequence sequence(call, place.batch);
    if (kPacked && first_row >= sequence.seqlen_q) return;
    const KeyTiles<kBlockN> keys(sequence.mask(call.features), first_row, kBlockM);
    const auto tile_at = [&](int key) -> KeyTile {
        return {sequence, kv_head_of(head, sizes), key};
    };
    const auto left = [&](int key) {
        const KeyTile work = tile_at(key);
        return is_left(call, work, query_tiles_of(call, work), head, first_row);
    };
    bool any_left = false;
    for (int key = keys.begin + threadIdx.x * kBlockN; key < keys.end;
         key += kExactThreads * kBlockN)
        any_left |= left(key);
    if (!__syncthreads_or(any_left)) return;

    for (int key = keys.begin; key < keys.end; key += kBlockN) {
        if (!left(key)) continue;
        const KeyTile work = tile_at(key);
        const ExactPair pair(call, work, head, first_row);
        make_exact_scores(smem, pair);
        add_exact_queries(pair.rows_of<float>(call.dq, head), smem, pair, call.softmax_scale);
    }
}

__device__ inline void add_left(ExactSmem& smem, const BackwardParams& call) {
    const Workspace workspace(call);
    const int of_keys = call.sizes.kv_heads * workspace.key_tiles;
    const int block = blockIdx.x, tile = block - of_keys;
    if (tile < 0) {
        add_left_to_keys(smem, call, key_tile(call, block));
    } else {
        add_left_to_queries(smem, call, tile / workspace.query_tiles, tile % workspace.query_tiles);
    }
}
