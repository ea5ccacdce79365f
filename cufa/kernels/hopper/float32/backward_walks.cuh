// The order in which a block of the float32 backward on Hopper walks over tiles of queries.
#pragma once

#include "hopper/float32/backward_tiles.cuh"
#include "hopper/labelled_ring.cuh"

// A walk over every step-th tile of queries that sees a tile of keys, over all heads that share the
// keys. The last queries of all heads come first: blocks that begin together then work on the same
// queries, which are in the L2 cache.
struct RangeWalk {
    const Tiles tiles;
    const int heads, first_head, count, step;
    int number;

    __device__ RangeWalk(const BackwardParams& call, const KeyTile& work, int first, int step)
        : tiles(query_tiles_of(call, work)),
          heads(group_of(call.sizes)),
          first_head(work.kv_head * heads),
          count(heads * ceil_div(max(tiles.end - tiles.begin, 0), kBlockM)),
          step(step),
          number(first) {}

    __device__ bool at_end() const { return number >= count; }
    __device__ void advance() { number += step; }
    __device__ int head() const { return first_head + number % heads; }
    __device__ int first_row() const {
        return tiles.begin + (count - 1 - number) / heads * kBlockM;
    }
    // For callers that know the first row, which takes long to compute.
    __device__ bool masked(int first_row) const { return tiles.masked(first_row); }
    __device__ HeadTileLabel label() const { return {}; }  // none is needed
};

// The same where a mask or a mask_mod hides some tiles, head by head, for the producers.
struct SeenWalk {
    const BackwardParams& call;
    const KeyTile& work;
    const Tiles tiles;
    const int step, heads_end;
    int at_head, at_row;

    __device__ SeenWalk(const BackwardParams& call, const KeyTile& work, int first, int step)
        : call(call),
          work(work),
          tiles(query_tiles_of(call, work)),
          step(step),
          heads_end((work.kv_head + 1) * group_of(call.sizes)),
          at_head(heads_end - group_of(call.sizes)),
          at_row(tiles.end) {
        find(first + 1);
    }

    __device__ bool at_end() const { return at_head == heads_end; }
    __device__ void advance() { find(step); }
    __device__ int head() const { return at_head; }
    __device__ int first_row() const { return at_row; }
    __device__ HeadTileLabel label() const {
        const bool cut = seen().cuts(at_row, work.first_key);
        return {at_head, at_row / kBlockM, tiles.masked(at_row, cut), false};
    }

  private:
    __device__ Seen seen() const { return {seen_parts(call), call, work.sequence, at_head}; }
    // Advances by `count` tiles that are shown.
    __device__ void find(int count) {
        for (; count > 0 && !at_end(); --count) find_next();
    }
    __device__ void find_next() {
        for (; !at_end(); ++at_head, at_row = tiles.end) {
            const int last_row = (ceil_div(at_row, kBlockM) - 1) * kBlockM;
            at_row = seen().last_row(last_row, tiles.begin, work.first_key);
            if (at_row >= tiles.begin) return;
        }
    }
};
// The label after the last tile.
__device__ inline HeadTileLabel no_tile() {
    return {0, -1, false, true};
}

// The same for those who receive the tiles.
struct LabelledWalk {
    LabelledRing<kStages, HeadTileLabel>& ring;
    const RingPosition<kStages>& at;  // of the tile
    HeadTileLabel tile;

    __device__ LabelledWalk(LabelledRing<kStages, HeadTileLabel>& ring,
                            const RingPosition<kStages>& at)
        : ring(ring), at(at) {
        advance();
    }
    __device__ bool at_end() const { return tile.last(); }
    __device__ int head() const { return tile.head; }
    __device__ int first_row() const { return tile.tile() * kBlockM; }
    __device__ bool masked(int) const { return tile.cut(); }
    // Call it once `at` is the position of the next tile.
    __device__ void advance() {
        ring.wait_full(at);
        tile = ring.label_at(at);
    }
};
