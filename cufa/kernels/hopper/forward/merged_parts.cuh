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

// Groups of a block's threads, each of which has the threads of a warpgroup.
constexpr int kMergeGroups = MERGE_GROUPS, kMergeThreads = kMergeGroups * kWarpgroup;

// A thread's sums of `Count` times eight columns of O, and its two rows.
template <int Count>
struct MergedColumns {
    using Four = Pack<float, 4>;
    Four sums[Count] = {};
    RowPair softmax;

    __device__ void add(const MergedColumns& part) {
        const JoiningRows rows(softmax, part.softmax);
#pragma unroll
        for (int i = 0; i < Count; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][e] = rows.join(sums[i][e], part.sums[i][e], e / 2);
    }
};

struct MergeSmem {
    MergedColumns<1> of_groups[kMergeGroups][kWarpgroup];
};

static_assert(!kMergesLater || !kRangeMask, "there the order of tiles depends on the launch");

// Merges the parts of tiles of queries, of which `result_of(part)` is the number of a part's
// results. Columns are counted in times eight. `output_scale(work)` is the factor of a head's sums
// of weighted values.
template <int Dims, class Element, class OutputScale>
class PartMerger {
  public:
    static constexpr int kColumns = Dims / 8, kAllColumns = kColumnWarpgroups * kColumns;

    __device__ PartMerger(const Params& params, const OutputScale& output_scale)
        : params(params),
          output_scale(output_scale),
          smem(shared_memory<MergeSmem, MERGE_SMEM_BYTES>()),
          thread(threadIdx.x % kWarpgroup),
          group(threadIdx.x / kWarpgroup) {}

    // Eight columns, by all groups of the block.
    template <class ResultOf>
    __device__ void merge(const WorkTile& work, int parts, const ResultOf& result_of,
                          int columns) const {
        auto merged = merged_columns<1, kMergeGroups>(parts, result_of, columns, group);
        smem.of_groups[group][thread] = merged;
        __syncthreads();
        if (group != 0) return;
        for (int other = 1; other < kMergeGroups; ++other)
            merged.add(smem.of_groups[other][thread]);
        store(merged, work, columns);
    }

    // `Count` times eight columns, by one group.
    template <int Count, class ResultOf>
    __device__ void merge_alone(const WorkTile& work, int parts, const ResultOf& result_of,
                                int columns) const {
        store(merged_columns<Count, 1>(parts, result_of, columns, 0), work, columns);
    }

  private:
    static constexpr int kLoadsAtOnce = 8;  // of four sums

    // The Step-th parts, from `first` on.
    template <int Count, int Step, class ResultOf>
    __device__ MergedColumns<Count> merged_columns(int parts, const ResultOf& result_of,
                                                   int columns, int first) const {
        constexpr int kPartsAtOnce = kLoadsAtOnce / Count;
        MergedColumns<Count> merged;
        for (; first < parts; first += kPartsAtOnce * Step) {
            MergedColumns<Count> some[kPartsAtOnce];
#pragma unroll
            for (int i = 0; i < kPartsAtOnce; ++i)  // all are loaded at once
                if (first + i * Step < parts) load(some[i], result_of(first + i * Step), columns);
#pragma unroll
            for (int i = 0; i < kPartsAtOnce; ++i)
                if (first + i * Step < parts) merged.add(some[i]);
        }
        return merged;
    }

    template <int Count>
    __device__ void load(MergedColumns<Count>& to, int result, int columns) const {
        const PartToMerge<Dims>& part = parts_to_merge<Dims>(params.call)[result];
        const auto& sums = part.of_warpgroups[columns / kColumns].sums;
#pragma unroll
        for (int i = 0; i < Count; ++i) to.sums[i] = sums[columns % kColumns + i][thread];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            to.softmax.rows[half] = part.rows[row_of_thread() + 8 * half];
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
    MergeSmem& smem;
    const int thread, group;
};

// Where all tiles have equally many parts, there is a block for each tile and eight columns.
template <class Merger>
__device__ inline void merge_tile(const ForwardParams& call, const Merger& merger) {
    const int tile = blockIdx.x / Merger::kAllColumns, columns = blockIdx.x % Merger::kAllColumns;
    WorkTile work = Order(call).at(call.parting.whole + tile * call.parting.parts);
    has_part(call, work);  // limits the number of parts
    const bool stored = work.parts == 1, empty = work.first_row >= work.sequence(call).seqlen_q;
    if (stored || (kPacked && empty)) return;
    const auto result_of = [&](int part) { return work.first_part + part; };
    merger.merge(work, work.parts, result_of, columns);
}

// Where blocks have shares of keys, there are some small blocks for each of those blocks. A tile is
// merged by those of all that have parts of it but the last. If it has few parts, they are few, and
// each merges `kMany` times eight columns.
template <class Merger>
__device__ inline void merge_share(const ForwardParams& call, const Merger& merger) {
    constexpr int kMany = 4;
    static_assert(Merger::kColumns % kMany == 0, "these are of one warpgroup");
    const int of_block = gridDim.x / call.parting.count, block = blockIdx.x / of_block;
    const TileToMerge& tile = tiles_to_merge(call)[block];
    if (tile.parts == 0) return;
    const int mergers = (tile.parts - 1) * of_block;
    const int number = tile.part * of_block + blockIdx.x % of_block;
    const int first = block - tile.part;  // blocks with consecutive shares are adjacent
    const auto result_of = [&](int part) { return result_of_block(first + part, part == 0); };
    if (mergers >= Merger::kAllColumns) {
        if (number < Merger::kAllColumns)
            merger.template merge_alone<1>(tile.work, tile.parts, result_of, number);
    } else {
        for (int i = number; i < Merger::kAllColumns / kMany; i += mergers)
            merger.template merge_alone<kMany>(tile.work, tile.parts, result_of, i * kMany);
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
