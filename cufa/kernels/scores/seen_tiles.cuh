// What a call's mask or mask_mod shows of each tile of scores: nothing, some or all. A launch of
// its own finds this out, once for all heads and sequences if it is the same for them. Kernels then
// skip tiles of which nothing is seen, and test single scores only where the mask cuts through a
// tile.
#pragma once

#include "call/key_tiles.cuh"
#include "scores/mask_tiles.cuh"

// Of which heads and sequences that may differ. If it does not, the first stands for all.
struct SeenHeads {
    template <class Params>
    __device__ static int heads(const Params& params) {
        return differ_by_head(params) ? params.sizes.heads : 1;
    }
    template <class Params>
    __device__ static int batches(const Params& params) {
        return differ_by_batch(params) ? params.sizes.batch : 1;
    }
    // The head and the sequence, of those, that stand for these.
    template <class Params>
    __device__ static int head_of(const Params& params, int head) {
        return differ_by_head(params) ? head : 0;
    }
    template <class Params>
    __device__ static int batch_of(const Params& params, int batch) {
        return differ_by_batch(params) ? batch : 0;
    }

  private:
    template <class Params>
    __device__ static bool differ_by_head(const Params& params) {
        return kMaskModOfHead || (kMaskBits != 0 && params.features.mask.head_stride != 0);
    }
    template <class Params>
    __device__ static bool differ_by_batch(const Params& params) {
        constexpr bool kDiffer = kMaskModOfBatch || kPacked || kUsedKeys;
        return kDiffer || (kMaskBits != 0 && params.features.mask.batch_stride != 0);
    }
};

// For one head, in tiles of Rows queries and Keys keys.
template <int Rows, int Keys>
class SeenTiles : SeenHeads {
  public:
    using Part = SeenPart;

    // `all` points to the parts of all heads.
    template <class Params>
    __device__ SeenTiles(SeenPart* all, const Params& params, const Sequence& sequence, int head)
        : keys(key_tiles(params)) {
        const int batch = batch_of(params, sequence.batch);
        const int seqlen_q = params.sizes.seqlen_q;
        const int first_tile = first_row_tile<Rows>(batch, sequence.first_q, seqlen_q);
        const long long of_head = head_of(params, head);
        parts = all + (of_head * row_tiles<Rows>(batches(params), seqlen_q) + first_tile) * keys;
    }

    // The number of tiles of all heads.
    template <class Params>
    __device__ static long long count(const Params& params) {
        if constexpr (!kKeyMask) return 0;
        const long long tiles = row_tiles<Rows>(batches(params), params.sizes.seqlen_q);
        return heads(params) * tiles * key_tiles(params);
    }

    // Whether the scores of this tile must be tested one by one.
    __device__ bool cuts(int row, int key) const { return kKeyMask && part(row, key) != kAll; }

    // Whether some of the tile is seen.
    __device__ bool shows_any(int row, int key) const { return part(row, key) != kNone; }

    // The first key of the first tile from `key` on of which a tile of rows sees some, or `end`.
    __device__ int next_key(int row, int key, int end) const {
        return next<Keys>(key, end, [&](int at) { return part(row, at); });
    }
    // The same with rows and keys exchanged.
    __device__ int next_row(int row, int end, int key) const {
        return next<Rows>(row, end, [&](int at) { return part(at, key); });
    }

    // The same as next_key, for a single thread.
    __device__ int next_key_alone(int row, int key, int end) const {
        return next_alone<Keys>(key, end, [&](int at) { return part(row, at); });
    }

    // The first key of the last tile, from `key` down to `begin`, of which a tile of rows sees
    // some; less than `begin` if there is none. For a single thread, which reads words of parts:
    // registers for several addresses would be more than a producer has.
    __device__ int last_key(int row, int key, int begin) const {
        using Word = unsigned long long;
        constexpr int kParts = sizeof(Word) / sizeof(SeenPart), kPartBits = 64 / kParts;
        static_assert(kNone == 0, "what is not 0 is seen");
        while (key >= begin) {
            const auto address = reinterpret_cast<Word>(&part(row, key));
            const int place = address / sizeof(SeenPart) % kParts;
            const Word word = *reinterpret_cast<const Word*>(address - place * sizeof(SeenPart));
            const Word up_to_key = word << (kParts - 1 - place) * kPartBits;
            if (up_to_key != 0) return key - __clzll(up_to_key) / kPartBits * Keys;
            key -= (place + 1) * Keys;
        }
        return begin - Keys;
    }
    // The last tile of rows, likewise, that sees some of a tile of keys.
    __device__ int last_row(int row, int begin, int key) const {
        return last<Rows>(row, begin, [&](int at) { return part(at, key); });
    }

    // Finds out about one tile of all heads, by one warp.
    template <class Params>
    __device__ static void find(SeenPart* all, const Params& params, long long index) {
        find(all, params, index, [](const ScoreRules& rules, int row, int key, long long) {
            SeenPart part = kAll;
            if constexpr (kMaskMod) part = part_of_function<Rows, Keys>(rules, row, key);
            if constexpr (kMaskBits != 0) {
                const SeenPart of_mask = part_of_mask<Rows, Keys>(rules, row, key);
                if (of_mask < part) part = of_mask;
            }
            return part;
        });
    }
    // With part_of(rules, row, key, number of the tile among all heads).
    template <class Params, class PartOf>
    __device__ static void find(SeenPart* all, const Params& params, long long index,
                                const PartOf& part_of) {
        const Sizes& sizes = params.sizes;
        const int keys = key_tiles(params);
        const int tiles = row_tiles<Rows>(batches(params), sizes.seqlen_q);
        const int first_key = index % keys * Keys, head = index / keys / tiles;
        const auto [batch, first_row] = row_tile<Rows>(
            index / keys % tiles, batches(params), sizes.seqlen_q, params.features.cu_seqlens_q);
        const Sequence sequence(params, batch);
        if (first_row >= sequence.seqlen_q) return;
        const ScoreRules rules(params, sequence, head);
        const KeyTiles<Keys> range(rules.mask, first_row, Rows);
        if (first_key < range.begin || first_key >= range.end) return;  // nobody asks

        const SeenTiles of_head(all, params, sequence, head);
        const long long number = of_head.number(all, first_row, first_key);
        const SeenPart part = part_of(rules, first_row, first_key, number);
        if (threadIdx.x % 32 == 0) all[number] = part;
    }

    // The number, among the tiles of all heads, of the tile with this row and key.
    __device__ long long number(const SeenPart* all, int row, int key) const {
        return &part(row, key) - all;
    }

  private:
    SeenPart* parts;
    int keys;

    // Of a row of tiles.
    template <class Params>
    __device__ static int key_tiles(const Params& params) {
        return ceil_div(params.sizes.most_keys, Keys);
    }

    __device__ SeenPart& part(int row, int key) const {
        return parts[static_cast<long long>(row / Rows) * keys + key / Keys];
    }

    // The lanes of a warp test 32 tiles at once.
    template <int Size, class PartAt>
    __device__ static int next(int first, int end, const PartAt& part_at) {
        for (; first < end; first += 32 * Size) {
            const int at = first + threadIdx.x % 32 * Size;
            const unsigned int seen = __ballot_sync(0xffffffffu, at < end && part_at(at) != kNone);
            if (seen != 0) return first + (__ffs(seen) - 1) * Size;
        }
        return end;
    }

    // Tiles that a thread loads at once, since a single load would take as long.
    static constexpr int kAtOnce = 8;

    template <int Size, class PartAt>
    __device__ static int next_alone(int at, int end, const PartAt& part_at) {
        for (; at < end; at += kAtOnce * Size) {
            unsigned int seen = 0;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                seen |= (part_at(min(at + i * Size, end - 1)) != kNone) << i;
            if (seen != 0) return at + (__ffs(seen) - 1) * Size;
        }
        return end;
    }
    template <int Size, class PartAt>
    __device__ static int last(int at, int begin, const PartAt& part_at) {
        for (; at >= begin; at -= kAtOnce * Size) {
            unsigned int seen = 0;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                seen |= (part_at(max(at - i * Size, begin)) != kNone) << i;
            if (seen != 0) return at - (__ffs(seen) - 1) * Size;
        }
        return begin - Size;
    }
};
