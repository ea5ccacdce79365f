// What a block of bwd_5_wgmma_wide processes, and its shared memory.
#pragma once

#include "hopper/backward/key_softmax.cuh"
#include "hopper/backward/wgmma_backward.cuh"
#include "hopper/backward/wgmma_seen_queries.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = kWgmmaM, kStages = STAGES;
constexpr int kHead = round_up(kHeadDim, kWgmmaK), kValue = round_up(kValueDim, kWgmmaK);
// Panels of the head dims; each warpgroup has at least one.
constexpr int kHeadPanels = kHeadDim > kPanelCols ? ceil_div(kHeadDim, kPanelCols) : kConsumers;
constexpr int kValuePanels = kValueDim > kPanelCols ? ceil_div(kValueDim, kPanelCols) : kConsumers;

using KeyRows = PanelTile<kBlockN, kHeadPanels * kPanelCols>;
using ValueRows = PanelTile<kBlockN, kValuePanels * kPanelCols>;
using QueryRows = PanelTile<kBlockM, kHeadPanels * kPanelCols>;
using OutRows = PanelTile<kBlockM, kValuePanels * kPanelCols>;
using ScoreRows = PanelTile<kBlockN, kBlockM>;
using Keys = KeyOrder<kBlockN>;
using Tiles = QueryTileRange<kBlockM, kBlockN>;
using RangeWalk = QueryWalk<Tiles>;
using Statistics = RowStatistics<kBlockM>;
using Sums = QuerySums<kBlockM, kHeadPanels, false>;
using QueryWorkspace = Workspace<kBlockM, Sums>;

// TMA copies the bias of a tile to where P^T will be written.
using BiasRows = BiasRowsOf<kBlockM, kWgmmaM>;
template <class Tile>
__device__ inline Tile& bias_in_place_of(ScoreRows& p) {
    static_assert(sizeof(Tile) <= sizeof(ScoreRows));
    return reinterpret_cast<Tile&>(p);
}

struct Smem {
    KeyRows k;
    ValueRows v;
    QueryRows q[kStages];
    OutRows dout[kStages];
    ScoreRows p[kStages], ds[kStages];
    Statistics rows[kStages];
    LabelledRing<kStages> q_ring;
    Ring<kStages> dout_ring, p_ring, ds_ring;
    Ring<1> keys_ring;
    ptx::Barrier bias_full[kStages];  // for the bias, in the memory of P^T
    OrderRing<kStages> order[kConsumers];

    // Sets up the barriers, each with its number of arrivals.
    __device__ void init() {
        constexpr int kWarps = kConsumers * kWarpgroup / 32;
        q_ring.init(kWarps);
        for (ptx::Barrier& full : bias_full) ptx::barrier_init(full, 1);
        dout_ring.init(kWarps);
        p_ring.init(kWarps, kWarpgroup);
        ds_ring.init(kWarps, kWarpgroup);
        keys_ring.init(kConsumers);
        if (kTurns) {
            for (OrderRing<kStages>& waiting : order) waiting.init();
        }
        ptx::barrier_init_fence();
    }
};

// What a mask or a mask_mod shows of each tile, at the end of the workspace.
using Seen = SeenTiles<kBlockM, kBlockN>;
using SeenWalk = SeenQueryWalk<Seen, Tiles, kBlockM>;
using LabelledWalk = LabelledQueryWalk<Tiles, kStages>;
__device__ inline SeenPart* seen_parts(const BackwardParams& call) {
    return reinterpret_cast<SeenPart*>(QueryWorkspace(call).end);
}
