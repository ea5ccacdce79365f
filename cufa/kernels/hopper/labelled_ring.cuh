// How a producer tells the other warps which tiles it sends, where a mask or a mask_mod hides some.
// Only the producer looks for tiles that are shown.
#pragma once

#include "call/config.cuh"
#include "hopper/pipeline.cuh"

// The label of a tile of keys or queries: whether a mask may cut through it, and whether it is the
// last of its group.
struct TileLabel {
    int head, tile;
    bool cut, last;
};

template <int Stages, bool Any>
struct TileLabels {
    __device__ void label(RingPosition<Stages>, const TileLabel&) {}
    __device__ TileLabel label_at(RingPosition<Stages>) const { return {}; }
};
template <int Stages>
struct TileLabels<Stages, true> {
    TileLabel labels[Stages];

    __device__ void label(RingPosition<Stages> at, const TileLabel& tile) {
        labels[at.stage] = tile;
    }
    // Shuffles tell the compiler that all lanes of a warp have the same values.
    __device__ TileLabel label_at(RingPosition<Stages> at) const {
        const TileLabel own = labels[at.stage];
        __syncwarp();  // all lanes have read it: a shuffle does not ensure that
        return {__shfl_sync(0xffffffffu, own.head, 0), __shfl_sync(0xffffffffu, own.tile, 0),
                __any_sync(0xffffffffu, own.cut) != 0, __any_sync(0xffffffffu, own.last) != 0};
    }
};

// A ring of such tiles; without a mask or a mask_mod there are no labels.
template <int Stages>
struct LabelledRing : Ring<Stages>, TileLabels<Stages, kKeyMask> {};

// The walk over the tiles of a group, of those who receive them.
template <int Stages>
struct LabelledTiles {
    LabelledRing<Stages>& ring;
    const RingPosition<Stages>& at;  // of the tile
    int head, tile;
    bool cut, last, ended;

    // `none` says that the group has no tiles.
    __device__ LabelledTiles(LabelledRing<Stages>& ring, const RingPosition<Stages>& at, bool none)
        : ring(ring), at(at), ended(none) {
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
