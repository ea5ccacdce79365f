// What fwd_9_float32 processes: tiles of halves, in the workspace and in shared memory.
//
// Each row has its own unit. Units of queries and keys become factors of the score, those of values
// factors of the weight. A separate launch makes the tiles. Their layout in the workspace is that
// of shared memory, so that one copy brings each.
#pragma once

#include "call/key_tiles.cuh"
#include "hopper/float32/halves.cuh"
#include "hopper/float32/halves_workspace.cuh"
#include "hopper/labelled_ring.cuh"
#include "scores/seen_tiles.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kStages = STAGES;
constexpr int kValueStages = VALUE_STAGES;
constexpr int kConsumers = kBlockM / kWgmmaM;

// Rows of the small parts come after all rows of the large parts.
using QueryRows = PanelTile<kHalves * kWgmmaM, kDepth>;
using KeyRows = PanelTile<kHalves * kBlockN, kDepth>;
using ValueRows = PanelTile<kHalves * kBlockN, kDims>;

struct QueryHalves {
    QueryRows rows[kConsumers];
    float unit[kBlockM];

    static constexpr int kBytes = kConsumers * QueryRows::kBytes + sizeof(unit);
};

// Whether all queries that share a key see the same of a mask. Keys that it hides have the exponent
// -inf, by which their scores are, and are zero.
constexpr bool kHidesKeys = HIDES_KEYS;

// The units of keys and of their values: the exponent, and 2 to minus the exponent. The latter is
// negative where halves cannot hold the values, which are then zero there and added to the output
// directly.
struct KeyUnits {
    float unit[kBlockN], value_exponent[kBlockN], value_reciprocal[kBlockN];

    __device__ bool has_value(int key) const { return value_reciprocal[key] > 0; }
    __device__ bool shows(int key) const { return value_exponent[key] != negative_infinity(); }
};

struct TileHalves {
    KeyRows k;
    ValueRows v;
    KeyUnits units;
};
static_assert(sizeof(QueryHalves) == QUERY_TILE_BYTES, "the host plans another workspace");
static_assert(sizeof(TileHalves) == KEY_TILE_BYTES, "the host plans another workspace");
using Workspace = HalvesWorkspace<QueryHalves, kBlockM, TileHalves, kBlockN, ForwardParams>;

struct Smem {
    QueryHalves q;
    KeyRows k[kStages];
    ValueRows v[kValueStages];
    KeyUnits units[kStages];
    LabelledRing<kStages> k_ring;  // with the units
    Ring<kValueStages> v_ring;
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
using Seen = SeenTiles<kBlockM, kBlockN>;

// The keys that a block's queries see.
__device__ inline Keys keys_of(const ForwardParams& call, const QueryTile& work) {
    return {work.sequence.mask(call.features), work.first_row, kBlockM};
}

__device__ inline SeenPart* seen_parts(const ForwardParams& call) {
    return static_cast<SeenPart*>(Workspace(call).rest());
}

// A walk over these tiles. A tile begins with `key`, and is masked if a query may not see all of
// it.
struct RangeWalk {
    const Keys keys;
    int key;

    __device__ explicit RangeWalk(const Keys& keys) : keys(keys), key(keys.begin) {}
    __device__ bool at_end() const { return key >= keys.end; }
    __device__ int first_key() const { return key; }
    __device__ bool masked() const { return keys.masked(key); }
    __device__ void advance() { key += kBlockN; }
    __device__ TileLabel label() const { return {}; }  // none is needed
};

// The same where a mask or a mask_mod hides some tiles, for the producer. If it hides all, the walk
// has one tile, of which nothing is shown.
struct SeenWalk {
    const Keys keys;
    const Seen seen;
    const int first_row;
    int key, next;

    __device__ SeenWalk(const ForwardParams& call, const QueryTile& work)
        : keys(keys_of(call, work)),
          seen(seen_parts(call), call, work.sequence, work.head),
          first_row(work.first_row),
          next(find(keys.begin)) {
        if (next == keys.end) next = keys.begin;
        advance();
    }
    __device__ bool at_end() const { return key >= keys.end; }
    __device__ void advance() {
        key = next;
        next = find(key + kBlockN);
    }
    __device__ TileLabel label() const {
        // For hidden keys, only what is added to scores may be NaN, or queries that see no key.
        const bool asks = kHidesKeys && !kShapedScores ? !seen.shows_any(first_row, key)
                                                       : seen.cuts(first_row, key);
        const bool masked = keys.masked(key, asks);
        return {key / kBlockN, masked, next >= keys.end};
    }

  private:
    __device__ int find(int from) const { return seen.next_key_alone(first_row, from, keys.end); }
};

// The same for those who receive the tiles.
struct LabelledWalk : LabelledTiles<kStages> {
    __device__ LabelledWalk(LabelledRing<kStages>& ring, const RingPosition<kStages>& at,
                            const Keys& keys)
        : LabelledTiles(ring, at, keys.begin >= keys.end) {}
    __device__ int first_key() const { return label.tile() * kBlockN; }
};
