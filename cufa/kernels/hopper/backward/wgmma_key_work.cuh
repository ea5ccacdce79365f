// The work of a block of the Hopper backward: its tiles of keys, its part of the query heads that
// share them and of their rows, their order, and how its dQ is added to that of other blocks.
#pragma once

#include "call/schedule.cuh"
#include "call/tensor.cuh"
#include "gradients/key_sums.cuh"
#include "hopper/backward/hidden_keys.cuh"
#include "scores/key_mask.cuh"

constexpr int kConsumers = 2;  // warpgroups of a block that compute
// The blocks of a cluster, partners, share a tile of keys, and dQ by parts of the head dims.
static_assert(kClusterBlocks == 1 || kClusterBlocks == 2, "what blocks send goes to one partner");
// Warpgroups that add to a tile of dQ, each to a part of its own.
constexpr int kAdders = kClusterBlocks * kConsumers;
// How many heads blocks process together (plan/wgmma_backward.py): what the L2 cache holds, so many
// blocks, or heads within these bounds.
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
// Whether the block with the first keys that a tile of queries sees sets the sums, so that they
// need not be zero.
constexpr bool kFirstSets = kAdding != kAsTheyCome;
static_assert(!kHidesScores || kAdding == kAsTheyCome,
              "nobody would count those that leave out a tile");
// Whether tiles of keys that a mask hides are left out. In a window, it is not known which tile
// then sets the sums.
constexpr bool kLeavesOutHidden = kHidesKeys && (kAdding == kAsTheyCome || !kWindow);
// Whether blocks wait for other blocks.
constexpr bool kTurns = kAdding == kAfterFirst || kAdding == kInOrder;

// The number of the block in its cluster, and of its part of dQ's head dims.
__device__ inline int rank_in_cluster() {
    return kClusterBlocks > 1 ? blockIdx.x % kClusterBlocks : 0;
}

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
    // If a mask hides keys: which it shows.
    __device__ KeyMask key_mask(const BackwardParams& call) const {
        return {call.features, batch, kv_head()};
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
    // Packed sequences follow each other, each with the tiles of all its heads.
    __device__ static KeyWork at(unsigned int index, const BackwardParams& call) {
        const Sizes& sizes = call.sizes;
        if (index >= count(sizes)) return KeyWork::none();
        const int parts = parts_of_heads(sizes);
        if constexpr (kPacked && kAdding == kAlone) {
            return {Sequence(call, index / parts), static_cast<int>(index % parts), 0};
        } else if constexpr (kPacked) {
            const int* starts = call.features.cu_seqlens_k;
            const int batch =
                row_tile<BlockN>(index / parts, sizes.batch, sizes.seqlen_k, starts).batch;
            const int before = first_row_tile<BlockN>(batch, starts[batch], 0);
            const int end = first_row_tile<BlockN>(batch + 1, starts[batch + 1], 0);
            const int place = index - (before - starts[0] / BlockN) * parts;
            const Sequence sequence(call, batch);
            const Heads heads = {parts, end - before, sequence.seqlen_q};
            const auto [part, tile] = heads.at(place, sizes);
            return {sequence, part, tile * BlockN};
        }
        const Heads heads = {sizes.batch * parts, tiles_of_head(sizes), sizes.seqlen_q};
        const auto [head, tile] = heads.at(index, sizes);
        return {Sequence(call, head / parts), head % parts, tile * BlockN};
    }

    __device__ static KeyWork first(const BackwardParams& call) {
        return at(blockIdx.x / kClusterBlocks, call);
    }
    // The number of times that work can be taken.
    __device__ static unsigned int count(const Sizes& sizes) {
        const int heads = parts_of_heads(sizes);
        if constexpr (kPacked && kAdding != kAlone)
            return heads * row_tiles<BlockN>(sizes.batch, sizes.seqlen_k);
        return sizes.batch * heads * tiles_of_head(sizes);
    }

    // Advances to the next tile, if it was taken together with this one.
    __device__ static bool next(KeyWork& work, const BackwardParams& call) {
        if (kAdding != kAlone) return false;
        work.first_key += BlockN;
        return work.first_key < end_of_keys(call, work.sequence(call));
    }
    // Whether no query sees keys before these. In a window, QueryTileRange::first_of says it of
    // each tile of queries.
    __device__ static bool sets_sums(const KeyWork& work) {
        return kFirstSets && work.first_key == 0;
    }

  private:
    // How often keys of a head are taken.
    __device__ static int tiles_of_head(const Sizes& sizes) {
        return kAdding == kAlone ? 1 : ceil_div(sizes.seqlen_k, BlockN);
    }

    // Equally long heads, or parts of them: each with so many tiles of keys, and queries.
    struct Heads {
        int count, tiles, seqlen_q;

        // Heads come in sections. Within a section the first keys come first. Under a causal mask
        // most queries see them, and long work that starts late would leave the GPU waiting. And a
        // block that takes turns never waits for one that begins later, as blocks begin in the
        // order of their numbers (CUDA does not promise it, but all GPUs do so). A rest of less
        // than half a section joins the section before: it has too few heads for all SMs.
        __device__ HeadTile at(unsigned int index, const Sizes& sizes) const {
            // Parts of rows wait for each other's additions, so they belong together.
            const int least = of_section(sizes);
            const int size = kRowParts == 1 ? least : round_up(least, kRowParts);
            const int last = max((count + size / 2) / size, 1) - 1;

            const int section = min(static_cast<int>(index / (size * tiles)), last);
            const int first_head = section * size;
            const int in_section = section < last ? size : count - first_head;
            const int place = index - first_head * tiles;
            return {first_head + place % in_section, place / in_section};
        }

      private:
        // Blocks of equal length walk in step through the queries of a head, one head after the
        // other. Under a causal mask lengths differ, and blocks that add in order begin one after
        // the other: in both cases, a section of too few heads leaves SMs idle at its end. With too
        // many heads, the L2 cache does not hold what they work on.
        __device__ int of_section(const Sizes& sizes) const {
            const int enough = ceil_div(kSectionBlocks, max(1, tiles));
            if (kAdding == kInOrder && (kCausal || kWindow)) {
                return even(min(max(enough, kLeastOrderedHeads), kMostOrderedHeads));
            }
            if (kAdding == kInOrder) return even(enough);
            if (!kCausal) return 1;
            return sizes.heads > sizes.kv_heads ? even(enough) : cached();
        }
        // At most `most` heads, in sections of equal size.
        __device__ int even(int most) const { return ceil_div(count, ceil_div(count, most)); }
        // As many heads as the L2 cache holds queries and sums of, if none share keys.
        __device__ int cached() const {
            constexpr int kRowBytes = (kHeadDim + kValueDim) * static_cast<int>(sizeof(scalar_t)) +
                                      kHeadDim * static_cast<int>(sizeof(float));
            const int fitting = kSectionBytes / kRowBytes / max(1, seqlen_q);
            return min(max(fitting, 1), count);
        }
    };
};
