// The keys of each tile of rows, split among equally many blocks: which part a block has, and how
// their results are merged.
#pragma once

#include "call/key_tiles.cuh"
#include "mma/fwd_8_merge.cuh"

// The number of a tile's parts. Both launches have the same grid.
__device__ inline int key_parts_of(const Sizes& sizes) {
    const int tiles = row_tiles<kBlockM>(sizes.batch, sizes.seqlen_q * group_of(sizes));
    return gridDim.x / (tiles * sizes.kv_heads);
}

// What the blocks have of a row is adjacent; rows are ordered as in the LSE.
__device__ inline PartialRow* partial_rows_of(const ForwardParams& params, long long row,
                                              int key_parts) {
    return static_cast<PartialRow*>(params.workspace) + row * key_parts;
}

// Calls attend_to_part(work, range_of, finish) for the block's part.
template <class Attend>
__device__ inline void attend_key_part(const ForwardParams& params, const Attend& attend_to_part) {
    const Sizes& sizes = params.sizes;
    const int group = group_of(sizes), key_parts = key_parts_of(sizes);
    const int of_head = blockIdx.x / sizes.kv_heads, part = of_head % key_parts;
    const auto [batch, first_row] =
        row_tile<kBlockM>(of_head / key_parts, sizes.batch, sizes.seqlen_q * group,
                          params.features.cu_seqlens_q, group);
    const Work work{Sequence(params, batch), static_cast<int>(blockIdx.x % sizes.kv_heads), group,
                    first_row};
    // The sequence may not have this tile.
    if (kPacked && (work.rows() <= 0 || !work.sequence.is_ours())) return;

    // Whole tiles, divided as evenly as possible.
    const auto range_of = [&](const Work& work, const KeyTiles<kBlockN>& keys) -> TileRange {
        const long long tiles = ceil_div(max(keys.end - keys.begin, 0), kBlockN);
        const int first = keys.begin / kBlockN;
        return {first + static_cast<int>(tiles * part / key_parts),
                first + static_cast<int>(tiles * (part + 1) / key_parts)};
    };
    attend_to_part(work, range_of, [&](int row, MergedRow merged) {
        const int query = work.query(row), head = work.head(row);
        if constexpr (kSplitKeys) {
            const long long index = work.sequence.first_row(head, sizes) + query;
            merged.store(partial_rows_of(params, index, key_parts)[part]);
        } else {
            write_row(merged, params, work.sequence, head, query);
        }
    });
}

// Merges all rows. Packed arrays may have rows before the first sequence and after the last.
__device__ inline void merge_key_parts(const ForwardParams& params) {
    const Sizes& sizes = params.sizes;
    const int key_parts = key_parts_of(sizes);
    const auto parts_of_row = [&](int row, int first, int step) {
        const PartialRow* const parts = partial_rows_of(params, row, key_parts) + first;
        return [=](long long i) -> const PartialRow& { return parts[i * step]; };
    };
    if constexpr (kNextOverlaps) ptx::wait_for_launch_before();
    // Nobody has memory for the parts of 2^31 rows.
    merge_rows(blockIdx.x, gridDim.x, rows_of_heads<int>(sizes), key_parts, parts_of_row,
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
