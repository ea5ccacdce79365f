// How a producer tells the others which tiles it sends, where a mask or a mask_mod hides some of
// them: only the producer looks for those that are shown.
#pragma once

#include "call/config.cuh"
#include "hopper/pipeline.cuh"

// What it says of a tile, of keys or of queries: whether a mask may cut through it, and whether it
// is the last of those that belong together.
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
    // By shuffles, after which the compiler knows that all lanes of a warp have the same.
    __device__ TileLabel label_at(RingPosition<Stages> at) const {
        const TileLabel own = labels[at.stage];
        __syncwarp();  // all have read it, which a shuffle does not say
        return {__shfl_sync(0xffffffffu, own.head, 0), __shfl_sync(0xffffffffu, own.tile, 0),
                __any_sync(0xffffffffu, own.cut) != 0, __any_sync(0xffffffffu, own.last) != 0};
    }
};

// A ring of such tiles; without either none has a label.
template <int Stages>
struct LabelledRing : Ring<Stages>, TileLabels<Stages, kKeyMask> {};
