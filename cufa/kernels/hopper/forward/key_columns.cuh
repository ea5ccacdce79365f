// The parts in which a tile of keys is handed over where rows of V are the beginnings of those of
// K.
//
// Consumers are done with some columns before others: with those that are not of V once they have
// scores; with those of V, of which each warpgroup has half, once that warpgroup has added to its
// half of the output. Each part has a ring of its own. So some of the next keys are on their way
// while other columns are still in use, and products with them begin before the last have come (as
// in FlashMLA, Li and Liu 2025).
#pragma once

#include "hopper/forward/wgmma_forward_block.cuh"

// Parts by number: for each warpgroup its columns of V, then the columns that are not of V.
constexpr bool kInParts = kValuesInKeys && !kWidensKeys && kHeadDim >= kValueCols;
constexpr int kKeysAlone = kInParts ? kDepth - kValueCols : 0;
constexpr int kColumnParts = kInParts ? kColumnWarpgroups + (kKeysAlone > 0) : 1;
static_assert(!kInParts || kColumnWarpgroups == 2, "a tile has two parts of V");

// The first of a part's Cols columns, in a tile of Q or of K.
__device__ constexpr int first_col_of_part(int part) {
    return part * kOwnCols;
}
template <int Cols, class Tile>
__device__ inline auto& columns_of_part(Tile& tile, int part) {
    return tile.template panels_from<Cols>(part * kOwnPanels);
}

template <int Parts>
struct PartedRing {
    TileRing parts[Parts];

    __device__ void init(int value_readers, int score_readers) {
        for (int part = 0; part < Parts; ++part)
            parts[part].init(part < kColumnWarpgroups ? value_readers : score_readers);
    }

    // For those that read all columns of V.
    __device__ void wait_full(RingPosition<kStages> at) {
        for (int part = 0; part < kColumnWarpgroups; ++part) parts[part].wait_full(at);
    }
    __device__ void release(RingPosition<kStages> at) {
        for (int part = 0; part < kColumnWarpgroups; ++part) parts[part].release(at);
    }
};

template <int Parts>
struct KeyRingOf {
    using type = PartedRing<Parts>;
};
template <>
struct KeyRingOf<1> {
    using type = TileRing;
};
using KeyRing = KeyRingOf<kColumnParts>::type;

// The ring of the columns of V that a warpgroup multiplies.
template <class Smem>
__device__ inline auto& own_ring(Smem& smem, int warpgroup) {
    if constexpr (kInParts) {
        return smem.k_ring.parts[warpgroup];
    } else {
        return value_ring(smem);
    }
}
