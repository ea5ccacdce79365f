// What the float32 backward on Hopper processes: tiles of halves, in the workspace and in shared
// memory.
//
// Sums over queries or keys need halves of one unit, so a tile has one unit. If its rows differ
// much in size, the smallest have fewer bits. This is negligible beside what the largest add to the
// same sums, unless a mask hides the largest from the sum.
#pragma once

#include "call/query_tiles.cuh"
#include "hopper/float32/halves.cuh"
#include "hopper/float32/halves_workspace.cuh"
#include "hopper/pipeline.cuh"
#include "scores/seen_tiles.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kStages = STAGES;
static_assert(kBlockN == kWgmmaM, "a warpgroup's products have 64 rows");

// Rows of the small parts come after all rows of the large parts.
using KeyRows = PanelTile<kHalves * kBlockN, kDepth>;
using ValueRows = PanelTile<kHalves * kBlockN, kDims>;
using QueryRows = PanelTile<kHalves * kBlockM, kDepth>;
using OutRows = PanelTile<kHalves * kBlockM, kDims>;
using ScoreRows = PanelTile<kHalves * kBlockN, kBlockM>;

// Whether products of a tile's halves are as exact as float32 products.
enum Held { kAlways, kUncut, kNever };  // kUncut: if no mask cuts through it
__device__ constexpr Held max_of(Held a, Held b) {
    return a > b ? a : b;
}

struct TileUnit {
    float size;  // turns halves into elements
    Held held;
};

// Sums of a tile's dQ or, if kTransposed, of its dQ^T, in the layout of a warpgroup's products:
// four sums of each thread for every eight columns of the product, panel by panel.
struct QuerySums {
    using Quad = Pack<float, 4>;
    static constexpr bool kTransposed = TRANSPOSED_SUMS;
    static constexpr int kCols = kTransposed ? round_up(kDepth, kPanelCols) : kDepth;
    static constexpr int kCount = kBlockM * kCols / 4;
    Quad quads[kCount];
};
// The warpgroups of a block that add to a tile's sums, each to its own: dQ^T is divided by dims.
constexpr int kAdders = QuerySums::kTransposed ? 2 : 1;

struct QueryHalves;

// For a tile of queries: the units of its halves, the place of its rows, and RowStats of each row.
// The LSE is infinite for a row that sees no key or does not exist: all its probabilities are 0.
struct Statistics {
    TileUnit q, dout;
    QueryHalves* tile;
    int first_row;
    int left_to_exact;  // whether exact_tiles processes it with these keys; for bwd_6's senders
    float lse_log2[kBlockM], d[kBlockM];

    __device__ Held held() const { return max_of(q.held, dout.held); }
};
struct KeyUnits {
    TileUnit k, v;

    __device__ Held held() const { return max_of(k.held, v.held); }
};

// Whether products of a tile of queries and a tile of keys are as exact as float32 products.
__device__ inline bool halves_hold(const Statistics& queries, const KeyUnits& keys, bool masked) {
    const Held held = max_of(queries.held(), keys.held());
    return held == kAlways || (held == kUncut && !masked);
}

struct QueryHalves {
    QueryRows q;
    OutRows dout;
    Statistics statistics;
    QuerySums dq;
    // If blocks add in order: the warpgroups that have added to the sums, or whose keys see none of
    // the rows.
    unsigned int additions;
};
struct KeyHalves {
    KeyRows k;
    ValueRows v;
    KeyUnits units;
};
static_assert(sizeof(QueryHalves) == QUERY_TILE_BYTES, "the host plans another workspace");
static_assert(sizeof(KeyHalves) == KEY_TILE_BYTES, "the host plans another workspace");
using Workspace = HalvesWorkspace<QueryHalves, kBlockM, KeyHalves, kBlockN, BackwardParams>;

// The rows that see a key, none if it does not exist. Rows past the end have no weights anyway.
struct SeeingRows {
    int first, end;

    SeeingRows() = default;
    __device__ SeeingRows(const Mask& mask, int key)
        : first(mask.first_row(key)), end(key < mask.seqlen_k ? mask.rows_end(key) : 0) {}
    __device__ bool have(int row) const { return row >= first && row < end; }
};

// The least number of KV heads, of all batches, in a section. If blocks add to dQ in the order of
// their keys, few of a head should begin together: each waits until those before it are under way.
constexpr int kLeastHeads = LEAST_HEADS;

__device__ inline KeyTile key_tile(const BackwardParams& call, int block = blockIdx.x) {
    return key_tile_of_block<kBlockN, kLeastHeads>(call, block);
}

using Tiles = QueryTiles<kBlockM>;
using Seen = SeenTiles<kBlockM, kBlockN>;

__device__ inline Tiles query_tiles_of(const BackwardParams& call, const KeyTile& work) {
    return {work.sequence.mask(call.features), work.first_key, kBlockN};
}

__device__ inline SeenPart* seen_parts(const BackwardParams& call) {
    return static_cast<SeenPart*>(Workspace(call).rest());
}

// Copies a block's keys to shared memory, by one thread.
template <class Smem>
__device__ inline void produce_keys(Smem& smem, const BackwardParams& call, const KeyTile& work) {
    const auto& keys = Workspace(call).keys_from(work.sequence, work.kv_head, work.first_key);
    ptx::barrier_arrive_expecting(smem.keys_full,
                                  KeyRows::kBytes + ValueRows::kBytes + sizeof(KeyUnits));
    ptx::copy_bytes(&smem.k, &keys.k, KeyRows::kBytes, smem.keys_full);
    ptx::copy_bytes(&smem.v, &keys.v, ValueRows::kBytes, smem.keys_full);
    ptx::copy_bytes(&smem.units, &keys.units, sizeof(KeyUnits), smem.keys_full);
}
