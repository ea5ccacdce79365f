// The work of a block of the Hopper backward: its tiles of keys, its part of the query heads that
// share them and of their rows, their order, the tiles of queries that see the keys, and how its dQ
// is added to that of other blocks.
#pragma once

#include "call/schedule.cuh"
#include "call/tensor.cuh"
#include "gradients/key_sums.cuh"
#include "hopper/backward/key_statistics.cuh"
#include "hopper/wgmma_products.cuh"
#include "scores/mask.cuh"

constexpr int kConsumers = 2;  // warpgroups of a block that compute
// The number of heads that blocks process together (plan/wgmma_backward.py).
constexpr int kSectionBytes = SECTION_BYTES, kSectionBlocks = SECTION_BLOCKS;
constexpr int kLeastOrderedHeads = LEAST_ORDERED_HEADS, kMostOrderedHeads = MOST_ORDERED_HEADS;

// How dQ is summed. A block that processes all keys of a head adds alone. Other blocks add as they
// come, to sums that start at zero; or after the block with the first keys; or all in the order of
// their keys.
enum Adding { kAlone, kAsTheyCome, kAfterFirst, kInOrder };
constexpr Adding kAdding = ADDING;
// Whether the last block to add rounds the sums, so that no other launch has to.
constexpr bool kRounds = ROUNDS;
static_assert(!kRounds || kAdding == kAlone || kAdding == kInOrder,
              "nobody would know that it is the last");
// Whether the first block sets the sums, so that they need not be zero: this requires that all
// queries that see any key see the first.
constexpr bool kFirstSets = kAdding != kAsTheyCome && !kWindow && !kKeyMask;
static_assert(kFirstSets || kAdding != kAfterFirst, "the sums are nobody's to set");
static_assert(!kKeyMask || kAdding == kAsTheyCome,
              "nobody would count those that leave out a tile");
// Whether blocks wait for other blocks.
constexpr bool kTurns = kAdding == kAfterFirst || kAdding == kInOrder;

// Some of the query heads that share keys.
struct HeadRange {
    int begin, end;
};

// A tile of keys, and the part of the queries for which a block processes it. Batch -1 means that
// none is left.
struct KeyWork : Lengths {
    int batch, part, first_key;

    KeyWork() = default;
    __device__ KeyWork(const Sequence& sequence, int part, int first_key)
        : Lengths(sequence), batch(sequence.batch), part(part), first_key(first_key) {}

    __device__ bool exists() const { return batch >= 0; }
    __device__ static KeyWork none() { return {Sequence(-1, 0, 0, 0, 0), 0, 0}; }

    __device__ int kv_head() const { return part / kParts; }
    __device__ HeadRange heads(const Sizes& sizes) const {
        const int heads = heads_of_part(sizes), of_heads = part / kRowParts;
        return {of_heads * heads, (of_heads + 1) * heads};
    }
    __device__ Sequence sequence(const BackwardParams& call) const {
        return Lengths::sequence(call, batch);
    }
    __device__ Mask mask(const BackwardParams& call) const {
        return sequence(call).mask(call.features);
    }
    // Packed sequences have more tiles to take than tiles with keys.
    __device__ bool has_keys(const BackwardParams& call) const {
        return !kPacked || first_key < end_of_keys(call, sequence(call));
    }
    // The tile's batch for TMA: packed sequences are one batch.
    __device__ int map_batch() const { return kPacked ? 0 : batch; }
};

// The tiles of keys that a block takes at a time: one or, if it adds alone, all of one head.
template <int BlockN>
struct KeyOrder {
    // Heads, or parts of them, come in sections. Within a section the first keys come first. Under
    // a causal mask most queries see them, and long work that starts late would leave the GPU
    // waiting. And a block that takes turns never waits for one that begins later. A rest of less
    // than half a section joins the section before: it has too few heads for all SMs.
    __device__ static KeyWork at(unsigned int index, const BackwardParams& call) {
        const Sizes& sizes = call.sizes;
        if (index >= count(sizes)) return KeyWork::none();
        const int tiles = tiles_of_head(sizes), heads = all_heads(sizes);
        // Parts of rows wait for each other's additions, so they belong together.
        const int least = section_heads(sizes);
        const int of_section = kRowParts == 1 ? least : round_up(least, kRowParts);
        const int last = max((heads + of_section / 2) / of_section, 1) - 1;

        const int section = min(static_cast<int>(index / (of_section * tiles)), last);
        const int first_head = section * of_section;
        const int in_section = section < last ? of_section : heads - first_head;
        const int place = index - first_head * tiles;
        const int head = first_head + place % in_section, tile = place / in_section;
        if constexpr (kPacked) {
            const auto [batch, first_key] =
                row_tile<BlockN>(tile, sizes.batch, sizes.seqlen_k, call.features.cu_seqlens_k);
            return {Sequence(call, batch), head, first_key};
        }
        const int parts = parts_of_heads(sizes);
        return {Sequence(call, head / parts), head % parts, tile * BlockN};
    }

    __device__ static KeyWork first(const BackwardParams& call) { return at(blockIdx.x, call); }
    // The number of times that work can be taken.
    __device__ static unsigned int count(const Sizes& sizes) {
        return all_heads(sizes) * tiles_of_head(sizes);
    }

    // Advances to the next tile, if it was taken together with this one.
    __device__ static bool next(KeyWork& work, const Sizes& sizes) {
        return kAdding == kAlone && (work.first_key += BlockN) < sizes.seqlen_k;
    }
    __device__ static bool sets_sums(const KeyWork& work) {
        return kFirstSets && work.first_key == 0;
    }

  private:
    // Of how many heads, or parts of them, keys are taken, and how often those of each. Packed
    // sequences are in a line, as if they were one.
    __device__ static int all_heads(const Sizes& sizes) {
        return (kPacked ? 1 : sizes.batch) * parts_of_heads(sizes);
    }
    __device__ static int tiles_of_head(const Sizes& sizes) {
        return kAdding == kAlone ? 1 : row_tiles<BlockN>(kPacked ? sizes.batch : 1, sizes.seqlen_k);
    }
    // Blocks of equal length walk in step through the queries of a head, one head after the other.
    // Under a causal mask lengths differ, and blocks that add in order begin one after the other:
    // in both cases, a section of too few heads leaves SMs idle at its end. With too many heads,
    // the L2 cache does not hold what they work on.
    __device__ static int section_heads(const Sizes& sizes) {
        const int enough = ceil_div(kSectionBlocks, max(1, tiles_of_head(sizes)));
        if (kAdding == kInOrder && kCausal) {
            return even(sizes, min(max(enough, kLeastOrderedHeads), kMostOrderedHeads));
        }
        if (kAdding == kInOrder) return even(sizes, enough);
        if (!kCausal) return 1;
        return sizes.heads > sizes.kv_heads ? even(sizes, enough) : cached_heads(sizes);
    }
    // At most `most` heads, in sections of equal size.
    __device__ static int even(const Sizes& sizes, int most) {
        const int heads = all_heads(sizes);
        return ceil_div(heads, ceil_div(heads, most));
    }
    // As many heads as the L2 cache holds queries and sums of.
    __device__ static int cached_heads(const Sizes& sizes) {
        constexpr int kRowBytes = (kHeadDim + kValueDim) * static_cast<int>(sizeof(scalar_t)) +
                                  kHeadDim * static_cast<int>(sizeof(float));
        const int head_rows = max(1, heads_of_part(sizes) * sizes.seqlen_q);
        const int fitting = kSectionBytes / kRowBytes / head_rows;
        return min(max(fitting, 1), all_heads(sizes));
    }
};

// The tiles of queries of one head, by number, that see a tile of keys. From whole_begin to
// whole_end all rows see all keys. Up to last_end no row sees a key of a later tile.
template <int BlockM, int BlockN>
struct QueryTileRange {
    int begin, whole_begin, whole_end, end, last_end;

    __device__ QueryTileRange(const Mask& mask, int first_key) {
        const int last_key = min(first_key + BlockN, mask.seqlen_k) - 1;
        const bool whole = first_key + BlockN <= mask.seqlen_k;
        begin = mask.first_row(first_key) / BlockM;
        end = ceil_div(mask.rows_end(last_key), BlockM);
        if (kUsedKeys && last_key < first_key) end = begin;  // none of the keys counts
        whole_begin = whole ? ceil_div(mask.first_row(last_key), BlockM) : end;
        whole_end = kRowsEnd ? mask.rows_end(first_key) / BlockM : end;
        const int next_key = first_key + BlockN;
        last_end = next_key < mask.seqlen_k ? mask.first_row(next_key) / BlockM : end;
    }

    // Those of a block's work: one of kRowParts parts of them.
    __device__ QueryTileRange(const BackwardParams& call, const KeyWork& work)
        : QueryTileRange(work.mask(call), work.first_key) {
        if constexpr (kRowParts > 1) keep_part(begin, end, work.part % kRowParts, kRowParts);
    }

    __device__ bool masked(int tile) const {
        return tile < whole_begin || (kRowsEnd && tile >= whole_end);
    }
    __device__ bool any_masked() const {
        return kKeyMask || begin < whole_begin || (kRowsEnd && whole_end < end);
    }
    // Whether no later tile of keys adds to this tile's dQ.
    __device__ bool last_of(int tile) const { return tile < last_end; }
};

// A warp's walk over the tiles of queries of a part of the heads. The last tiles of all heads come
// first: then blocks that begin together work on the same queries, which are in the L2 cache, and
// add to their sums in the same order, whatever the mask.
template <class Tiles>
struct QueryWalk {
    const Tiles& tiles;
    int heads, head, heads_end, tile;

    __device__ QueryWalk(const Tiles& tiles, const Sizes& sizes, int part)
        : tiles(tiles),
          heads(heads_of_part(sizes)),
          head(heads * (part / kRowParts)),
          heads_end(head + heads),
          tile(tiles.end - 1) {}

    __device__ bool at_end() const { return tile < tiles.begin; }
    __device__ bool masked() const { return tiles.masked(tile); }
    __device__ void advance() {
        if (++head < heads_end) return;
        head -= heads;
        --tile;
    }
};
