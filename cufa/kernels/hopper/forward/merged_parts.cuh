// Parts of tiles of queries that a launch of its own merges, where there are many of a tile: one
// block has no way to the L2 cache that is wide enough for all of them.
#pragma once

#include "hopper/forward/key_parts.cuh"
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

// All of them, in the workspace.
template <int Dims>
__device__ inline PartToMerge<Dims>* parts_to_merge(const ForwardParams& call) {
    return static_cast<PartToMerge<Dims>*>(call.workspace);
}

// Groups of a block's threads, each of which has the threads of a warpgroup and some of the parts.
constexpr int kMergeGroups = MERGE_GROUPS, kMergeThreads = kMergeGroups * kWarpgroup;

// A thread's sums of eight columns of O, and its two rows.
struct MergedColumns {
    using Four = Pack<float, 4>;
    Four sums = {};
    RowPair softmax;

    __device__ void add(const MergedColumns& part) {
        const JoiningRows rows(softmax, part.softmax);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[e] = rows.join(sums[e], part.sums[e], e / 2);
    }
};

struct MergeSmem {
    MergedColumns of_groups[kMergeGroups][kWarpgroup];
};

static_assert(!kMergesLater || !kRangeMask, "there the order of tiles depends on the launch");

// One of the blocks, for a tile of queries and eight columns of O. `output_scale(work)` is the
// factor of a head's sums of weighted values.
template <int Dims, class Element, class OutputScale>
class PartMerger {
  public:
    __device__ PartMerger(const Params& params, const OutputScale& output_scale)
        : params(params),
          output_scale(output_scale),
          smem(shared_memory<MergeSmem, MERGE_SMEM_BYTES>()),
          thread(threadIdx.x % kWarpgroup),
          group(threadIdx.x / kWarpgroup),
          columns(blockIdx.x % kColumns),
          warpgroup(blockIdx.x / kColumns % kColumnWarpgroups) {}

    __device__ void merge() {
        const ForwardParams& call = params.call;
        const int tile = blockIdx.x / (kColumns * kColumnWarpgroups);
        WorkTile work = Order(call).at(call.parting.whole + tile * call.parting.parts);
        has_part(call, work);  // limits the number of parts
        const bool stored = work.parts == 1, empty = work.first_row >= work.sequence(call).seqlen_q;
        if (stored || (kPacked && empty)) return;

        smem.of_groups[group][thread] = merged_by_group(work);
        __syncthreads();
        if (group != 0) return;
        MergedColumns merged;
        for (int other = 0; other < kMergeGroups; ++other)
            merged.add(smem.of_groups[other][thread]);
        store(merged, work);
    }

  private:
    static constexpr int kColumns = Dims / 8, kPartsAtOnce = 4;

    // Every kMergeGroups-th part.
    __device__ MergedColumns merged_by_group(const WorkTile& work) const {
        const PartToMerge<Dims>* const parts = parts_to_merge<Dims>(params.call) + work.first_part;
        MergedColumns merged;
        for (int first = group; first < work.parts; first += kPartsAtOnce * kMergeGroups) {
            MergedColumns some[kPartsAtOnce];
#pragma unroll
            for (int i = 0; i < kPartsAtOnce; ++i)  // all at once, the last one again past the end
                load(some[i], parts[min(first + i * kMergeGroups, work.parts - 1)]);
#pragma unroll
            for (int i = 0; i < kPartsAtOnce; ++i)
                if (first + i * kMergeGroups < work.parts) merged.add(some[i]);
        }
        return merged;
    }

    __device__ void load(MergedColumns& to, const PartToMerge<Dims>& part) const {
        to.sums = part.of_warpgroups[warpgroup].sums[columns][thread];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            to.softmax.rows[half] = part.rows[row_of_thread() + 8 * half];
    }

    __device__ void store(const MergedColumns& merged, const WorkTile& work) const {
        RowPair softmax = merged.softmax;
        const float of_head = output_scale(work);
        const Sequence sequence = work.sequence(params.call);
        const auto rows = sequence.queries<Element>(params.call.o, work.head);
        const int first_col = warpgroup * kOwnCols + columns * 8 + col_of_thread();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float scale = end_row(softmax.rows[half], of_head, params, work);
            const int row = row_of(work, half);
            if (row >= sequence.seqlen_q) continue;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (first_col + e < kValueDim)
                    rows.row(row)[first_col + e] =
                        from_acc<Element>(merged.sums[2 * half + e] * scale);
            }
        }
        if (columns == 0) store_lse(softmax, params, work, warpgroup);
    }

    const Params& params;
    const OutputScale& output_scale;
    MergeSmem& smem;
    const int thread, group, columns, warpgroup;
};

template <int Dims, class Element, class OutputScale>
__device__ inline void merge_parts_of_tiles(const Params& params, const OutputScale& output_scale) {
    ptx::wait_for_launch_before();
    if constexpr (kMergesLater)
        PartMerger<Dims, Element, OutputScale>(params, output_scale).merge();
}
