// The workspace of the Hopper backward: the sums of dQ and the statistics of rows, and the launches
// before and after the products' that prepare them and round them.
#pragma once

#include "array_gradients.cuh"
#include "key_statistics.cuh"
#include "sink_gradient.cuh"
#include "wgmma_key_sums.cuh"

// A tile of dQ^T as the warpgroups have it: panels of 64 dims by BlockM queries or, of the last one
// if it is Halved, by as many eights of them as are half. Each such part is a warpgroup's
// accumulators, of which a thread's fours lie together.
template <int BlockM, int Panels, bool Halved>
struct QuerySums {
    static constexpr int kPanel = kPanelCols * BlockM;
    static constexpr int kTile = Panels * kPanel;

    // Where a part of a tile begins.
    __device__ static float* panel_of(float* tile, int panel) { return tile + panel * kPanel; }
    __device__ static float* half_of(float* tile, int half) {
        return panel_of(tile, Panels - 1) + half * (kPanel / 2);
    }

    // The query and the dim of the first of the fours with this index. The second is of the next
    // query, the other two are eight dims further on.
    __device__ static int query(int four) {
        const bool in_half = Halved && four >= (Panels - 1) * (kPanel / 4);
        const int cols = in_half ? BlockM / 2 : BlockM;
        const int half = in_half ? four % (kPanel / 4) / (kPanel / 8) : 0;
        return half * cols + four / kWarpgroup % (cols / 8) * 8 + four % 4 * 2;
    }
    __device__ static int dim(int four) {
        return four / (kPanel / 4) * kPanelCols + four % kWarpgroup / 32 * 16 + four % 32 / 4;
    }

    // Adds a warpgroup's sums to a part in global memory, or sets it.
    template <int Count>
    __device__ static void add(float* part, const float (&sums)[Count], bool set) {
        float* fours = own_fours(part);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) {
            float* to = fours + i * kWarpgroup * 4;
            if (set) {
                *reinterpret_cast<Pack<float, 4>*>(to) = four_of(sums, i);
            } else {
                ptx::add_to_global(to, four_of(sums, i).v);
            }
        }
    }

    // Writes it as it lies there.
    template <int Count>
    __device__ static void write(float* part, const float (&sums)[Count]) {
        unsigned int thread = threadIdx.x % kWarpgroup;
        ptx::hold(thread);  // or the address would be kept in a register from tile to tile
        auto* fours = reinterpret_cast<Pack<float, 4>*>(part) + thread;
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) fours[i * kWarpgroup] = four_of(sums, i);
    }

    // Writes a part of dQ's first rows, rounded: what a warpgroup has and, unless that is all, the
    // sums in global memory.
    template <int Count>
    __device__ static void round(float* tile, float* part, float (&sums)[Count], bool is_all,
                                 const Matrix<scalar_t>& dq, int rows, float scale) {
        const float* fours = own_fours(part);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) {
            if (is_all) break;
            const auto four = *reinterpret_cast<const Pack<float, 4>*>(fours + i * kWarpgroup * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[4 * i + e] += four[e];
        }
        const int first_four = (part - tile) / 4 + threadIdx.x % kWarpgroup / 32 * 32;
        const int row = query(first_four) + threadIdx.x % 32 / 4;
        const int col = dim(first_four) + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            // Eight dims of eight queries become eight queries of eight dims.
            const unsigned int pair =
                ptx::transpose_matrix(round_pair(sums[2 * i] * scale, sums[2 * i + 1] * scale));
            write_pair(dq, row + i / 2 * 8, col + i % 2 * 8, rows, pair);
        }
    }

  private:
    template <int Count>
    __device__ static Pack<float, 4> four_of(const float (&sums)[Count], int i) {
        return {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
    }
    __device__ static float* own_fours(float* part) { return part + threadIdx.x % kWarpgroup * 4; }
    __device__ static void write_pair(const Matrix<scalar_t>& dq, int row, int col, int rows,
                                      unsigned int pair) {
        if (row >= rows || col >= kHeadDim) return;
        scalar_t* to = dq.row(row) + col;
        if (kHeadDim % 2 == 0 || col + 1 < kHeadDim) {
            *reinterpret_cast<unsigned int*>(to) = pair;
        } else {
            *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(pair);
        }
    }
};

// The workspace: dQ's sums tile by tile, then the rows' statistics, sums of dK and dV if blocks
// have parts of the heads and, if they take turns, how many have added each warpgroup's part of a
// tile; if they stay for many tiles of keys, how many of those were taken.
template <int BlockM, class Sums>
struct Workspace {
    float* sums;
    RowStatistics<BlockM>* rows;
    WgmmaKeySums key_sums;
    unsigned int (*added)[kConsumers];
    unsigned int* taken;
    int heads, tiles;  // tiles of one head; of packed sequences, of all of them

    __device__ explicit Workspace(const BackwardParams& call)
        : sums(static_cast<float*>(call.workspace)),
          heads(call.sizes.heads),
          tiles(row_tiles<BlockM>(kPacked ? call.sizes.batch : 1, call.sizes.seqlen_q)) {
        const int count = (kPacked ? 1 : call.sizes.batch) * heads * tiles;
        rows = reinterpret_cast<RowStatistics<BlockM>*>(sums + static_cast<long long>(count) *
                                                                   Sums::kTile);
        key_sums = {{reinterpret_cast<float*>(rows + count), call.sizes}};
        added = reinterpret_cast<unsigned int (*)[kConsumers]>(key_sums.data +
                                                               KeySums::count(call.sizes));
        taken = added[kTurns ? count : 0];
    }

    // Where a tile of a sequence lies; row_tile is the other way round. A grid has a block for each
    // tile, so an int counts them.
    __device__ int place_of(const Sequence& sequence, int head, int tile) const {
        return place_from(first_place_of(sequence), head, tile);
    }
    // The same from where the sequence's first tile lies, which need not be worked out each time.
    __device__ int place_from(int first_place, int head, int tile) const {
        return first_place + head * tiles + tile;
    }
    __device__ int first_place_of(const Sequence& sequence) const {
        if constexpr (kPacked) return sequence.first_q / BlockM + sequence.batch;
        return sequence.batch * heads * tiles;
    }
    __device__ float* sums_of(const Sequence& sequence, int head, int tile) const {
        return sums_at(place_of(sequence, head, tile));
    }
    __device__ float* sums_at(int place) const {
        return sums + static_cast<long long>(place) * Sums::kTile;
    }
    // Which tile of a sequence it is that has these sums.
    __device__ HeadTile tile_of(const float* tile_sums, int first_place) const {
        const int place = static_cast<int>((tile_sums - sums) / Sums::kTile) - first_place;
        return {place / tiles, place % tiles};
    }
    __device__ RowStatistics<BlockM>& rows_of(const Sequence& sequence, int head, int tile) const {
        return rows[place_of(sequence, head, tile)];
    }
    __device__ unsigned int (&added_to(const Sequence& sequence, int head, int tile)
                                 const)[kConsumers] {
        return added[place_of(sequence, head, tile)];
    }
};

// The tile of queries of a block of the kernels before and after the main one. Those go through the
// tiles backwards: what one kernel used last, the next finds in the L2 cache.
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
    // Of packed sequences the grid has more tiles than queries.
    __device__ bool exists() const { return !kPacked || tile * BlockM < sequence.seqlen_q; }
    __device__ float* sums() const { return workspace.sums_of(sequence, head, tile); }
};

// Whether NaN or infinity in a row of Q makes its output NaN, and so D, if it sees any key and the
// LSE says so.
constexpr bool kQueryShowsInOutput = kScoresBeginWithLse && !kSink;

// Makes dQ zero in the rows of a tile that see no key.
template <int Threads, int BlockM, class Block>
__device__ inline void clear_unseeing_rows(const BackwardParams& call, const Block& at) {
    const Sequence& sequence = at.sequence;
    const auto dq = sequence.queries<scalar_t>(call.dq, at.head);
    const Mask mask = sequence.mask(call.features);
    const int end = min((at.tile + 1) * BlockM, sequence.seqlen_q);
    for (int row = at.tile * BlockM + threadIdx.x / 32; row < end; row += Threads / 32) {
        if (mask.keys_end(row) > mask.first_key(row)) continue;
        for (int col = threadIdx.x % 32; col < kHeadDim; col += 32) dq.row(row)[col] = scalar_t{};
    }
}

// Sets to zero what blocks will add to and count with.
template <int Threads, class Block>
__device__ inline void clear_sums(const Block& at) {
    auto* fours = reinterpret_cast<Pack<float, 4>*>(at.sums());
#pragma unroll
    for (int i = threadIdx.x; !kFirstSets && i < Block::kTileSums / 4; i += Threads) fours[i] = {};
    if (kTurns && threadIdx.x < kConsumers) {
        at.workspace.added_to(at.sequence, at.head, at.tile)[threadIdx.x] = 0;
    }
}

// As many lanes share a row as have a chunk of O and of dO each time.
constexpr int kRowChunk = min_of(16 / sizeof(scalar_t), kValueDim & -kValueDim);
constexpr int kRowLanes = kValueDim > 16 * kRowChunk ? 32 : kValueDim > 8 * kRowChunk ? 16 : 8;

// A lane's part of the product of a row of O and one of dO; 0 outside of these.
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

// Makes `zero` NaN if there is NaN or infinity in a lane's part of a row of Q.
__device__ inline void look_for_nonfinite(float& zero, const Matrix<const scalar_t>& q, int row) {
    for (int col = threadIdx.x % kRowLanes; col < kHeadDim; col += kRowLanes) {
        zero += to_acc(q.row(row)[col]) * 0;
    }
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
    // The copy engine brings rows of the next sequence, too.
    const int rows_end = kPacked ? call.sizes.seqlen_q - sequence.first_q : sequence.seqlen_q;
    RowStatistics<BlockM>& statistics = at.workspace.rows_of(sequence, at.head, at.tile);
    float zero = 0;  // or NaN
#pragma unroll
    for (int i = threadIdx.x / kRowLanes; i < BlockM; i += Threads / kRowLanes) {
        const int row = at.tile * BlockM + i;
        const bool inside = row < rows_end;
        const bool counts = row < sequence.seqlen_q;
        const float log = counts ? lse[row] : negative_infinity();
        const float part = part_of_product(o, dout, row, inside);
        zero += part * 0;
        if (inside && (!kQueryShowsInOutput || log == negative_infinity())) {
            look_for_nonfinite(zero, q, row);
        }
        const float sum = lanes_sum<kRowLanes>(part);
        if (threadIdx.x % kRowLanes == 0) {
            const int place = statistics.place(i);
            statistics.minus_lse[place] =
                (log == negative_infinity() ? log : -log) * unit_of_lse(call);
            statistics.minus_d[place] = dlse && counts ? dlse[row] - sum : -sum;
        }
    }
    const bool nonfinite = __syncthreads_or(zero != 0);
    if (threadIdx.x == 0) statistics.nonfinite = nonfinite;
}

// Prepares a tile of queries for the products' launch. Where the last block that adds to dQ rounds
// it, rows that none may work on are made zero.
template <int Threads, int BlockM, class Sums>
__device__ inline void prepare_rows(const BackwardParams& call) {
    const auto at = QueryBlock<BlockM, Sums>::own(call);
    if (!at.exists()) return;
    clear_sums<Threads>(at);
    if (kRounds) clear_unseeing_rows<Threads, BlockM>(call, at);
    write_statistics<Threads, BlockM>(call, at);
}

// A tile of dQ, rounded; rows are a vector longer than they are, against bank conflicts.
template <int BlockM, int Panels>
struct RoundedTile {
    static constexpr int kVector = 16 / sizeof(scalar_t);
    alignas(16) scalar_t rows[BlockM][Panels * kPanelCols + kVector];
};

// Rounds a tile of dQ. Rows that see no key have sums that nobody set.
template <int Threads, int BlockM, int Panels, class Sums>
__device__ inline void round_tile(const BackwardParams& call) {
    constexpr int kVector = RoundedTile<BlockM, Panels>::kVector;
    auto& rounded = shared_memory<RoundedTile<BlockM, Panels>, ROUND_SMEM_BYTES>().rows;
    const auto at = QueryBlock<BlockM, Sums>::own(call);
    if (!at.exists()) return;
    const float scale = call.softmax_scale;
    const auto* fours = reinterpret_cast<const Pack<float, 4>*>(at.sums());
#pragma unroll
    for (int i = threadIdx.x; i < Sums::kTile / 4; i += Threads) {
        const auto four = fours[i];
        const int query = Sums::query(i), dim = Sums::dim(i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            rounded[query + e % 2][dim + e / 2 * 8] = from_acc<scalar_t>(four[e] * scale);
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
        const bool sees_any = mask.keys_end(first_row + row) > mask.first_key(first_row + row);
        *reinterpret_cast<Stored*>(dq.row(first_row + row) + col) =
            sees_any ? *reinterpret_cast<const Stored*>(&rounded[row][col]) : Stored{};
    }
}

// Computes the gradient of a head's sink from the rows' statistics.
template <int Threads, int BlockM, class Sums>
__device__ inline void sum_up_sink(const BackwardParams& call) {
    const Workspace<BlockM, Sums> workspace(call);
    write_sink_gradient<Threads>(
        call,
        [&](const Sequence& sequence, int head, int row) -> RowStats {
            const auto& statistics = workspace.rows_of(sequence, head, row / BlockM);
            const int place = statistics.place(row % BlockM);
            const float minus_lse = statistics.minus_lse[place] / unit_of_lse(call);
            return {-minus_lse * static_cast<float>(kLog2E), -statistics.minus_d[place]};
        },
        shared_memory<WarpSums<Threads>, SINK_SMEM_BYTES>());
}
