// How a producer tells the other warps which tiles it sends, where a mask or a mask_mod hides some.
// Only the producer looks for tiles that are shown.
#pragma once

#include "call/config.cuh"
#include "hopper/pipeline.cuh"

// The label of a tile of keys or queries: its number, whether a mask may cut through it, and
// whether it is the last of its group. It is one word, since a producer is short of registers.
struct TileLabel {
    int word;

    TileLabel() = default;
    __device__ TileLabel(int tile, bool cut, bool last) : word(tile * 4 + cut * 2 + last) {}

    __device__ int tile() const { return word >> 2; }
    __device__ bool cut() const { return word & 2; }
    __device__ bool last() const { return word & 1; }

    // Shuffles tell the compiler that all lanes of a warp have the same value.
    __device__ void share() { word = __shfl_sync(0xffffffffu, word, 0); }
};

// The same if the tiles of a group are of several heads.
struct HeadTileLabel : TileLabel {
    int head;

    HeadTileLabel() = default;
    __device__ HeadTileLabel(int head, int tile, bool cut, bool last)
        : TileLabel(tile, cut, last), head(head) {}

    __device__ void share() {
        TileLabel::share();
        head = __shfl_sync(0xffffffffu, head, 0);
    }
};

template <int Stages, class Label, bool Any>
struct TileLabels {
    __device__ void label(RingPosition<Stages>, const Label&) {}
    __device__ Label label_at(RingPosition<Stages>) const { return {}; }
};
template <int Stages, class Label>
struct TileLabels<Stages, Label, true> {
    Label labels[Stages];

    __device__ void label(RingPosition<Stages> at, const Label& tile) { labels[at.stage] = tile; }
    __device__ Label label_at(RingPosition<Stages> at) const {
        Label label = labels[at.stage];
        __syncwarp();  // all lanes have read it: a shuffle does not ensure that
        label.share();
        return label;
    }
};

// A ring of such tiles; without a mask or a mask_mod there are no labels.
template <int Stages, class Label = TileLabel>
struct LabelledRing : Ring<Stages>, TileLabels<Stages, Label, kKeyMask> {};

// The walk over the tiles of a group, of those who receive them.
template <int Stages, class Label = TileLabel>
struct LabelledTiles {
    LabelledRing<Stages, Label>& ring;
    const RingPosition<Stages>& at;  // of the tile
    Label label;
    bool ended;

    // `none` says that the group has no tiles.
    __device__ LabelledTiles(LabelledRing<Stages, Label>& ring, const RingPosition<Stages>& at,
                             bool none)
        : ring(ring), at(at), ended(none) {
        if (!ended) receive();
    }

    __device__ bool at_end() const { return ended; }
    __device__ bool masked() const { return label.cut(); }
    // Call it once `at` is the position of the next tile.
    __device__ void advance() {
        ended = label.last();
        if (!ended) receive();
    }

  private:
    __device__ void receive() {
        ring.wait_full(at);
        label = ring.label_at(at);
    }
};
