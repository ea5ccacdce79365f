// What a block of bwd_8_wgmma_pair processes, and its shared memory.
#pragma once

#include "hopper/backward/key_softmax.cuh"
#include "hopper/backward/partner_tiles.cuh"
#include "hopper/backward/wgmma_backward.cuh"
#include "hopper/backward/wgmma_query_walks.cuh"

// The two blocks of a cluster. The key block has K and Q: it computes S, P and dK. The value block
// has V and dO: it computes dP, dS and dV.
enum Role { kKeyBlock, kValueBlock };

constexpr int kBlockM = BLOCK_M;
static_assert(kBlockN == kConsumers * kWgmmaM);
constexpr int kHead = round_up(kHeadDim, kWgmmaK), kValue = round_up(kValueDim, kWgmmaK);
// Tiles of Q in shared memory, and of dO, P and dS. The key block makes dK and dQ of a tile kLag
// tiles later: meanwhile P has come to the value block and dS from there.
constexpr int kLag = 2, kQueryStages = STAGES, kScoreStages = SCORE_STAGES;
static_assert(kQueryStages > kLag && kScoreStages >= kLag, "the tiles between are there");

// The position of the tile kLag tiles before.
template <int Stages>
__device__ inline RingPosition<Stages> lagging(RingPosition<Stages> at) {
#pragma unroll
    for (int i = 0; i < kLag; ++i) at = before(at);
    return at;
}

using KeyRows = PanelTile<kWgmmaM, kHeadDim>;
using ValueRows = PanelTile<kWgmmaM, kValueDim>;
using QueryRows = PanelTile<kBlockM, kHeadDim>;
using OutRows = PanelTile<kBlockM, kValueDim>;
using ScoreRows = PanelTile<kWgmmaM, kBlockM, scalar_t, kPanelRowBytes, true>;
using Keys = KeyOrder<kBlockN>;
using Statistics = RowStatistics<kBlockM>;

// Each warpgroup of both blocks has a panel of dQ^T, in order. So the value block needs K, too, of
// the later panels.
constexpr int kHeadPanels = kAdders;
static_assert(KeyRows::kPanels <= kHeadPanels, "somebody would have to have more than one");
using LaterKeyRows = PanelTile<kWgmmaM, kConsumers * kPanelCols>;
constexpr int kFirstLaterCol = kConsumers * kPanelCols;
using Sums = QuerySums<kBlockM, kHeadPanels, false>;
using QueryWorkspace = Workspace<kBlockM, Sums>;
using Tiles = WorkQueryTiles<QueryWorkspace>;
using RangeWalk = QueryWalk<Tiles>;

// Whether a part of a key has NaN or infinity: an element that is then NaN.
template <int Parts>
struct LostKeys {
    scalar_t lost[kWgmmaM][Parts];

    __device__ scalar_t* at(int key, int part) { return &lost[key][part]; }
};

struct KeyBlockTiles {
    KeyRows k[kConsumers];
    QueryRows q[kQueryStages];
};
struct ValueBlockTiles {
    ValueRows v[kConsumers];
    LaterKeyRows k[kConsumers];
    OutRows dout[kScoreStages];
};

struct Smem {
    union {
        KeyBlockTiles keys;
        ValueBlockTiles values;
    };
    // At the same place in both blocks: written by one and copied to the other.
    ScoreRows p[kScoreStages][kConsumers], ds[kScoreStages][kConsumers];
    Statistics rows[kQueryStages];
    LostKeys<kWarpgroup / kWgmmaM> lost[kConsumers];
    Ring<kQueryStages> q_ring;
    Ring<kScoreStages> dout_ring;
    PartnerRing<kScoreStages> p_ring[kConsumers], ds_ring[kConsumers];
    Ring<kScoreStages> own_ds_ring;  // of the value block, for its part of dQ
    Ring<1> keys_ring;
    OrderRing<kScoreStages> order[kConsumers];

    // Sets up the barriers, each with its number of arrivals.
    __device__ void init() {
        constexpr int kOfWarpgroup = kWarpgroup / 32, kWarps = kConsumers * kOfWarpgroup;
        q_ring.init(kWarps);
        dout_ring.init(kWarps);
        for (auto& ring : p_ring) ring.init(kOfWarpgroup, ScoreRows::kBytes);
        for (auto& ring : ds_ring) ring.init(kWarps, ScoreRows::kBytes);
        own_ds_ring.init(kWarps, kConsumers * kWarpgroup);
        keys_ring.init(kConsumers);
        if (kTurns) {
            for (auto& waiting : order) waiting.init();
        }
        ptx::barrier_init_fence();
    }
};
