// The keys of each tile of rows, split among equally many blocks: which part a block has, and how
// their results are merged.
#pragma once

#include "call/key_tiles.cuh"
#include "mma/fwd_8_merge.cuh"

// The number of these blocks. Both launches have the same grid.
__device__ inline int splits_of(const Sizes& sizes) {
    const int tiles = row_tiles<kBlockM>(sizes.batch, sizes.seqlen_q * group_of(sizes));
    return gridDim.x / (tiles * sizes.kv_heads);
}

// The blocks' parts of a row are adjacent; rows are ordered as in the LSE.
__device__ inline RowPart* parts_of(const ForwardParams& params, long long row, int splits) {
    return static_cast<RowPart*>(params.workspace) + row * splits;
}

// Calls attend_to_part(work, range_of, finish) for the block's part.
template <class Attend>
__device__ inline void attend_split(const ForwardParams& params, const Attend& attend_to_part) {
    const Sizes& sizes = params.sizes;
    const int group = group_of(sizes), splits = splits_of(sizes);
    const int head_splits = blockIdx.x / sizes.kv_heads, split = head_splits % splits;
    const auto [batch, first_row] =
        row_tile<kBlockM>(head_splits / splits, sizes.batch, sizes.seqlen_q * group,
                          params.features.cu_seqlens_q, group);
    const Work work{Sequence(params, batch), static_cast<int>(blockIdx.x % sizes.kv_heads), group,
                    first_row};
    // The sequence may not have this tile.
    if (kPacked && (work.rows() <= 0 || !work.sequence.is_ours())) return;

    // Whole tiles, divided as evenly as possible.
    const auto range_of = [&](const Work& work, const KeyTiles<kBlockN>& keys) -> TileRange {
        const long long tiles = ceil_div(max(keys.end - keys.begin, 0), kBlockN);
        const int first = keys.begin / kBlockN;
        return {first + static_cast<int>(tiles * split / splits),
                first + static_cast<int>(tiles * (split + 1) / splits)};
    };
    attend_to_part(work, range_of, [&](int row, MergedRow merged) {
        const int query = work.query(row), head = work.head(row);
        if constexpr (kSplitKeys) {
            const long long index = work.sequence.first_row(head, sizes) + query;
            merged.store(parts_of(params, index, splits)[split]);
        } else {
            write_row(merged, params, work.sequence, head, query);
        }
    });
}

// Merges all rows. Packed arrays may have rows before the first sequence and after the last.
__device__ inline void merge_splits_of_rows(const ForwardParams& params) {
    const Sizes& sizes = params.sizes;
    const int splits = splits_of(sizes);
    const auto parts_of_row = [&](int row, int first, int step) {
        const RowPart* const parts = parts_of(params, row, splits) + first;
        return [=](long long i) -> const RowPart& { return parts[i * step]; };
    };
    if constexpr (kNextOverlaps) ptx::wait_for_launch_before();
    // Nobody has memory for the parts of 2^31 rows.
    merge_rows(blockIdx.x, gridDim.x, rows_of_heads<int>(sizes), splits, parts_of_row,
               [&](int row, MergedRow merged) {
                   const int query = row % sizes.seqlen_q;
                   const int head = row / sizes.seqlen_q % sizes.heads;
                   if constexpr (kPacked) {
                       const int* const cu_seqlens = params.features.cu_seqlens_q;
                       if (query < cu_seqlens[0] || query >= cu_seqlens[sizes.batch]) return;
                   }
                   const int batch = row / sizes.seqlen_q / sizes.heads;
                   write_row(merged, params, Sequence(batch, 0, 0, sizes.seqlen_q, sizes.seqlen_k),
                             head, query);
               });
}
