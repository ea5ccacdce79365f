// The workspace of the Hopper backward: the sums of dQ, in the layout of the warpgroups, and the
// statistics of rows.
#pragma once

#include "gradients/array_gradients.cuh"
#include "hopper/backward/key_statistics.cuh"
#include "hopper/backward/wgmma_key_sums.cuh"
#include "scores/dropout.cuh"

// How a warpgroup's sums of a part of dQ lie in memory: in groups of four of a thread, those of a
// warp next to each other.
struct FoursOfThreads {
    // Adds a warpgroup's sums to a part in global memory, or sets it.
    template <int Count>
    __device__ static void add(float* part, const float (&sums)[Count], bool set) {
        float* fours = own_fours<Count>(part);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) {
            float* to = fours + i * 32 * 4;
            if (set) {
                *reinterpret_cast<Pack<float, 4>*>(to) = four_of(sums, i);
            } else {
                ptx::add_to_global(to, four_of(sums, i).v);
            }
        }
    }

    // Writes a warpgroup's sums in the layout of global memory.
    template <int Count>
    __device__ static void write(float* part, const float (&sums)[Count]) {
        unsigned int thread = threadIdx.x % kWarpgroup;
        ptx::hold(thread);  // or the address would stay in a register from tile to tile
        auto* fours = reinterpret_cast<Pack<float, 4>*>(part) + own_four<Count>(thread);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) fours[i * 32] = four_of(sums, i);
    }

    // Adds those of a part in global memory to a warpgroup's sums.
    template <int Count>
    __device__ static void collect(float (&sums)[Count], const float* part) {
        const float* fours = own_fours<Count>(part);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) {
            const auto four = *reinterpret_cast<const Pack<float, 4>*>(fours + i * 32 * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[4 * i + e] += four[e];
        }
    }

  protected:
    // The index of a thread's first four in a part, of Count sums a thread.
    template <int Count>
    __device__ static int own_four(int thread) {
        return thread / 32 * (Count / 4 * 32) + thread % 32;
    }
    // Writes two rounded elements of a row, if they exist.
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

  private:
    template <int Count>
    __device__ static Pack<float, 4> four_of(const float (&sums)[Count], int i) {
        return {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
    }
    template <int Count, class Float>
    __device__ static Float* own_fours(Float* part) {
        return part + own_four<Count>(threadIdx.x % kWarpgroup) * 4;
    }
};

// Where a sum of a tile belongs.
struct SumPlace {
    int query, dim;
};

// A tile of dQ^T in the layout of the warpgroups: parts that are panels of 64 dims by BlockM
// queries or, if Halved, halves of the last panel, each with half of the queries. A part has slabs
// of 16 dims, one of each warp. Dims that only pad a panel have no slab.
template <int BlockM, int Panels, bool Halved>
struct QuerySums : FoursOfThreads {
    static constexpr int kLargestPart = kPanelCols * BlockM;
    static constexpr int kSlabDims = kWgmmaM / (kWarpgroup / 32);
    static constexpr int kDims = round_up(kHeadDim, kSlabDims);
    static constexpr int kTile = kDims * BlockM;
    static constexpr bool kPadded = kDims != Panels * kPanelCols;

    struct Part {
        float* sums;
        int dims;  // that have slabs

        // Whether the warp has sums of them. If not, it must leave the part alone.
        __device__ bool has_own_slab() const {
            return !kPadded || static_cast<int>(threadIdx.x % kWarpgroup / 32) * kSlabDims < dims;
        }
    };
    __device__ static Part panel_of(float* tile, int panel) {
        return {tile + panel * kLargestPart, dims_of(panel)};
    }
    __device__ static Part half_of(float* tile, int half) {
        return {panel_of(tile, Panels - 1).sums + half * kHalfFours * 4, dims_of(Panels - 1)};
    }
    // The bytes of a panel's slabs, which follow each other.
    __device__ static int panel_bytes(int panel) {
        return dims_of(panel) * BlockM * static_cast<int>(sizeof(float));
    }
    // Whether a warpgroup has a part of a tile.
    __device__ static bool has_part(int, int, int) { return true; }

    // Where sum `e` of a four belongs.
    __device__ static SumPlace place_of(int four, int e = 0) {
        const bool in_half = Halved && four >= kFirstOfHalves;
        const int in_halves = four - kFirstOfHalves;
        const int in_part = in_half ? in_halves % kHalfFours : four;
        const int half = in_half ? in_halves / kHalfFours : 0;
        const int cols = in_half ? BlockM / 2 : BlockM, slab_fours = kSlabDims * cols / 4;
        const int first_dim = in_half ? (Panels - 1) * kPanelCols : 0;
        return {half * cols + in_part % slab_fours / 32 * 8 + four % 4 * 2 + e % 2,
                first_dim + in_part / slab_fours * kSlabDims + four % 32 / 4 + e / 2 * 8};
    }

    // Writes a part of dQ's first rows, rounded.
    template <int Count>
    __device__ static void round(const float* tile, const float* part, const float (&sums)[Count],
                                 const Matrix<scalar_t>& dq, int rows, float scale) {
        const int first_four =
            (part - tile) / 4 + own_four<Count>(threadIdx.x % kWarpgroup / 32 * 32);
        const auto [first_row, first_col] = place_of(first_four);
        const int row = first_row + threadIdx.x % 32 / 4;
        const int col = first_col + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            // Eight dims of eight queries become eight queries of eight dims.
            const unsigned int pair =
                ptx::transpose_matrix(round_pair(sums[2 * i] * scale, sums[2 * i + 1] * scale));
            write_pair(dq, row + i / 2 * 8, col + i % 2 * 8, rows, pair);
        }
    }

  private:
    static constexpr int kFirstOfHalves = (Panels - 1) * (kLargestPart / 4);
    static constexpr int kHalfFours = Halved ? (kTile / 4 - kFirstOfHalves) / 2 : 1;

    __device__ static int dims_of(int panel) {
        return min(max(kDims - panel * kPanelCols, 0), kPanelCols);
    }
};

// A tile of dQ, not transposed, all of which one warpgroup has: 64 queries, 16 of each warp. The
// warpgroups have tiles in turn.
struct WholeQuerySums : FoursOfThreads {
    static constexpr int kDims = round_up(kHeadDim, kWgmmaK);
    static constexpr int kTile = kDims * kWgmmaM;
    static constexpr int kLargestPart = kTile;

    struct Part {
        float* sums;
        __device__ static bool has_own_slab() { return true; }
    };
    __device__ static Part panel_of(float* tile, int) { return {tile}; }
    __device__ static Part half_of(float* tile, int) { return {tile}; }
    __device__ static int panel_bytes(int) { return kTile * static_cast<int>(sizeof(float)); }
    __device__ static bool has_part(int warpgroup, int head, int tile) {
        return (head + tile) % kConsumers == warpgroup;
    }

    __device__ static SumPlace place_of(int four, int e) {
        constexpr int kWarpFours = kDims / 8 * 32;
        return {four / kWarpFours * 16 + four % 32 / 4 + e / 2 * 8,
                four % kWarpFours / 32 * 8 + four % 4 * 2 + e % 2};
    }

    template <int Count>
    __device__ static void round(const float*, const float*, const float (&sums)[Count],
                                 const Matrix<scalar_t>& dq, int rows, float scale) {
        const int row = row_of_thread(), col = col_of_thread();
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            const unsigned int pair = round_pair(sums[2 * i] * scale, sums[2 * i + 1] * scale);
            write_pair(dq, row + i % 2 * 8, col + i / 2 * 8, rows, pair);
        }
    }
};

// Whether a block uses the same sums for one head after the other. They stay in the L2 cache then.
// A warpgroup that has whole tiles may get sums that the other one had: it has waited for dS^T of
// its tile, which the other shared after it was done with them. Packed sequences have few keys, as
// far as known: then there are no sums of several tiles of keys.
constexpr bool kReusesSums = kAdding == kAlone && kRounds && !kPacked;

// The workspace: the sums of dQ, tile by tile; the statistics of rows; sums of dK and dV if blocks
// have parts of the queries; if blocks take turns, how many have added each warpgroup's part of a
// tile. From `end` on, it has what each kernel names.
template <int BlockM, class SumsOfTile>
struct Workspace {
    using Sums = SumsOfTile;

    float* sums;
    RowStatistics<BlockM>* rows;
    WgmmaKeySums key_sums;
    unsigned int (*added)[kAdders];
    unsigned int* end;
    int heads, tiles;  // tiles of one head; of packed sequences, of all of them

    __device__ explicit Workspace(const BackwardParams& call)
        : sums(static_cast<float*>(call.workspace)),
          heads(call.sizes.heads),
          tiles(row_tiles<BlockM>(kPacked ? call.sizes.batch : 1, call.sizes.seqlen_q)) {
        const int count = (kPacked ? 1 : call.sizes.batch) * heads * tiles;
        rows = reinterpret_cast<RowStatistics<BlockM>*>(sums + static_cast<long long>(count) *
                                                                   Sums::kTile);
        key_sums = {{reinterpret_cast<float*>(rows + count), call.sizes}};
        added =
            reinterpret_cast<unsigned int (*)[kAdders]>(key_sums.data + KeySums::count(call.sizes));
        end = added[kTurns ? count : 0];
    }

    // The index of a tile of a sequence, the inverse of row_tile. A grid has a block for each tile,
    // so an int suffices.
    __device__ int place_of(const Sequence& sequence, int head, int tile) const {
        return place_from(first_place_of(sequence), head, tile);
    }
    // The same from the index of the sequence's first tile, which need not be recomputed each time.
    __device__ int place_from(int first_place, int head, int tile) const {
        return first_place + head * tiles + tile;
    }
    __device__ int first_place_of(const Sequence& sequence) const {
        if constexpr (kPacked) return sequence.first_q / BlockM + sequence.batch;
        return sequence.batch * heads * tiles;
    }
    // The index of the sums that a block uses for the first tile of a sequence.
    __device__ int first_sums_of(const BackwardParams& call, const KeyWork& work) const {
        if constexpr (!kReusesSums) return first_place_of(work.sequence(call));
        const int first_head = blockIdx.x / kClusterBlocks * heads_of_part(call.sizes);
        return (first_head - work.heads(call.sizes).begin) * tiles;
    }
    __device__ float* sums_of(const Sequence& sequence, int head, int tile) const {
        return sums_at(place_of(sequence, head, tile));
    }
    __device__ float* sums_at(int place) const {
        return sums + static_cast<long long>(place) * Sums::kTile;
    }
    // Rounds a part of a tile of dQ, of which a warpgroup has all sums.
    template <int Count>
    __device__ void round(const BackwardParams& call, const Sequence& sequence, int first_sums,
                          const float* tile_sums, const float* part,
                          const float (&of_part)[Count]) const {
        const int place = static_cast<int>((tile_sums - sums) / Sums::kTile) - first_sums;
        const int head = place / tiles, first_row = place % tiles * BlockM;
        auto rows = sequence.queries<scalar_t>(call.dq, head);
        rows.data = rows.row(first_row);
        Sums::round(tile_sums, part, of_part, rows, sequence.seqlen_q - first_row,
                    call.softmax_scale * kept_scale(call.features));
    }
    // Adds a warpgroup's part of a tile of dQ or, if it is the `last` to add, rounds it with the
    // sums of others. One that `sets` the sums is the first.
    template <int Count>
    __device__ static void add_or_round(const BackwardParams& call, const Sequence& sequence,
                                        float* tile_sums, float* part, float (&of_part)[Count],
                                        bool last, bool sets) {
        if (!kRounds || !last) return Sums::add(part, of_part, sets);
        if (!sets) Sums::collect(of_part, part);
        const Workspace workspace(call);
        workspace.round(call, sequence, workspace.first_place_of(sequence), tile_sums, part,
                        of_part);
    }
    __device__ RowStatistics<BlockM>& rows_of(const Sequence& sequence, int head, int tile) const {
        return rows[place_of(sequence, head, tile)];
    }
    __device__ unsigned int (&added_to(const Sequence& sequence, int head, int tile)
                                 const)[kAdders] {
        return added[place_of(sequence, head, tile)];
    }
};
