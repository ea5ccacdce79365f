// Parts of tiles of queries that a launch of its own merges, where there are many of a tile: one
// block has no way to the L2 cache that is wide enough for all of them. Or where blocks have shares
// of the keys of all tiles.
#pragma once

#include "hopper/forward/key_parts.cuh"
#include "hopper/forward/taken_tiles.cuh"
#include "hopper/forward/wgmma_forward_output.cuh"

// The result of a block. Dims are the columns of a warpgroup's sums; the rows are the same for all.
template <int Dims>
struct alignas(16) PartToMerge {
    static_assert(kTeams == 1, "all warpgroups have the same rows");
    SumsOfPart<Dims> of_warpgroups[kColumnWarpgroups];
    OnlineSoftmax rows[kWgmmaM];

    __device__ void write(const WgmmaSums<Dims>& o, RowPair softmax, int warpgroup) {
        of_warpgroups[warpgroup].write(o);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& row = softmax.rows[half];
            row.total<4>();
            if (warpgroup == 0 && threadIdx.x % 4 == 0) rows[row_of_thread() + 8 * half] = row;
        }
    }
};

// All of them, in the workspace. Blocks with shares of keys have tiles to merge before them.
template <int Dims>
__device__ inline PartToMerge<Dims>* parts_to_merge(const ForwardParams& call) {
    void* parts = call.workspace;
    if constexpr (kSharesKeys) parts = tiles_to_merge(call) + call.parting.count;
    return static_cast<PartToMerge<Dims>*>(parts);
}

// A block of this launch has as many threads as a warpgroup. Many blocks of an SM hide how long
// loads take; where there are fewer, each thread has more of them under way (kLoadsAtOnce). Without
// these bounds, the compiler would have fewer registers and loads one after the other.
constexpr int kMergeThreads = kWarpgroup, kMergeBlocksPerSm = kSharesKeys ? 4 : 8;

// A thread's sums of `Count` times eight columns of O, and its two rows.
template <int Count>
struct MergedColumns {
    using Four = Pack<float, 4>;
    Four sums[Count] = {};
    RowPair softmax;

    // Adds some parts at once. Those that are not there see no key.
    template <int Parts>
    __device__ void add(const MergedColumns (&parts)[Parts]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& row = softmax.rows[half];
            float max = row.max;
#pragma unroll
            for (const MergedColumns& part : parts) max = fmaxf(max, part.softmax.rows[half].max);
            const float shrink = row.raise_max(max);
#pragma unroll
            for (int i = 0; i < 2 * Count; ++i) sums[i / 2][2 * half + i % 2] *= shrink;
#pragma unroll
            for (const MergedColumns& part : parts) {
                const OnlineSoftmax& other = part.softmax.rows[half];
                const float weight = exp2_of(other.max - row.shift());
                row.sum += other.sum * weight;
#pragma unroll
                for (int i = 0; i < 2 * Count; ++i) {
                    const int col = 2 * half + i % 2;
                    sums[i / 2][col] += part.sums[i / 2][col] * weight;
                }
            }
        }
    }
};

struct MergeSmem {
    MergedColumns<1> of_warps[kWarps][32];
};

static_assert(!kMergesLater || !kRangeMask, "there the order of tiles depends on the launch");

// The results of a tile's parts, in the workspace: one after the other or, of blocks with shares,
// those of the tiles that they end or continue; the first part is of a tile that its block begins.
template <int Dims>
struct PartsOfTile {
    const PartToMerge<Dims>* first;
    int count;

    __device__ PartsOfTile(const ForwardParams& call, int first_part, int count)
        : first(parts_to_merge<Dims>(call) + first_part * kOfBlock), count(count) {}

    __device__ const PartToMerge<Dims>& operator[](int part) const {
        return kSharesKeys && part == 0 ? first[result_of_block(0, true)] : later(part);
    }
    __device__ const PartToMerge<Dims>& later(int part) const { return first[part * kOfBlock]; }

  private:
    static constexpr int kOfBlock = kSharesKeys ? result_of_block(1, false) : 1;
};

// Merges the parts of tiles of queries. Columns are counted in times eight. `output_scale(work)` is
// the factor of a head's sums of weighted values.
template <int Dims, class Element, class OutputScale>
class PartMerger {
  public:
    using Parts = PartsOfTile<Dims>;
    static constexpr int kColumns = Dims / 8, kAllColumns = kColumnWarpgroups * kColumns;

    __device__ PartMerger(const Params& params, const OutputScale& output_scale)
        : params(params), output_scale(output_scale) {}

    // `Count` times eight columns of all rows: each warp has some of the rows.
    template <int Count>
    __device__ void merge(const WorkTile& work, const Parts& parts, int columns) const {
        store(merged_columns<Count, 1>(parts, 0, columns, threadIdx.x), work, columns);
    }

    // Eight columns of the rows that warp number `rows` would have: each warp has some of the
    // parts.
    __device__ void merge_rows(WorkTile work, const Parts& parts, int columns, int rows) const {
        auto& of_warps = shared_memory<MergeSmem, MERGE_SMEM_BYTES>().of_warps;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, thread = rows * 32 + lane;
        auto merged = merged_columns<1, kWarps>(parts, warp, columns, thread);
        __syncthreads();  // what was there has been read
        of_warps[warp][lane] = merged;
        __syncthreads();
        if (warp != 0) return;
        MergedColumns<1> others[kWarps - 1];
#pragma unroll
        for (int i = 0; i < kWarps - 1; ++i) others[i] = of_warps[1 + i][lane];
        merged.add(others);
        work.first_row += row_of_warp(thread);
        store(merged, work, columns);
    }

  private:
    static constexpr int kLoadsAtOnce = kSharesKeys ? 8 : 4;  // of four sums

    // Of every Step-th part, the columns of the thread with that number.
    template <int Count, int Step>
    __device__ MergedColumns<Count> merged_columns(const Parts& parts, int first, int columns,
                                                   int thread) const {
        constexpr int kAtOnce = kLoadsAtOnce / Count;
        MergedColumns<Count> merged;
        for (int part = first; part < parts.count; part += kAtOnce * Step) {
            MergedColumns<Count> some[kAtOnce] = {};
            load(some[0], parts[part], columns, thread);
#pragma unroll
            for (int i = 1; i < kAtOnce; ++i) {  // all are loaded at once
                const int other = part + i * Step;
                if (other < parts.count) load(some[i], parts.later(other), columns, thread);
            }
            merged.add(some);
        }
        return merged;
    }

    template <int Count>
    __device__ void load(MergedColumns<Count>& to, const PartToMerge<Dims>& part, int columns,
                         int thread) const {
        const auto& sums = part.of_warpgroups[columns / kColumns].sums;
#pragma unroll
        for (int i = 0; i < Count; ++i) to.sums[i] = sums[columns % kColumns + i][thread];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            to.softmax.rows[half] = part.rows[row_of_thread(thread) + 8 * half];
    }

    template <int Count>
    __device__ void store(const MergedColumns<Count>& merged, const WorkTile& work,
                          int columns) const {
        RowPair softmax = merged.softmax;
        const float of_head = output_scale(work);
        const Sequence sequence = work.sequence(params.call);
        const auto rows = sequence.queries<Element>(params.call.o, work.head);
        const int warpgroup = columns / kColumns;
        const int first_col = warpgroup * kOwnCols + columns % kColumns * 8 + col_of_thread();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float scale = end_row(softmax.rows[half], of_head, params, work);
            const int row = row_of(work, half);
            if (row >= sequence.seqlen_q) continue;
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                const Pack<Element, 2> pair = {
                    from_acc<Element>(merged.sums[i][2 * half] * scale),
                    from_acc<Element>(merged.sums[i][2 * half + 1] * scale)};
                store_pair(rows.row(row), first_col + i * 8, pair);
            }
        }
        if (columns == 0) store_lse(softmax, params, work, warpgroup);
    }

    __device__ static void store_pair(Element* row, int col, const Pack<Element, 2>& pair) {
        if (col + 1 < kValueDim) {
            *reinterpret_cast<Pack<Element, 2>*>(row + col) = pair;
        } else if (col < kValueDim) {
            row[col] = pair[0];
        }
    }

    const Params& params;
    const OutputScale& output_scale;
};

// Where all tiles have equally many parts, there is a block for each tile, eight columns and the
// rows of a warp.
template <class Merger>
__device__ inline void merge_tile(const ForwardParams& call, const Merger& merger) {
    const int columns = blockIdx.x % Merger::kAllColumns, line = blockIdx.x / Merger::kAllColumns;
    WorkTile work = Order(call).at(call.parting.whole + line / kWarps * call.parting.parts);
    limit_parts(call, work);
    const bool stored = work.parts == 1, empty = work.first_row >= work.sequence(call).seqlen_q;
    if (stored || (kPacked && empty)) return;
    merger.merge_rows(work, {call, work.first_part, work.parts}, columns, line % kWarps);
}

// Where blocks have shares of keys, there are some small blocks for each of those blocks. A tile is
// merged by those of all that have parts of it but the last: the more parts, the smaller the pieces
// of the output.
template <class Merger>
__device__ inline void merge_share(const ForwardParams& call, const Merger& merger) {
    constexpr int kAll = Merger::kAllColumns, kMany = 4, kFewParts = 4, kManyParts = 16;
    static_assert(Merger::kColumns % kMany == 0, "these are of one warpgroup");
    const int of_block = gridDim.x / call.parting.count, block = blockIdx.x / of_block;
    const TileToMerge& tile = tiles_to_merge(call)[block];
    if (tile.parts == 0) return;
    const int mergers = (tile.parts - 1) * of_block;
    const int number = tile.part * of_block + blockIdx.x % of_block;
    // Blocks with consecutive shares are adjacent.
    const typename Merger::Parts parts(call, block - tile.part, tile.parts);
    if (tile.parts > kManyParts) {
        for (int i = number; i < kAll * kWarps; i += mergers)
            merger.merge_rows(tile.work, parts, i % kAll, i / kAll);
    } else if (tile.parts > kFewParts) {
        for (int i = number; i < kAll; i += mergers) merger.template merge<1>(tile.work, parts, i);
    } else {
        for (int i = number; i < kAll / kMany; i += mergers)
            merger.template merge<kMany>(tile.work, parts, i * kMany);
    }
}

template <int Dims, class Element, class OutputScale>
__device__ inline void merge_parts_of_tiles(const Params& params, const OutputScale& output_scale) {
    ptx::wait_for_launch_before();
    if constexpr (kMergesLater) {
        const PartMerger<Dims, Element, OutputScale> merger(params, output_scale);
        if constexpr (kSharesKeys) {
            merge_share(params.call, merger);
        } else {
            merge_tile(params.call, merger);
        }
    }
}
