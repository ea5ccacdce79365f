// Which tiles of queries a block of the Hopper backward works on if a mask or a mask_mod hides
// some: the producer looks for those that are shown, the others go by what it says of those that it
// sends.
#pragma once

#include "hopper/backward/wgmma_key_work.cuh"
#include "hopper/labelled_ring.cuh"
#include "scores/seen_tiles.cuh"

// Where in those tiles of queries of which some see some of the keys the producer is, head by head.
// If there are none it is one that sees nothing.
template <class Seen, class Tiles, int BlockM>
struct SeenQueryWalk {
    const BackwardParams& call;
    SeenPart* parts;
    const KeyWork& work;
    const Tiles& tiles;
    int heads_end, head, tile, next_head, next_tile;
    bool cut;

    __device__ SeenQueryWalk(const BackwardParams& call, SeenPart* parts, const KeyWork& work,
                             const Tiles& tiles)
        : call(call), parts(parts), work(work), tiles(tiles) {
        const HeadRange heads = work.heads(call.sizes);
        heads_end = heads.end;
        next_head = heads.begin;
        next_tile = tiles.end;
        find_next();
        if (next_head == heads_end) {
            next_head = heads_end - 1;
            next_tile = tiles.end - 1;
        }
        advance();
    }

    __device__ bool at_end() const { return head == heads_end; }
    // Reads all that the next one's label says: once its place is free that would be late.
    __device__ void advance() {
        head = next_head;
        tile = next_tile;
        if (at_end()) return;
        cut = tiles.masked(tile) || seen_of(head).cuts(tile * BlockM, work.first_key);
        find_next();
    }
    __device__ TileLabel label() const { return {head, tile, cut, next_head == heads_end}; }

  private:
    __device__ Seen seen_of(int head) const { return {parts, call, work.sequence(call), head}; }
    __device__ void find_next() {
        for (; next_head < heads_end; ++next_head, next_tile = tiles.end) {
            const int last_row = (next_tile - 1) * BlockM, begin = tiles.begin * BlockM;
            next_tile = seen_of(next_head).last_row(last_row, begin, work.first_key) / BlockM;
            if (next_tile >= tiles.begin) return;
        }
    }
};

// Where in them one is that receives them.
template <class Tiles, int Stages>
struct LabelledQueryWalk {
    LabelledRing<Stages>& ring;
    const RingPosition<Stages>& at;  // of the tile
    const Tiles& tiles;
    int head, tile;
    bool cut, last, ended;

    __device__ LabelledQueryWalk(LabelledRing<Stages>& ring, const RingPosition<Stages>& at,
                                 const Tiles& tiles)
        : ring(ring), at(at), tiles(tiles), ended(tiles.begin >= tiles.end) {
        if (!ended) receive();
    }

    __device__ bool at_end() const { return ended; }
    __device__ bool masked() const { return cut; }
    // Once `at` is that of the next.
    __device__ void advance() {
        ended = last;
        if (!ended) receive();
    }

  private:
    __device__ void receive() {
        ring.wait_full(at);
        const TileLabel label = ring.label_at(at);
        head = label.head;
        tile = label.tile;
        cut = label.cut;
        last = label.last;
    }
};
