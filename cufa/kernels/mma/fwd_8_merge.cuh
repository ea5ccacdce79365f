// How the second launch of fwd_8_split_kv merges the partial rows of blocks, and how rows end.
#pragma once

#include "mma/fwd_8_rows.cuh"

constexpr int kMergeThreads = MERGE_THREADS;
constexpr int kMergeBlocks = MERGE_BLOCKS;                        // for each share
constexpr int kMergeBlocksOfSm = MergedRow::kChunks > 2 ? 2 : 3;  // more would spill

struct MergeSmem {
    PartialRow parts[kMergeThreads / 32];
};

// Ends a merged row and writes it, by one warp.
__device__ inline void write_row(MergedRow& row, const ForwardParams& params,
                                 const Sequence& sequence, int head, int query) {
    const acc_t factor = end_row<1>(row.softmax, ScoreRules(params, sequence, head));
    row.write(sequence.queries<out_t>(params.o, head).row(query), factor);
    acc_t* lse = static_cast<acc_t*>(params.lse);
    if (lse && threadIdx.x % 32 == 0) {
        lse[sequence.first_row(head, params.sizes) + query] = row.softmax.lse();
    }
}

// Merges `count` parts of each of some rows. As many warps share a row as are needed to read all of
// its parts at once; one of them merges their results. `parts_of_row(row, first, step)` gives every
// step-th part from `first` on, and `write(row, merged)` ends a row.
template <class Parts, class Write>
__device__ inline void merge_rows(int first, int step, int rows, int count,
                                  const Parts& parts_of_row, const Write& write) {
    constexpr int kMergeWarps = kMergeThreads / 32;
    auto& parts = shared_memory<MergeSmem, MERGE_SMEM_BYTES>().parts;
    int sharing = 1;
    while (sharing < kMergeWarps && sharing * MergedRow::kPartsAtOnce < count) sharing *= 2;
    const int warp = threadIdx.x / 32, share = warp % sharing;
    const long long at_once = kMergeWarps / sharing;
    for (long long next = first * at_once; next < rows; next += step * at_once) {
        const int row = static_cast<int>(next) + warp / sharing;
        if (row < rows) {
            const auto part = parts_of_row(row, share, sharing);
            MergedRow::of<MergedRow::kPartsAtOnce>(ceil_div(count - share, sharing), part)
                .store(parts[warp]);
        }
        __syncthreads();
        if (row < rows && share == 0) {
            write(row, MergedRow::of<kMergeWarps>(
                           sharing, [&](int i) -> const PartialRow& { return parts[warp + i]; }));
        }
        __syncthreads();  // the next rows' parts may overwrite these
    }
}
