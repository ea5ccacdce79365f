// What a block of bwd_3_mma processes, its shared memory, and the workspace of all blocks.
#pragma once

#include "gradients/key_sums.cuh"
#include "mma/handover.cuh"
#include "mma/mma_query_sums.cuh"
#include "mma/mma_score_tiles.cuh"
#include "scores/seen_tiles.cuh"

constexpr int kStages = STAGES;
// dQ comes from blocks of one of three kinds. Those that have all keys of a KV head have dQ of its
// queries to themselves: it is rounded at once. The number of keys of packed sequences is what the
// caller says, so that one may have more tiles of keys than one. Its block goes through all of
// them, and sums dQ in the workspace.
constexpr bool kWholeHeads = WHOLE_HEADS;
// Blocks of another launch own queries.
constexpr bool kOwnsQueries = kDeterministic && !kWholeHeads;
// Blocks that own some of the keys share queries: they add to sums in the workspace, which a launch
// of its own rounds.
constexpr bool kSharesQueries = !kOwnsQueries && !kWholeHeads;
// Whether there are such sums.
constexpr bool kSumsQueries = kSharesQueries || (kWholeHeads && kPacked);
// Whether a launch finds the tiles that a mask hides. Blocks with whole heads have few tiles, and
// all of their rows of dQ to write.
constexpr bool kSkipsQueries = kKeyMask && !kHidesKeys && !kWholeHeads;  // for their keys
constexpr bool kSkipsTiles = kSkipsQueries || (kKeyMask && kOwnsQueries);
// Whether the LSE and D are in the workspace. Blocks with whole heads have no use for them.
constexpr bool kKeepsStats = !kWholeHeads || kSink;
// How the warps divide dQ: first its rows, then its columns. Where all operands come from shared
// memory, its bandwidth is the bottleneck: then two 16-row tiles per warp load less for each
// product. But the most warps that share rows divide dQ's columns no further: for more parts, wide
// heads would be padded.
constexpr bool kInPairs =
    kSplit > 1 && kBlockM > kMmaM && (kSplit < kMaxSplit || kWarps * 2 * kMmaM <= kBlockM * kSplit);
constexpr int kQueryRows = min_of(kWarps, kBlockM / (kInPairs ? 2 * kMmaM : kMmaM));
constexpr int kQueryTiles = kBlockM / kMmaM / kQueryRows;
constexpr int kQueryParts = kWarps / kQueryRows;
// Head dims, padded so that all warps that share them have whole fragments; and a warp's part of
// those of dK, dV and dQ.
constexpr int kHead = round_up(kHeadDim, kMmaK*(kSplit > kQueryParts ? kSplit : kQueryParts));
constexpr int kValue = round_up(kValueDim, kMmaK* kSplit);
constexpr int kHeadPart = kHead / kSplit, kValuePart = kValue / kSplit;
constexpr int kQueryCols = kHead / kQueryParts;
// Steps of dQ that are unrolled. While a warp has whole rows of dK and dV, there are no registers
// for operands loaded far ahead: ptxas would spill others.
constexpr int kQuerySteps = kSplit == 1 ? min_of(kSteps, 4) : kStepsAtOnce;
// With room for one tile of queries, the next one is copied as soon as the last product that needs
// a part of this one is done, if a barrier says when.
constexpr bool kEarlyCopies = kStages == 1 && !kWholeHeads && (kSplit > 1 || !kOwnsQueries);
static_assert(kQueryRows * kQueryTiles * kMmaM == kBlockM,
              "the warps must share out the rows of dQ");
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "the host passes a different struct");

constexpr bool kHandsOver = HANDS_OVER;
static_assert(!kWholeHeads || kSplit == 1, "the output of dQ takes the place of Q");
static_assert(!kHandsOver || (kSplit == 1 && kStages == 2 && !kOwnsQueries && !kWholeHeads),
              "warps hand on two tiles of queries, and dS where they do not share rows");

// The handovers of Q with dO, and of dS, if warps use them.
template <bool Used>
struct QueryHandovers {
    Handover queries[kStages], gradients;

    __device__ void init() {
        if (threadIdx.x > 0) return;
        for (Handover& stage : queries) stage.init(kThreads, kWarps);
        gradients.init(kWarps, kWarps);
    }
};
template <>
struct QueryHandovers<false> {
    static constexpr NoHandover queries[kStages]{}, gradients{};

    __device__ void init() {}
};

// Tiles of O, where blocks with whole heads find D.
template <bool Used>
struct OutputTiles {
    MmaTile<kBlockM, kValue> out[kStages];
};
template <>
struct OutputTiles<false> {};

struct KeySmem : Powers, QueryHandovers<kHandsOver>, OutputTiles<kWholeHeads> {
    MmaTile<kBlockN, kHead> k;
    MmaTile<kBlockN, kValue> v;
    MmaTile<kBlockM, kHead> q[kStages];
    MmaTile<kBlockM, kValue> dout[kStages];
    MmaTile<kBlockN, kBlockM> weights[kSplit > 1 && !kEarlyCopies ? 2 : 1];
    alignas(16) RowStats rows[kStages][kBlockM];

    __device__ void init() {
        Powers::init();
        QueryHandovers<kHandsOver>::init();
    }
    __device__ auto& ds() { return weights[0]; }  // dS^T
    // P^T, if it is shared: with one stage, until dS^T takes its place.
    __device__ auto& p() { return weights[sizeof(weights) / sizeof(weights[0]) - 1]; }
};

struct QuerySmem : Powers {
    MmaTile<kBlockN, kHead> q;
    MmaTile<kBlockN, kValue> dout;
    MmaTile<kBlockM, kHead> k[kStages];
    MmaTile<kBlockM, kValue> v[kStages];
    MmaTile<kBlockN, kBlockM> ds;
};

union Smem {
    KeySmem keys;
    QuerySmem queries;
};

using DqSums = QuerySums<kBlockM, kHead>;
// For blocks that own keys, and for blocks that own queries.
using SeenOfKeys = SeenTiles<kBlockM, kBlockN>;
using SeenOfQueries = SeenTiles<kBlockN, kBlockM>;

// The workspace's parts, each for all heads.
struct Workspace {
    acc_t* dq;
    KeySums key_sums;
    RowStats* stats;
    acc_t* arrays;
    SeenPart* seen;

    __device__ explicit Workspace(const BackwardParams& params) {
        dq = static_cast<acc_t*>(params.workspace);
        key_sums = {dq + (kSumsQueries ? DqSums::rows(params.sizes) * kHead : 0), params.sizes};
        stats = reinterpret_cast<RowStats*>(key_sums.data + KeySums::count(params.sizes));
        arrays = reinterpret_cast<acc_t*>(stats + (kKeepsStats ? rows_of_heads(params.sizes) : 0));
        seen = reinterpret_cast<SeenPart*>(arrays);
        constexpr int kSeenOfSum = sizeof(acc_t) / sizeof(SeenPart);  // that fit into one sum
        arrays += (seen_tiles(params) + kSeenOfSum - 1) / kSeenOfSum;
    }

    __device__ SeenPart* seen_of_queries(const BackwardParams& params) const {
        return seen + keys_seen(params);
    }
    // The number of tiles for blocks that own keys, and for both kinds of blocks.
    __device__ static long long keys_seen(const BackwardParams& params) {
        return kSkipsQueries ? SeenOfKeys::count(params) : 0;
    }
    __device__ static long long seen_tiles(const BackwardParams& params) {
        if constexpr (!kSkipsTiles) return 0;
        return keys_seen(params) + (kOwnsQueries ? SeenOfQueries::count(params) : 0);
    }
};
