// The tiles of halves that fwd_9_float32 works on.
//
// Each row is in units of its own: of queries and keys they become a factor of the score, of values
// one of the weight. A launch of its own makes the tiles. In the workspace they lie as they will in
// shared memory, so that one copy brings each.
#pragma once

#include "hopper/float32/halves.cuh"
#include "hopper/float32/halves_workspace.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kConsumers = kBlockM / kWgmmaM;

// Rows of the small parts come after all of the large ones.
using QueryRows = PanelTile<kParts * kWgmmaM, kDepth>;
using KeyRows = PanelTile<kParts * kBlockN, kDepth>;
using ValueRows = PanelTile<kParts * kBlockN, kDims>;

struct QueryHalves {
    QueryRows rows[kConsumers];
    float unit[kBlockM];

    static constexpr int kBytes = kConsumers * QueryRows::kBytes + sizeof(unit);
};

// Keys, and what their values are in units of: the exponent, and 2 to minus that, negative where
// halves cannot hold the values. These are zeros then, and added to the output as they are.
struct KeyHalves {
    KeyRows rows;
    float unit[kBlockN], value_exponent[kBlockN], value_reciprocal[kBlockN];

    static constexpr int kBytes = KeyRows::kBytes + 3 * sizeof(unit);
    __device__ bool has_value(int key) const { return value_reciprocal[key] > 0; }
};

struct TileHalves {
    KeyHalves k;
    ValueRows v;
};

// Smaller rows are taken for such ones.
constexpr int kLeastKeyExponent = -100, kLeastValueExponent = -60;
// Larger values would leave the weights of others beside theirs no place in a float.
constexpr float kLargestValue = 0x1p40f;

using Workspace = HalvesWorkspace<QueryHalves, kBlockM, TileHalves, kBlockN, ForwardParams>;
