// A block's share of the keys of all tiles of queries (call/key_shares.cuh).
//
// Tiles that see the same keys, those of all rows of a group's heads, are not one after the other
// in the line but side by side: blocks with the same share of it, one for each of these tiles, read
// the same keys at the same time, all but one of them from the L2 cache.
#pragma once

#include "call/key_shares.cuh"
#include "call/schedule.cuh"

// The tile in which a block's share ends, if it goes on in the next share: the number of shares
// with parts of it, and of this one among them. Else 0 parts.
struct alignas(16) TileToMerge {
    WorkTile work;
    int parts, part;
};

// The one of each block, in the workspace.
__device__ inline TileToMerge* tiles_to_merge(const ForwardParams& call) {
    return static_cast<TileToMerge*>(call.workspace);
}

// A block may leave two results: of the tile that it ends or continues, and of the one that it
// begins. Their numbers:
__device__ constexpr int result_of_block(int block, bool begins) {
    return 2 * block + begins;
}

// As many keys as a block could process in the time that a tile of queries takes beside its keys.
constexpr int kTileInKeys = 192;

// Whole warps call these functions. A template over `Work`, because tiles may have no shares.
template <int BlockM, int BlockN, class Work = WorkTile>
class ShareWalk {
    using Line = RoundLine<KeyHeadsInLine, BlockN, 1, kTileInKeys / BlockN>;

  public:
    __device__ explicit ShareWalk(const ForwardParams& call)
        : ShareWalk(call, KeyShares<Line>(call, shares(call.sizes))) {}

    // The tiles of the share come one after the other, whatever the index.
    __device__ Work at(unsigned int) {
        if (left.begin == left.end) {
            leave_to_merge();
            return Work::none();
        }
        const int round = place.round, rounds = place.sequence.rounds_of_tile;
        const int count = min(rounds - round, left.end - left.begin);
        Work work = tile();
        work.first_tile = round;
        work.end_tile = round + count;
        if (count < rounds) work.number = result_of_block(blockIdx.x, round == 0);
        skip(count + Line::kWithoutKeys);
        if (left.begin < left.end) {
            place = Line{call}.next_tile(place);
        } else {
            place.round = round + count;
        }
        return work;
    }

  private:
    __device__ ShareWalk(const ForwardParams& call, const KeyShares<Line>& line)
        : call(call), equal(line.equal), left(equal.share(blockIdx.x % shares(call.sizes))) {
        if (left.begin == left.end) return;
        const RoundPlace first = line.at(left.begin);
        const int without_keys = max(-first.round, 0);
        skip(without_keys);
        if (left.begin == left.end) return;
        place = first;
        place.round += without_keys;
    }

    __device__ static int row_tiles(const Sizes& sizes) { return ceil_div(sizes.seqlen_q, BlockM); }
    __device__ static int shares(const Sizes& sizes) {
        return gridDim.x / (group_of(sizes) * row_tiles(sizes));
    }

    // The block's tile of those that begin side by side.
    __device__ Work tile() const {
        const int number = blockIdx.x / shares(call.sizes), head = number / row_tiles(call.sizes);
        const int kv_head = place.tile;
        return {Sequence(call, place.batch), kv_head * group_of(call.sizes) + head, kv_head,
                number % row_tiles(call.sizes) * BlockM};
    }

    // At the end, so that the first tile need not wait for it.
    __device__ void leave_to_merge() const {
        TileToMerge last{Work::none(), 0, 0};
        if (place.batch >= 0 && place.round < place.sequence.rounds_of_tile) {
            const int begin = left.end - place.round, end = begin + place.sequence.rounds_of_tile;
            const int first = equal.share_of(begin);
            last = {tile(), equal.share_of(end - 1) - first + 1,
                    static_cast<int>(blockIdx.x) % shares(call.sizes) - first};
        }
        if (threadIdx.x % 32 == 0) tiles_to_merge(call)[blockIdx.x] = last;
    }

    __device__ void skip(int rounds) { left.begin += min(rounds, left.end - left.begin); }

    const ForwardParams& call;
    const EqualShares equal;
    KeyShare left;
    // Of the next work, at last where the share ends; batch -1 without any keys.
    RoundPlace place{-1};
};
