// What a block of bwd_4_wgmma processes, and its shared memory.
#pragma once

#include "hopper/backward/key_softmax.cuh"
#include "hopper/backward/wgmma_backward.cuh"
#include "hopper/backward/wgmma_query_walks.cuh"

constexpr int kBlockM = BLOCK_M, kStages = STAGES;
constexpr int kKeyStages = KEY_STAGES;
static_assert(kBlockN == kConsumers * kWgmmaM);
// Whether gradients leave through an outbox for each warpgroup. Otherwise warpgroups add to dQ
// themselves, and dK and dV leave from the memory of K and V.
constexpr bool kOutboxes = HAS_OUTBOXES;
static_assert(!kOutboxes || kAdding == kAsTheyCome, "nobody would know when they are added");
constexpr bool kShortTiles = kBlockM <= kPanelCols;
// Whether a warpgroup that rounds dQ loads the sums of other keys while products run. With short
// tiles, which are mostly for more head dims, it has no registers for them.
constexpr bool kSumsEarly = kRounds && !kShortTiles && kAdding == kAlone;
// Whether dO has barriers of its own, so that S can begin once Q is there. Elsewhere this is no
// faster.
constexpr bool kOutApart = kShortTiles && kScoresTogether;
// Whether a warpgroup passes over tiles of queries that see keys of the other one alone. If tiles
// are short, a mask leaves one at an end. Somebody would have to pass over their bias, too. A soft
// cap leaves no registers for this.
constexpr bool kPassesOver =
    kShortTiles && kScoresTogether && kRangeMask && !kHidesScores && !kBias && !kSoftcap;
// Bytes of a row of dS^T in a panel: narrow if queries would fill only part of a panel.
constexpr int kScoreRowBytes = kBlockM % kPanelCols == 0 ? kPanelRowBytes : kNarrowRowBytes;
constexpr int kHead = round_up(kHeadDim, kWgmmaK), kValue = round_up(kValueDim, kWgmmaK);

using KeyRows = PanelTile<kWgmmaM, kHeadDim>;
using ValueRows = PanelTile<kWgmmaM, kValueDim>;
using QueryRows = PanelTile<kBlockM, kHeadDim>;
using OutRows = PanelTile<kBlockM, kValueDim>;
using ScoreRows = PanelTile<kWgmmaM, kBlockM, scalar_t, kScoreRowBytes>;
using Keys = KeyOrder<kBlockN>;
using OwnTiles = QueryTileRange<kBlockM, kWgmmaM>;  // of a warpgroup's keys
using Statistics = RowStatistics<kBlockM>;

// Whether the warpgroups make dQ of one tile after the other in turn. Otherwise they divide a tile
// of dQ^T, of which a product computes whole panels of dims, even if dims fill only part of one:
// each has one panel, if there are two or more, and half of the queries of an odd panel.
constexpr bool kWholeQueries = WHOLE_QUERIES;
static_assert(!kWholeQueries || (kBlockM == kWgmmaM && kScoresTogether));
constexpr int kPanels = KeyRows::kPanels;
constexpr bool kHasPanel = kWholeQueries || kPanels >= kConsumers;
constexpr bool kHalfPanel = !kWholeQueries && kPanels % kConsumers != 0;
static_assert(kWholeQueries || kPanels / kConsumers == kHasPanel,
              "a warpgroup has at most one panel of dQ");
template <bool Whole>
struct SumsIf {
    using type = QuerySums<kBlockM, kPanels, kHalfPanel>;
};
template <>
struct SumsIf<true> {
    using type = WholeQuerySums;
};
using Sums = SumsIf<kWholeQueries>::type;
using QueryWorkspace = Workspace<kBlockM, Sums>;
using Tiles = WorkQueryTiles<QueryWorkspace>;
using RangeWalk = QueryWalk<Tiles>;
struct QueryPart {
    WgmmaSums<kWholeQueries ? kHead : kBlockM> panel;  // or all panels
    WgmmaSums<kBlockM / 2> half;
};
// Whether warpgroups take turns from a tile's first product to its weights, so that the tensor
// cores serve one while the other waits for its dQ. Otherwise both would fall into step and compute
// their softmax at the same time. If only one has a dQ to wait for, they do not.
constexpr bool kProductTurns = !kWholeQueries;

struct Queries {
    QueryRows q;
    OutRows dout;
};

// What a warpgroup sends out by TMA: its part of a tile of dQ, or the gradients of its keys or
// values. The part of dQ is the largest.
struct Outbox {
    alignas(kOutboxes ? kSwizzleBytes
                      : sizeof(float)) float sums[kOutboxes ? Sums::kLargestPart : 1];

    __device__ float* queries() { return sums; }
    __device__ KeyRows& keys() { return reinterpret_cast<KeyRows&>(sums); }
    __device__ ValueRows& values() { return reinterpret_cast<ValueRows&>(sums); }
};
static_assert(!kOutboxes || !kHalfPanel, "a half has no outbox");
static_assert(!kOutboxes || sizeof(Outbox) >= KeyRows::kBytes);
static_assert(!kOutboxes || sizeof(Outbox) >= ValueRows::kBytes);
// The destination: `sums`, to which dQ is added, or dK and dV of `work`.
struct OutboxLabel {
    enum Content { kNothing, kQueries, kValues, kKeys } content;
    float* sums;
    KeyWork work;
};

using BiasRows = BiasRowsOf<kBlockM, kWgmmaM>;

struct Smem : BiasTiles<BiasRows, kConsumers> {
    KeyRows k[kKeyStages][kConsumers];
    ValueRows v[kKeyStages][kConsumers];
    Queries queries[kStages];
    ScoreRows ds[kStages][kConsumers];
    Statistics rows[kStages];
    KeyWork work[kKeyStages];
    LabelledRing<kStages, HeadTileLabel> ring;
    Ring<kStages> ds_ring;
    Ring<kKeyStages> keys_ring;
    ptx::Barrier gradients[kKeyStages];  // whether they lie where the keys were
    OrderRing<kStages> order[kConsumers];
    Ring<1> bias_ring;
    Ring<1> outbox_rings[kConsumers];
    OutboxLabel outbox_labels[kConsumers];
    ptx::Barrier dout_full[kStages];
    Outbox outboxes[kConsumers];

    // Sets up the barriers, each with its number of arrivals.
    __device__ void init() {
        constexpr int kWarps = kConsumers * kWarpgroup / 32;
        ring.init(kWarps);
        bias_ring.init(kWarps);
        if (kOutApart) {
            for (ptx::Barrier& full : dout_full) ptx::barrier_init(full, 1);
        }
        ds_ring.init(kWarps, kConsumers * kWarpgroup);
        keys_ring.init(kOutboxes ? kWarps : kTurns ? kConsumers + 1 : 1);
        for (ptx::Barrier& written : gradients) {
            ptx::barrier_init(written, kConsumers * kWarpgroup);
        }
        if (kTurns) {
            for (OrderRing<kStages>& waiting : order) waiting.init();
        }
        if (kOutboxes) {
            for (Ring<1>& outbox_ring : outbox_rings) outbox_ring.init(1, kWarpgroup);
        }
        ptx::barrier_init_fence();
    }
};

// At the end of the workspace: the number of tiles of keys taken, what a mask or a mask_mod shows
// of each tile of scores, and the sums of the gradients of score_mod's arrays.
__device__ inline unsigned int* key_tiles_taken(const BackwardParams& call) {
    return QueryWorkspace(call).end;
}
using Seen = SeenTiles<kBlockM, kBlockN>;
using SeenWalk = SeenQueryWalk<Seen, Tiles, kBlockM>;
using LabelledWalk = LabelledQueryWalk<Tiles, kStages>;
__device__ inline SeenPart* seen_parts(const BackwardParams& call) {
    return reinterpret_cast<SeenPart*>(key_tiles_taken(call) + 1);
}
__device__ inline float* sums_of_arrays(const BackwardParams& call) {
    constexpr int kSeenOfSum = sizeof(float) / sizeof(SeenPart);  // that fit into one sum
    const long long seen = kHidesScores ? Seen::count(call) : 0;
    return reinterpret_cast<float*>(seen_parts(call)) + (seen + kSeenOfSum - 1) / kSeenOfSum;
}
