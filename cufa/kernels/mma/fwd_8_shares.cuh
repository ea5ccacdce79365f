// The keys of all tiles of rows, divided evenly among blocks: which parts a block has, and how the
// results of several blocks for a tile are merged.
#pragma once

#include "call/key_shares.cuh"
#include "mma/fwd_8_merge.cuh"

using Shares = KeyShares<RoundLine<RowsInLine<kBlockM>, kBlockN, kTeams>>;

__device__ inline Work work_at(const ForwardParams& params, const RoundPlace& place) {
    const int row_tiles = place.sequence.tiles / params.sizes.kv_heads;
    return {Sequence(params, place.batch), place.tile / row_tiles, group_of(params.sizes),
            place.tile % row_tiles * kBlockM};
}

// A block's results for tiles of which it has only a part: the tile that it ends or continues, and
// the tile that it begins.
struct ShareParts {
    PartialRow ends[kBlockM], begins[kBlockM];
};
__device__ inline ShareParts& parts_of_block(const ForwardParams& params, int block) {
    return static_cast<ShareParts*>(params.workspace)[block];
}

// Calls attend_to_part(work, range_of, finish) for each part of the block's share.
template <class Attend>
__device__ inline void attend_share(const ForwardParams& params, const Attend& attend_to_part) {
    const Shares shares(params, gridDim.x);
    const KeyShare share = shares.equal.share(blockIdx.x);
    if (share.begin == share.end) return;
    ShareParts& parts = parts_of_block(params, blockIdx.x);
    RoundPlace place = shares.at(share.begin);
    for (int left = share.end - share.begin;; place = shares.next_tile(place)) {
        const Work work = work_at(params, place);
        const int count = min(place.sequence.rounds_of_tile - place.round, left);
        // Rows of a tile may see fewer keys than all rows of the sequence together.
        const auto range_of = [&](const Work& work, const KeyTiles<kBlockN>& keys) -> TileRange {
            const Mask mask = work.sequence.mask(params.features);
            const KeyTiles<kBlockN> all(mask, 0, work.sequence.seqlen_q);
            const int first = all.begin / kBlockN + place.round * kTeams;
            return {max(first, keys.begin / kBlockN),
                    min(first + count * kTeams, ceil_div(keys.end, kBlockN))};
        };
        attend_to_part(work, range_of, [&](int row, MergedRow merged) {
            if (count == place.sequence.rounds_of_tile) {
                write_row(merged, params, work.sequence, work.head(row), work.query(row));
            } else {
                merged.store((place.round == 0 ? parts.begins : parts.ends)[row]);
            }
        });
        left -= count;
        if (left == 0) return;
        __syncthreads();  // the next part's tiles may overwrite the results
    }
}

// Merges the tile that a block began and did not end.
__device__ inline void merge_share(const ForwardParams& params) {
    const int blocks = gridDim.x / kMergeBlocks, block = blockIdx.x % blocks;
    const Shares shares(params, blocks);
    const KeyShare share = shares.equal.share(block);
    if (share.begin == share.end) return;
    const RoundPlace last = shares.at(share.end - 1);
    const int first_round = share.end - 1 - last.round;
    const int end_round = first_round + last.sequence.rounds_of_tile;
    if (first_round < share.begin || end_round == share.end) return;

    const Work work = work_at(params, last);
    const auto parts_of_row = [&](int row, int first, int step) {
        return [=, blocks = &parts_of_block(params, block)](int i) -> const PartialRow& {
            const int part = first + i * step;
            return part == 0 ? blocks->begins[row] : blocks[part].ends[row];
        };
    };
    if constexpr (kNextOverlaps) ptx::wait_for_launch_before();
    merge_rows(blockIdx.x / blocks, kMergeBlocks, work.rows(),
               shares.equal.share_of(end_round - 1) - block + 1, parts_of_row,
               [&](int row, MergedRow merged) {
                   write_row(merged, params, work.sequence, work.head(row), work.query(row));
               });
}
