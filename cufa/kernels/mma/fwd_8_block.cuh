// What a block of fwd_8_split_kv processes, what its teams share, and its shared memory.
#pragma once

#include "mma/half_queries.cuh"
#include "mma/partial_rows.cuh"
#include "ptx/ptx_sm90.cuh"

using out_t = OUT_SCALAR;
constexpr bool kDescaled = is_same<key_t, float8_e4m3fn>;
constexpr bool kMixed = !is_same<scalar_t, key_t>;
constexpr int kThreads = THREADS, kWarps = kThreads / 32, kBlocksPerSm = BLOCKS_PER_SM;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kStages = STAGES;
constexpr bool kSplitKeys = SPLIT_KEYS;    // equally many blocks split the keys of each tile
constexpr bool kEvenShares = EVEN_SHARES;  // the keys of all tiles are divided evenly
static_assert(!kSplitKeys || !kEvenShares, "blocks part the keys one way or the other");
static_assert(!kSplitKeys || kMostQueries == 0, "the parts of all rows are merged");
constexpr bool kNextOverlaps = NEXT_OVERLAPS;  // the launch after this one begins early
// 16-row tiles of a warp: with two, keys and values that it loads serve twice as many rows.
constexpr int kTiles = WARP_ROWS / kMmaM;
constexpr int kRowWarps = kBlockM / (kTiles * kMmaM);
// A warp's columns of the output and head dims of the scores.
constexpr int kOwnCols = kPartCols / kColumnWarps;
constexpr int kDepth = round_up(kHeadDim, kMmaK* kColumnWarps), kOwnDepth = kDepth / kColumnWarps;
// Whether rows of V are the beginnings of those of K, so that only K is copied.
constexpr bool kValuesInKeys = VALUES_IN_KEYS;
constexpr int kTeamWarps = kRowWarps * kColumnWarps;
constexpr int kTeamThreads = kTeamWarps * 32, kTeams = kWarps / kTeamWarps;
static_assert(kRowWarps * kTiles * kMmaM == kBlockM, "a warp must own whole 16-row tiles");
static_assert(kTeams * kTeamWarps == kWarps, "the warps of a team must divide the block's");
static_assert(kBlockN % kMmaK == 0, "BLOCK_N must be whole steps of P V");
static_assert(kStages > 1, "a tile is copied while another one is worked on");
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");

using Scores = Accumulators<kTiles, kBlockN>;

// A thread's team and its place in it.
__device__ inline int team() {
    return threadIdx.x / kTeamThreads;
}
__device__ inline int team_thread() {
    return threadIdx.x % kTeamThreads;
}
constexpr int kFirstTeam = 1;  // barrier 0 is the block's
__device__ inline void sync_team() {
    if constexpr (kTeamWarps == 1) {
        __syncwarp();
    } else {
        ptx::named_barrier_sync<kTeamThreads>(kFirstTeam + team());
    }
}
// The same; returns whether any thread says aye.
__device__ inline bool sync_team_or(bool aye) {
    if constexpr (kTeamWarps == 1) {
        __syncwarp();
        return __any_sync(0xffffffffu, aye);
    }
    return ptx::named_barrier_or<kTeamThreads>(kFirstTeam + team(), aye);
}
// The warp's first row in the block's tile, its place among the warps with these rows, and a lane's
// row in each half of its fragments `m`.
__device__ inline int warp_row() {
    return team_thread() / 32 % kRowWarps * kTiles * kMmaM;
}
__device__ inline int column_warp() {
    return kColumnWarps == 1 ? 0 : team_thread() / 32 / kRowWarps;
}
__device__ inline int row_of(int m, int half) {
    return fragment_row(warp_row(), m, half);
}

using KeyRows = MmaTile<kBlockN, kDepth>;
static_assert(!kValuesInKeys || kPartCols <= KeyRows::kCols, "all columns of V must be there");
// Columns in a swizzled tile are found by flipping bits: of a warp's first one and of those after
// it, no bit may be the same.
template <class Tile>
constexpr bool kFindsOwnCols = kColumnWarps == 1 || !Tile::kSwizzled ||
                               kOwnCols % Tile::kSpan == 0 || (kOwnCols & (kOwnCols - 1)) == 0;
template <bool InKeys>
struct StageOf {
    using Values = MmaTile<kBlockN, kPartCols>;

    KeyRows k;
    Values own_values;

    __device__ Values& v() { return own_values; }
};
template <>
struct StageOf<true> {
    using Values = KeyRows;

    KeyRows k;

    __device__ Values& v() { return k; }
};
using Stage = StageOf<kValuesInKeys>;
static_assert(kFindsOwnCols<Stage::Values>, "columns would share bits");

struct Inputs {
    MmaTile<kBlockM, kDepth, scalar_t> q;
    Stage stages[kTeams][kStages];
};

// Where warps divide the head dims: the part of its rows' scores that each of a team has.
template <bool Divided>
struct ScoreParts {
    static constexpr int kFragments = kBlockN / kMmaN;
    Pack<acc_t, 4> parts_of_scores[kTeams][kTeamWarps][kTiles * kFragments][32];

    // Adds up the parts, for all warps that have the rows. The team must have met since the last
    // tile.
    __device__ void add_up(Scores& s) {
        auto& parts = parts_of_scores[team()];
        const int warp = team_thread() / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < kTiles * kFragments; ++i) {
            const Fragment& own = s[i / kFragments][i % kFragments];
            parts[warp][i][lane] = {own[0], own[1], own[2], own[3]};
        }
        sync_team();
#pragma unroll
        for (int i = 0; i < kTiles * kFragments; ++i) {
            Fragment& sum = s[i / kFragments][i % kFragments];
#pragma unroll
            for (int n = 0; n < kColumnWarps; ++n) {  // in the same order for all
                const auto part = parts[warp % kRowWarps + n * kRowWarps][i][lane];
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[e] = n == 0 ? part[e] : sum[e] + part[e];
            }
        }
    }
};
template <>
struct ScoreParts<false> {
    __device__ void add_up(Scores&) {}
};

struct Smem : HalfQueries<kBlockM, kMixed>, ScoreParts<(kColumnWarps > 1)> {
    union {
        Inputs inputs;
        PartialRow parts[kTeams][kBlockM];
    };
};
