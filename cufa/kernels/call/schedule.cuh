// Which tile of queries a block processes next, where only as many blocks as run at once are
// launched and each takes tile after tile.
#pragma once

#include "call/memory.cuh"
#include "call/sequence_line.cuh"
#include "call/tensor.cuh"
#include "scores/mask.cuh"

// What only some calls must look up: where a sequence begins, and its length.
struct VariedLengths {
    int first_q, first_k, seqlen_q, seqlen_k;

    VariedLengths() = default;
    __device__ explicit VariedLengths(const Sequence& sequence)
        : first_q(sequence.first_q),
          first_k(sequence.first_k),
          seqlen_q(sequence.seqlen_q),
          seqlen_k(sequence.seqlen_k) {}
    template <class Params>
    __device__ Sequence sequence(const Params& call, int batch) const {
        Sequence sequence(batch, first_q, first_k, seqlen_q, seqlen_k);
        if constexpr (kPaged) sequence.pages = pages_of_sequence(call, batch);
        return sequence;
    }
};
struct EqualLengths {
    EqualLengths() = default;
    __device__ explicit EqualLengths(const Sequence&) {}
    template <class Params>
    __device__ Sequence sequence(const Params& call, int batch) const {
        return Sequence(call, batch);
    }
};
template <bool Varied>
struct LengthsOf {
    using type = EqualLengths;
};
template <>
struct LengthsOf<true> {
    using type = VariedLengths;
};
using Lengths = LengthsOf<kPacked || kUsedKeys>::type;

// Of the numbers from begin to before end, keeps only part number `part` of `parts`.
__device__ inline void keep_part(int& begin, int& end, int part, int parts) {
    const int first = begin, count = max(end - begin, 0);
    begin = first + count * part / parts;
    end = first + count * (part + 1) / parts;
}

// Which keys of a tile of queries a block has. `keep` narrows a range of tiles of keys to them.
// `is_part` says whether they are not all. `result()` is the number of their result in the
// workspace.
struct AllKeys {
    static constexpr int first_part = 0, part = 0, parts = 1;

    __device__ void keep(int&, int&) const {}
    __device__ bool is_part() const { return false; }
    __device__ int result() const { return 0; }
};
// Part number `part` of `parts`. The tile's first part has number `first_part` among the parts of
// all tiles.
struct PartOfKeys {
    int first_part = 0;
    short part = 0, parts = 1;

    __device__ void keep(int& begin, int& end) const { keep_part(begin, end, part, parts); }
    __device__ bool is_part() const { return parts > 1; }
    __device__ int result() const { return first_part + part; }
};
// What is in a block's share: tiles of keys [first_tile, end_tile). Tiles of queries may see fewer.
struct ShareOfKeys : AllKeys {
    static constexpr int kIsAll = -1;
    int first_tile = 0, end_tile = 0, number = kIsAll;

    __device__ void keep(int& begin, int& end) const {
        end = min(end, end_tile);
        begin = min(max(begin, first_tile), end);
    }
    __device__ bool is_part() const { return number != kIsAll; }
    __device__ int result() const { return number; }
};
template <bool Parted, bool Shared>
struct KeysOf {
    using type = AllKeys;
};
template <>
struct KeysOf<true, false> {
    using type = PartOfKeys;
};
template <>
struct KeysOf<true, true> {
    using type = ShareOfKeys;
};

// A tile of queries of one head, found by one thread and read by others. Batch -1 means that none
// is left.
struct WorkTile : Lengths, KeysOf<kPartsKeys, kSharesKeys>::type {
    int batch, head, kv_head, first_row;

    WorkTile() = default;
    __device__ WorkTile(const Sequence& sequence, int head, int kv_head, int first_row)
        : Lengths(sequence),
          batch(sequence.batch),
          head(head),
          kv_head(kv_head),
          first_row(first_row) {}

    __device__ bool exists() const { return batch >= 0; }
    __device__ Sequence sequence(const ForwardParams& call) const {
        Sequence sequence = Lengths::sequence(call, batch);
        if constexpr (kEndsByHead) {
            const int later = call.sizes.heads - 1 - head;
            sequence.seqlen_k = max(sequence.seqlen_k - later, 0);
        }
        return sequence;
    }
    __device__ static WorkTile none() { return {Sequence(-1, 0, 0, 0, 0), 0, 0, 0}; }
};

// The order in which tiles are taken. Heads come in sections: enough heads for a round of all
// blocks, but no more than have their keys and values in the L2 cache at once. Under a causal mask
// the last queries of a section's heads come first. They see most keys, and long work that starts
// late would leave the GPU waiting. They are also the ones that read keys and values from memory,
// so larger sections would keep memory busy at first and idle later. A rest of heads, as of 12 if a
// section has 8, joins the last section: on their own they would start long work late.
//
// Where keys are split, the parts of a tile follow each other in its place. But if kPartsListed, a
// head's parts take the place of its tiles, in an order that the host chooses. If all rows see the
// same keys, and the host knows how many, only the last tiles are split.
template <int BlockM, int SectionBytes>
struct TileOrder {
    const ForwardParams& call;
    unsigned int tiles;    // of one head; of packed sequences, of all of them
    unsigned int heads;    // of all batches; of packed sequences, of one of them
    unsigned int of_head;  // tiles, or parts of tiles, to hand out
    unsigned int section_heads;
    unsigned int sections;

    __device__ explicit TileOrder(const ForwardParams& call) : call(call) {
        const Sizes& sizes = call.sizes;
        tiles = kCounted ? SequenceLine(sizes.batch, TilesOf{call}).count()
                         : row_tiles<BlockM>(kPacked ? sizes.batch : 1, sizes.seqlen_q);
        heads = kPacked ? sizes.heads : sizes.batch * sizes.heads;
        of_head = kPartsListed ? call.parting.count / max(heads, 1u) : tiles;
        section_heads = group();
        sections = heads / section_heads;
        if (!kRangeMask) return;
        constexpr int kRowBytes = (kHeadDim + kValueDim) * int(sizeof(scalar_t));
        const unsigned int cached = SectionBytes / kRowBytes / max(1, sizes.seqlen_k) * group();
        while (2 * section_heads <= cached &&
               (section_heads < kLeastHeads || section_heads * of_head < gridDim.x)) {
            section_heads *= 2;
        }
        sections = max(heads / section_heads, 1u);
    }

    // The number of times that work can be handed out.
    __device__ unsigned int count() const {
        return kPartsKeys ? call.parting.count : heads * tiles;
    }

    __device__ WorkTile at(unsigned int index) const {
        if (index >= count()) return WorkTile::none();
        if constexpr (kPartsKeys && !kSharesKeys && !kPartsListed) {
            const unsigned int whole = call.parting.whole, parts = call.parting.parts;
            if (index >= whole) {
                const unsigned int number = index - whole;
                WorkTile work = in_order(whole + number / parts);
                set_part(work, number - number % parts, number % parts, parts);
                return work;
            }
        }
        return in_order(index);
    }

  private:
    // Blocks should not have to skip tiles of the many sequences that another launch processes.
    static constexpr bool kCounted = kLeastQueries > 0;
    struct TilesOf {
        const ForwardParams& call;

        __device__ int operator()(int batch) const {
            const Sequence sequence(call, batch);
            return sequence.is_ours() ? ceil_div(sequence.seqlen_q, BlockM) : 0;
        }
    };

    // With long heads, a round of tiles has few heads; then the last section would begin with few
    // long tiles.
    static constexpr unsigned int kLeastHeads = 8;

    // Query heads that share keys and values.
    __device__ unsigned int group() const {
        return unsigned(call.sizes.heads) / unsigned(call.sizes.kv_heads);
    }

    __device__ WorkTile in_order(unsigned int index) const {
        unsigned int section = index / (section_heads * of_head);
        if (kRangeMask) section = min(section, sections - 1);  // others leave no rest
        const unsigned int first_head = section * section_heads;
        const bool has_rest = kRangeMask && section == sections - 1;
        const unsigned int in_section = has_rest ? heads - first_head : section_heads;
        const unsigned int place = index - first_head * of_head;
        const unsigned int head = first_head + place % in_section;
        const unsigned int number = place / in_section;
        if constexpr (kPartsListed) return part_of_head(call.parting, head, number);
        // Under a mask, too, the last queries usually see most keys.
        constexpr bool kLastFirst = kRangeMask || kKeyMask;
        return tile_of_head(head, kLastFirst ? tiles - 1 - number : number);
    }

    __device__ WorkTile tile_of_head(unsigned int head, int tile) const {
        if constexpr (kCounted) {
            const auto [batch, number] = SequenceLine(call.sizes.batch, TilesOf{call}).at(tile);
            return {Sequence(call, batch), int(head), int(head / group()), number * BlockM};
        } else if constexpr (kPacked) {
            const auto [batch, first_row] = row_tile<BlockM>(
                tile, call.sizes.batch, call.sizes.seqlen_q, call.features.cu_seqlens_q);
            return {Sequence(call, batch), int(head), int(head / group()), first_row};
        }
        const unsigned int batch = head / call.sizes.heads, in_batch = head % call.sizes.heads;
        return {Sequence(call, batch), int(in_batch), int(in_batch / group()), tile * BlockM};
    }

    // A template, because there may be no list.
    template <class Parting>
    __device__ WorkTile part_of_head(const Parting& parting, unsigned int head, int number) const {
        const PartPlace place = parting.places[number];
        WorkTile work = tile_of_head(head, place.tile);
        set_part(work, head * of_head + place.first, place.part, place.parts);
        return work;
    }
    // A template, because tiles may have no parts.
    template <class Work>
    __device__ static void set_part(Work& work, int first_part, int part, int parts) {
        work.first_part = first_part;
        work.part = part;
        work.parts = parts;
    }
};

// Hands out the indices of tiles, by counting the tiles taken.
struct TileCounter {
    unsigned int* taken;
    unsigned int tiles;

    // For blocks that have their own number for the first tile. It is called exactly once per tile;
    // the last call resets the count to 0 for the next launch.
    __device__ int after_own() const { return gridDim.x + atomicInc(taken, tiles - 1); }
    // For blocks that take even their first tile by the count. Each block calls it once too often
    // at the end; the last call resets the count.
    __device__ int of_all() const { return atomicInc(taken, tiles + gridDim.x - 1); }
    // For such blocks, any number of times, if another launch resets the count.
    __device__ int of_all_unlimited() const { return atomicAdd(taken, 1u); }
};
