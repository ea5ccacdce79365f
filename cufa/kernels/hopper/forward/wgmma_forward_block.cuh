// What a block of the Hopper forwards processes, and what its warps share. Each kernel defines its
// shared memory `Smem`, with tiles k, v, q and out, rings k_ring, v_ring and q_ring, what its
// helpers share, and the tiles of queries it is at.
#pragma once

#include "hopper/forward/row_bias.cuh"
#include "hopper/forward/seen_bits.cuh"
#include "hopper/forward/wgmma_softmax.cuh"
#include "hopper/forward/work_tiles.cuh"
#include "hopper/labelled_ring.cuh"
#include "hopper/wgmma_pages.cuh"
#include "scores/kept_scores.cuh"
#include "scores/seen_columns.cuh"

constexpr int kThreads = THREADS, kBlocksPerSm = BLOCKS_PER_SM;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kStages = STAGES, kQueryStages = QUERY_STAGES, kStoreCols = STORE_COLS;
// Teams of warpgroups that compute for the same rows, each a part of the columns of O.
constexpr int kTeams = kBlockM / kWgmmaM, kColumnWarpgroups = COLUMN_WARPGROUPS;
constexpr int kConsumers = kTeams * kColumnWarpgroups;
static_assert(kColumnWarpgroups == 1 || kTeams == 1, "columns are divided only in a small block");
// Whether rows of V are the beginnings of those of K, so that only K is copied.
constexpr bool kValuesInKeys = VALUES_IN_KEYS;
// Whether keys are in 8 bits and products in 16.
constexpr bool kWidensKeys = !is_same<key_t, scalar_t>;
static_assert(!kWidensKeys || kValuesInKeys, "only keys are widened, so values must lie in them");
// With one stage of queries, two warpgroups would wait for the next queries at the same time; of
// three, one computes meanwhile.
constexpr bool kOutputFirst = kQueryStages == 1 && kConsumers <= 2;
// The first warpgroup that computes. Of those before it, one copies and the other, if any, helps.
constexpr int kFirstConsumer = kThreads / kWarpgroup - kConsumers;
static_assert((kFirstConsumer == 1 || kFirstConsumer == 2) &&
                  (kFirstConsumer + kConsumers) * kWarpgroup == kThreads,
              "one warpgroup copies, another may help, the others compute");
// The helpers are the warps beside the producer or, apart from it, a warpgroup of their own.
constexpr bool kHelpersApart = kFirstConsumer == 2;
constexpr int kFirstHelper = kHelpersApart ? kWarps : 1;  // a warp
constexpr int kHelperWarps = kHelpersApart ? kWarps : kWarps - 1;
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
constexpr int kDepth = round_up(kHeadDim, kWgmmaK);
// Keys that one copy brings: a tile, or the part of it that is in one page.
constexpr int kBoxKeys = BOX_KEYS;
// What the heads of a section may take of the L2 cache.
constexpr int kSectionBytes = SECTION_BYTES;
static_assert(kBlockN % kBoxKeys == 0, "a tile must be whole boxes");
static_assert(!kPaged || kPageSize % kBoxKeys == 0, "a page must be whole boxes");
constexpr int kWorkspaceAlignment = 16;  // of each array in it, in bytes

struct Params : BiasMap<> {
    TensorMap q, k, v, o;
    ForwardParams call;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "the host passes a different struct");

// Beside another launch, some blocks begin only when that one ends, so no block has a tile of its
// own.
constexpr bool kLateBlocks = kLeastQueries > 0;
// Whether parts of keys are merged by a launch of their own. Else the blocks with last parts wait
// for the others.
constexpr bool kMergesLater = MERGES_LATER;

using QueryRows = PanelTile<kWgmmaM, kHeadDim>;
// Where warpgroups divide the columns of O, each has so many whole panels, also of V.
constexpr int kOwnPanels = ceil_div(ceil_div(kValueDim, kPanelCols), kColumnWarpgroups);
constexpr int kOwnCols = kOwnPanels * kPanelCols;
constexpr int kValueCols = kColumnWarpgroups == 1 ? kValueDim : kColumnWarpgroups * kOwnCols;
using ValueRows = PanelTile<kBlockN, kValueCols>;
constexpr int kKeyCols = kValuesInKeys ? max_of(kHeadDim, kValueCols) : kHeadDim;
using KeyRows = PanelTile<kBlockN, kKeyCols>;

// Whether a head's rows may begin in the middle of a sector of the L2 cache, as they do in every
// other head if a row is an odd number of chunks. Each panel of such a row touches one sector more
// than it fills, and the next panel reads half of that sector again. A tile needs room for one more
// chunk. Up to two panels this gains nothing: there, tiles have more queries and read less.
constexpr int kSectorBytes = 32, kSectorCols = kSectorBytes / sizeof(scalar_t);
template <int Dims>
constexpr bool kOddRows = kColumnWarpgroups == 1 && sizeof(scalar_t) == 2 &&
                          ceil_div(Dims, kPanelCols) > 2 &&
                          round_up(Dims, kWgmmaK) - Dims >= kChunkCols;

// The first column of a head's tiles: 0, or negative so that the tile begins with a sector. TMA
// fills the columns before 0 with zeros. Q begins where K does, so that their product stays the
// same, and O where V does.
template <int Dims>
__device__ inline int first_col_of(const Tensor& tensor, int head) {
    if (!kOddRows<Dims>) return 0;
    if ((tensor.batch_stride | tensor.row_stride) % kSectorCols != 0) return 0;
    const auto* row = static_cast<const scalar_t*>(tensor.data) + head * tensor.head_stride;
    const auto bytes = reinterpret_cast<unsigned long long>(row) % kSectorBytes;
    return -static_cast<int>(bytes / sizeof(scalar_t));
}

// The tiles of keys, by number, that a tile of queries processes: from end - 1 down to begin. All
// of its rows see the tiles from whole_begin to whole_end. Under a causal mask or a window, each of
// these rows also sees a key of a later tile: every row has a maximum when the first whole tile
// comes, unless a mask hides that key (SeenWalk).
template <int BlockM, int BlockN>
struct KeyTileRange {
    int begin = 0, end, whole_begin = 0, whole_end;

    __device__ KeyTileRange(const Mask& mask, int first_row) {
        const int last_row = min(first_row + BlockM, mask.seqlen_q) - 1;
        end = ceil_div(mask.keys_end(last_row), BlockN);
        whole_end = max(mask.keys_end(first_row) - kRangeMask, 0) / BlockN;
        if constexpr (kWindow) {
            begin = min(mask.first_key(first_row) / BlockN, end);
            whole_begin = ceil_div(mask.first_key(last_row), BlockN);
        }
    }

    __device__ bool none() const { return begin == end; }
    __device__ bool is_whole(int tile) const { return whole_begin <= tile && tile < whole_end; }
};

// The lengths of a tile's sequence are part of it, if they vary. Two or more warpgroups have no
// registers for them, or four under a causal mask or a window, where each tile of scores that is
// cut reads them again. Three or more, or those of as many blocks, have none for a tile, either, if
// keys have labels.
constexpr bool kSharesTiles = ((kPacked || kUsedKeys) && kTeams > (kRangeMask ? 3 : 1)) ||
                              (kKeyMask && (kTeams > 2 || kBlocksPerSm > 2));
using Work = WorkTiles<kTeams, kQueryStages, kSharesTiles>;

using KeyRange = KeyTileRange<kBlockM, kBlockN>;
using KeyPages = TilePages<kBlockN>;
using KeyBoxes = BoxPages<kBoxKeys, kBlockN>;
using Scores = WgmmaSums<kBlockN>;
using Kept = KeptScores<kBlockN / 2, false>;
using Weights = WgmmaOperand<kBlockN>;
using Bias = RowBiasOf<bias_t, kBlockN / 2>::type;
using BiasRows = BiasRowsOf<kWgmmaM, kBlockN>;

__device__ inline KeyRange key_tiles_of(const ForwardParams& call, const WorkTile& work) {
    KeyRange keys(work.sequence(call).mask(call.features), work.first_row);
    work.keep(keys.begin, keys.end);
    return keys;
}

// ---- which tiles of keys there are, if a mask or a mask_mod hides some ----

// What they show of each tile and, if kSeenBits, one bit per score; or if kKeyBits, as all rows are
// alike, of each tile of keys, and per key. In the workspace, the count of tiles taken comes first,
// then the parts, then the bits.
constexpr bool kSeenBits = SEEN_BITS, kKeyBits = KEY_BITS;
// Whether all rows see the same keys.
constexpr bool kRowsAlike = kKeyBits && !kRangeMask;
static_assert(kMaskBits == 0 || kSeenBits, "scores are hidden by a function or by those bits");
constexpr int kRowWords = kBlockN / kWordKeys;
// A call may have more than 2^31 in all.
constexpr long long kTileWords = (kKeyBits ? 1 : kBlockM) * kRowWords;
template <bool KeyBits>
struct SeenOf {
    using type = SeenTiles<kBlockM, kBlockN>;
};
template <>
struct SeenOf<true> {
    using type = SeenColumns<kBlockN>;
};
using Seen = SeenOf<kKeyBits>::type;
using SeenScores = SeenBits<kBlockN / 2, kKeyBits>;
__device__ inline unsigned int* tiles_taken(const ForwardParams& call) {
    return static_cast<unsigned int*>(call.workspace);
}
__device__ inline Seen::Part* seen_parts(const ForwardParams& call) {
    constexpr int kWords = kWorkspaceAlignment / sizeof(unsigned int);
    return reinterpret_cast<Seen::Part*>(tiles_taken(call) + kWords);
}
__device__ inline unsigned int* seen_bits(const ForwardParams& call) {
    constexpr int kParts = kWorkspaceAlignment / sizeof(Seen::Part);
    const long long parts = (Seen::count(call) + kParts - 1) / kParts * kParts;
    return reinterpret_cast<unsigned int*>(seen_parts(call) + parts);
}

using TileRing = LabelledRing<kStages>;

// The tiles of values, and their ring.
template <class Smem>
__device__ inline auto& value_tiles(Smem& smem) {
    if constexpr (kValuesInKeys) {
        return smem.k;
    } else {
        return smem.v;
    }
}
template <class Smem>
__device__ inline auto& value_ring(Smem& smem) {
    if constexpr (kValuesInKeys) {
        return smem.k_ring;
    } else {
        return smem.v_ring;
    }
}

// The columns of V in a tile of values.
template <class Tile>
__device__ inline auto& value_columns(Tile& tile) {
    if constexpr (kValuesInKeys && kKeyCols > kValueCols) {
        return tile.template panels_from<kValueCols>(0);
    } else {
        return tile;
    }
}

// The columns of V of which a warpgroup computes those of O.
template <class Tile>
__device__ inline auto& own_columns(Tile& v, int warpgroup) {
    if constexpr (kColumnWarpgroups == 1) {
        return v;
    } else {
        return v.template panels_from<kOwnCols>(warpgroup % kColumnWarpgroups * kOwnPanels);
    }
}

// Prepares the rings that all of these kernels have, with so many warps that read tiles of values
// and so many helpers that follow the tiles of queries. One thread does this.
template <class Smem>
__device__ inline void init_rings(Smem& smem, int value_readers, int helpers) {
    smem.k_ring.init(kConsumers * kWarps);
    smem.v_ring.init(value_readers);
    for (int w = 0; w < kTeams; ++w) smem.q_ring[w].init(kWarps + (w == 0 ? helpers : 0));
    smem.helpers.init();
}

__device__ inline void prefetch_maps(const Params& params) {
    const TensorMap* const maps[] = {&params.q, &params.k, &params.v, &params.o};
    for (const TensorMap* map : maps) ptx::prefetch_tensor_map(*map);
}

// Releases a stage for a warp: it has read the stage, or its part of a product has. The caller
// knows that all lanes are done, by a product that they waited for or a __syncwarp.
template <int Stages>
__device__ inline void release_and_advance(Ring<Stages>& ring, RingPosition<Stages>& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
    at.advance();
}

// Named barriers; __syncthreads has number 0.
enum NamedBarrier {
    kFirstTurn = 1,
    kFirstStore = kFirstTurn + kConsumers,
    kAllConsumers = kFirstStore + kConsumers
};

// The row of Q and O of a thread's half (0: row g, 1: row g + 8) of its fragments. The block's
// first threads have no rows.
__device__ inline int row_of(const WorkTile& work, int half) {
    unsigned int thread = threadIdx.x;
    ptx::hold(thread);  // or each sum would stay in a register from tile to tile
    if constexpr (kColumnWarpgroups > 1) {
        return work.first_row + thread % kWarpgroup / 32 * 16 + half * 8 + thread % 32 / 4;
    }
    return work.first_row + thread / 32 * 16 - kFirstConsumer * kWgmmaM + half * 8 +
           thread % 32 / 4;
}
