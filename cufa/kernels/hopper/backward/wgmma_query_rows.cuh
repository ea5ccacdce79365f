// The launches of the Hopper backward before and after the main one: they prepare rows of queries,
// round dQ, and sum the gradient of the sink.
#pragma once

#include "gradients/sink_gradient.cuh"
#include "hopper/backward/wgmma_workspace.cuh"

// A block's tile of queries in the launches before and after the main one. They take the tiles in
// reverse: what one kernel used last, the next finds in the L2 cache.
template <int BlockM, class Sums>
struct QueryBlock {
    static constexpr int kTileSums = Sums::kTile;

    Workspace<BlockM, Sums> workspace;
    Sequence sequence;
    int head, tile;

    __device__ static QueryBlock own(const BackwardParams& call) {
        const Workspace<BlockM, Sums> workspace(call);
        const int index = gridDim.x - 1 - blockIdx.x;
        const int matrix = index / workspace.tiles, tile = index % workspace.tiles;
        if constexpr (kPacked) {
            const auto [batch, first_row] = row_tile<BlockM>(
                tile, call.sizes.batch, call.sizes.seqlen_q, call.features.cu_seqlens_q);
            return {workspace, Sequence(call, batch), matrix, first_row / BlockM};
        }
        const int heads = call.sizes.heads;
        return {workspace, Sequence(call, matrix / heads), matrix % heads, tile};
    }
    // For packed sequences, the grid has more tiles than there are queries.
    __device__ bool exists() const { return !kPacked || tile * BlockM < sequence.seqlen_q; }
    __device__ float* sums() const { return workspace.sums_of(sequence, head, tile); }
};

// Whether NaN or infinity in a row of Q always makes its output NaN, and so D, if the row sees any
// key, which its LSE tells.
constexpr bool kQueryShowsInOutput = kScoresBeginWithLse && !kSink;

// Sets dQ to zero in the rows of a tile that see no key.
template <int Threads, int BlockM, class Block>
__device__ inline void clear_unseeing_rows(const BackwardParams& call, const Block& at) {
    const Sequence& sequence = at.sequence;
    const auto dq = sequence.queries<scalar_t>(call.dq, at.head);
    const Mask mask = sequence.mask(call.features);
    const int end = min((at.tile + 1) * BlockM, sequence.seqlen_q);
    for (int row = at.tile * BlockM + threadIdx.x / 32; row < end; row += Threads / 32) {
        if (mask.sees_any(row)) continue;
        for (int col = threadIdx.x % 32; col < kHeadDim; col += 32) dq.row(row)[col] = scalar_t{};
    }
}

// Zeroes a tile's sums and counts.
template <int Threads, class Block>
__device__ inline void clear_tile_sums(const Block& at) {
    auto* fours = reinterpret_cast<Pack<float, 4>*>(at.sums());
#pragma unroll
    for (int i = threadIdx.x; !kFirstSets && i < Block::kTileSums / 4; i += Threads) fours[i] = {};
    if (kTurns && threadIdx.x < kAdders) {
        at.workspace.added_to(at.sequence, at.head, at.tile)[threadIdx.x] = 0;
    }
}

// Lanes that share a row: about one for each chunk of O and dO.
constexpr int kRowChunk = kChunkOfRow<scalar_t, kValueDim>;
constexpr int kRowLanes = kValueDim > 16 * kRowChunk ? 32 : kValueDim > 8 * kRowChunk ? 16 : 8;

// A lane's part of the dot product of a row of O and a row of dO; 0 outside.
__device__ inline float part_of_product(const Matrix<const scalar_t>& o,
                                        const Matrix<const scalar_t>& dout, int row, bool inside) {
    using Chunk = Pack<scalar_t, kRowChunk>;
    float sum = 0;
    for (int col = threadIdx.x % kRowLanes * kRowChunk; inside && col < kValueDim;
         col += kRowLanes * kRowChunk) {
        const Chunk a = *reinterpret_cast<const Chunk*>(o.row(row) + col);
        const Chunk b = *reinterpret_cast<const Chunk*>(dout.row(row) + col);
#pragma unroll
        for (int e = 0; e < kRowChunk; ++e) sum += to_acc(a[e]) * to_acc(b[e]);
    }
    return sum;
}

// 0, or NaN if a lane's part of a row of Q has NaN or infinity.
__device__ inline float zero_or_nan(const Matrix<const scalar_t>& q, int row) {
    constexpr int kChunk = kChunkOfRow<scalar_t, kHeadDim>;
    float zero = 0;
    for (int col = threadIdx.x % kRowLanes * kChunk; col < kHeadDim; col += kRowLanes * kChunk) {
        const auto chunk = *reinterpret_cast<const Pack<scalar_t, kChunk>*>(q.row(row) + col);
#pragma unroll
        for (int e = 0; e < kChunk; ++e) zero += to_acc(chunk[e]) * 0;
    }
    return zero;
}

// Computes the statistics of a tile's rows.
template <int Threads, int BlockM, class Block>
__device__ inline void write_statistics(const BackwardParams& call, const Block& at) {
    const Sequence& sequence = at.sequence;
    const auto o = sequence.queries<const scalar_t>(call.o, at.head);
    const auto dout = sequence.queries<const scalar_t>(call.dout, at.head);
    const long long first_row = sequence.first_row(at.head, call.sizes);
    const float* lse = static_cast<const float*>(call.lse) + first_row;
    const float* dlse = call.dlse ? static_cast<const float*>(call.dlse) + first_row : nullptr;
    const auto q = sequence.queries<const scalar_t>(call.q, at.head);
    // TMA also copies rows of the next sequence.
    const int rows_end = kPacked ? call.sizes.seqlen_q - sequence.first_q : sequence.seqlen_q;
    RowStatistics<BlockM>& statistics = at.workspace.rows_of(sequence, at.head, at.tile);
    float zero = 0;  // or NaN
#pragma unroll
    for (int i = threadIdx.x / kRowLanes; i < BlockM; i += Threads / kRowLanes) {
        const int row = at.tile * BlockM + i;
        const bool inside = row < rows_end;
        const bool counts = row < sequence.seqlen_q;
        const float log = counts ? lse[row] : negative_infinity();
        float part = part_of_product(o, dout, row, inside);
        if (inside && (!kQueryShowsInOutput || log == negative_infinity()))
            part += zero_or_nan(q, row);
        zero += part * 0;
        const float sum = lanes_sum<kRowLanes>(part);
        if (threadIdx.x % kRowLanes == 0) {
            const int place = statistics.place(i);
            statistics.minus_lse[place] =
                (log == negative_infinity() ? log : -log) * unit_of_lse(call);
            const float minus_d = dlse && counts ? dlse[row] - sum : -sum;
            statistics.minus_d[place] = minus_d / kept_scale(call.features);
        }
    }
    const bool nonfinite = __syncthreads_or(zero != 0);
    if (threadIdx.x == 0) statistics.nonfinite = nonfinite;
}

// Prepares a tile of queries for the main launch. Where the last block that adds to dQ rounds it,
// rows that no block may process are set to zero.
template <int Threads, int BlockM, class Sums>
__device__ inline void prepare_rows(const BackwardParams& call) {
    const auto at = QueryBlock<BlockM, Sums>::own(call);
    if (!at.exists()) return;
    clear_tile_sums<Threads>(at);
    if (kRounds) clear_unseeing_rows<Threads, BlockM>(call, at);
    write_statistics<Threads, BlockM>(call, at);
}

// A tile of dQ, rounded. Rows are padded by one vector against bank conflicts.
template <int BlockM, int Dims>
struct RoundedTile {
    static constexpr int kVector = 16 / sizeof(scalar_t);
    alignas(16) scalar_t rows[BlockM][Dims + kVector];
};

// Rounds a tile of dQ. The sums of rows that see no key were never set.
template <int Threads, int BlockM, class Sums>
__device__ inline void round_tile(const BackwardParams& call) {
    using Rounded = RoundedTile<BlockM, Sums::kDims>;
    constexpr int kVector = Rounded::kVector;
    auto& rounded = shared_memory<Rounded, ROUND_SMEM_BYTES>().rows;
    const auto at = QueryBlock<BlockM, Sums>::own(call);
    if (!at.exists()) return;
    const float scale = call.softmax_scale * kept_scale(call.features);
    const auto* fours = reinterpret_cast<const Pack<float, 4>*>(at.sums());
#pragma unroll
    for (int i = threadIdx.x; i < Sums::kTile / 4; i += Threads) {
        const auto four = fours[i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const auto [query, dim] = Sums::place_of(i, e);
            rounded[query][dim] = from_acc<scalar_t>(four[e] * scale);
        }
    }
    __syncthreads();

    constexpr int kStored = min_of(kVector, kHeadDim & -kHeadDim);
    constexpr int kRowStores = kHeadDim / kStored;
    using Stored = Pack<scalar_t, kStored>;
    const auto dq = at.sequence.template queries<scalar_t>(call.dq, at.head);
    const int first_row = at.tile * BlockM;
    const int rows = min(BlockM, at.sequence.seqlen_q - first_row);
    const Mask mask = at.sequence.mask(call.features);
    for (int i = threadIdx.x; i < rows * kRowStores; i += Threads) {
        const int row = i / kRowStores, col = i % kRowStores * kStored;
        *reinterpret_cast<Stored*>(dq.row(first_row + row) + col) =
            mask.sees_any(first_row + row) ? *reinterpret_cast<const Stored*>(&rounded[row][col])
                                           : Stored{};
    }
}

// D of a row, whatever its Q has.
__device__ inline float d_of_row(const BackwardParams& call, const Sequence& sequence, int head,
                                 int row) {
    const scalar_t* const o = sequence.queries<const scalar_t>(call.o, head).row(row);
    const scalar_t* const dout = sequence.queries<const scalar_t>(call.dout, head).row(row);
    float sum = 0;
#pragma unroll 1
    for (int col = 0; col < kValueDim; ++col) sum += to_acc(o[col]) * to_acc(dout[col]);
    const long long number = sequence.first_row(head, call.sizes) + row;
    return call.dlse ? sum - static_cast<const float*>(call.dlse)[number] : sum;
}

// Computes the gradient of a head's sink from the rows' statistics.
template <int Threads, int BlockM, class Sums>
__device__ inline void sum_up_sink(const BackwardParams& call) {
    const Workspace<BlockM, Sums> workspace(call);
    const auto stats_of = [&](const Sequence& sequence, int head, int row) -> RowStats {
        const auto& statistics = workspace.rows_of(sequence, head, row / BlockM);
        const int place = statistics.place(row % BlockM);
        const float minus_lse = statistics.minus_lse[place] / unit_of_lse(call);
        return {-minus_lse * static_cast<float>(kLog2E),
                -statistics.minus_d[place] * kept_scale(call.features)};
    };
    acc_t part = part_of_sink_gradient<Threads>(call, stats_of);
    if (!is_finite(part)) {  // but the sink's gradient has no product with Q
        const auto exact = [&](const Sequence& sequence, int head, int row) -> RowStats {
            return {stats_of(sequence, head, row).lse_log2, d_of_row(call, sequence, head, row)};
        };
        part = part_of_sink_gradient<Threads, 1>(call, exact);
    }
    write_sum_of_parts<Threads>(call, part, shared_memory<WarpSums<Threads>, SINK_SMEM_BYTES>());
}
