// What a block of bwd_5_wgmma_wide processes, and its shared memory.
#pragma once

#include "hopper/backward/key_softmax.cuh"
#include "hopper/backward/partner_sums.cuh"
#include "hopper/backward/wgmma_backward.cuh"
#include "hopper/backward/wgmma_query_walks.cuh"

constexpr int kBlockM = BLOCK_M, kStages = STAGES;
static_assert(kBlockN == kWgmmaM);
// Panels of a block's part of the head dims; each warpgroup has at least one. Beyond the head dims
// they are zero.
__device__ constexpr int panels_of_block(int dims) {
    return max_of(ceil_div(dims, kClusterBlocks * kPanelCols), kConsumers);
}
constexpr int kHeadPanels = panels_of_block(kHeadDim), kValuePanels = panels_of_block(kValueDim);
// The depth of S and dP.
constexpr int kHead = min_of(round_up(kHeadDim, kWgmmaK), kHeadPanels* kPanelCols);
constexpr int kValue = min_of(round_up(kValueDim, kWgmmaK), kValuePanels* kPanelCols);
__device__ inline int first_head_col() {
    return rank_in_cluster() * kHeadPanels * kPanelCols;
}
__device__ inline int first_value_col() {
    return rank_in_cluster() * kValuePanels * kPanelCols;
}

using KeyRows = PanelTile<kBlockN, kHeadPanels * kPanelCols>;
using ValueRows = PanelTile<kBlockN, kValuePanels * kPanelCols>;
using QueryRows = PanelTile<kBlockM, kHeadPanels * kPanelCols>;
using OutRows = PanelTile<kBlockM, kValuePanels * kPanelCols>;
using ScoreRows = PanelTile<kBlockN, kBlockM>;
using Keys = KeyOrder<kBlockN>;
using Statistics = RowStatistics<kBlockM>;
using Sums = QuerySums<kBlockM, kClusterBlocks * kHeadPanels, false>;
using QueryWorkspace = Workspace<kBlockM, Sums>;
using Tiles = WorkQueryTiles<QueryWorkspace>;
using RangeWalk = QueryWalk<Tiles>;

// TMA copies the bias of a tile to where P^T will be written.
using BiasRows = BiasRowsOf<kBlockM, kWgmmaM>;
template <class Tile>
__device__ inline Tile& bias_in_place_of(ScoreRows& p) {
    static_assert(sizeof(Tile) <= sizeof(ScoreRows));
    return reinterpret_cast<Tile&>(p);
}

// What comes from the partner, if there is one, for each warpgroup.
template <int ClusterBlocks>
struct FromPartner {
    PartnerSums<kBlockM / 2> sums[kConsumers];

    __device__ void init_partner() {
        for (auto& of_warpgroup : sums) of_warpgroup.init();
    }
    __device__ void add_partner(WgmmaSums<kBlockM>& s, int warpgroup, RingPosition<1>& at) {
        sums[warpgroup].add_to(s, at);
        at.advance();
    }
};
template <>
struct FromPartner<1> {
    __device__ static void init_partner() {}
    __device__ static void add_partner(WgmmaSums<kBlockM>&, int, RingPosition<1>&) {}
};

struct Smem : FromPartner<kClusterBlocks> {
    KeyRows k;
    ValueRows v;
    QueryRows q[kStages];
    OutRows dout[kStages];
    ScoreRows p[kStages], ds[kStages];
    Statistics rows[kStages];
    LabelledRing<kStages, HeadTileLabel> q_ring;
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
        init_partner();
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
