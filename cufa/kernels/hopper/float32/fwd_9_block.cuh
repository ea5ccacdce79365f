// What fwd_9_float32 works on at once: tiles of halves, in the workspace and in shared memory.
//
// Each row is in units of its own: of queries and keys they become a factor of the score, of values
// one of the weight. A launch of its own makes the tiles. In the workspace they lie as they will in
// shared memory, so that one copy brings each.
#pragma once

#include "call/key_tiles.cuh"
#include "hopper/float32/halves.cuh"
#include "hopper/float32/halves_workspace.cuh"
#include "hopper/pipeline.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kStages = STAGES;
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
static_assert(sizeof(QueryHalves) == QUERY_TILE_BYTES, "the host plans another workspace");
static_assert(sizeof(TileHalves) == KEY_TILE_BYTES, "the host plans another workspace");
using Workspace = HalvesWorkspace<QueryHalves, kBlockM, TileHalves, kBlockN, ForwardParams>;

struct Smem {
    QueryHalves q;
    KeyHalves k[kStages];
    ValueRows v[kStages];
    Ring<kStages> k_ring, v_ring;
    ptx::Barrier queries_full;

    __device__ void init() {
        constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
        k_ring.init(kConsumerWarps);
        v_ring.init(kConsumerWarps);
        ptx::barrier_init(queries_full, 1);
        ptx::barrier_init_fence();
    }
};

using Keys = KeyTiles<kBlockN>;

// The keys that a block's queries see.
__device__ inline Keys keys_of(const ForwardParams& call, const QueryTile& work) {
    return {work.sequence.mask(call.features), work.first_row, kBlockM};
}
