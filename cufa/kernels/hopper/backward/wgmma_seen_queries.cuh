// The tiles of queries that a block of the Hopper backward processes if a mask or a mask_mod hides
// some. Only the producer looks for tiles that are shown; the others read the labels of those that
// it sends.
#pragma once

#include "hopper/backward/wgmma_key_work.cuh"
#include "hopper/labelled_ring.cuh"
#include "scores/seen_tiles.cuh"

// The producer's walk over the tiles of queries that see some of the keys, head by head. If there
// are none, it has one tile that sees nothing.
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
    // Reads all that the next label needs now: once the stage is empty it would be late.
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

// The walk of those who receive the tiles.
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
    // Call it once `at` is the position of the next tile.
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
