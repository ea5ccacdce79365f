// What a mask that is the same for all rows shows of tiles of keys: two bits of each tile, and one
// of each key. A launch of its own finds this out, as for seen_tiles.cuh.
#pragma once

#include "hopper/forward/seen_bits.cuh"
#include "scores/seen_tiles.cuh"

// For one head, in tiles of Keys keys.
template <int Keys>
class SeenColumns : SeenHeads {
  public:
    // Words with a bit for each of kTiles tiles. They come in twos: of which tiles some key is
    // seen, and of which all are.
    using Part = unsigned int;

    // `all` points to the parts of all heads.
    template <class Params>
    __device__ SeenColumns(const Part* all, const Params& params, const Sequence& sequence,
                           int head) {
        const int batch = batch_of(params, sequence.batch);
        const long long matrix = head_of(params, head) * batches(params) + batch;
        parts = all + matrix * words(params);
        before = matrix * tiles(params);
    }

    // The number of parts of all heads.
    template <class Params>
    __device__ static long long count(const Params& params) {
        return matrices(params) * words(params);
    }

    // Whether the scores of this tile must be tested one by one.
    __device__ bool cuts(int, int key) const {
        const int tile = key / Keys;
        return !(parts[tile / kTiles * 2 + 1] >> tile % kTiles & 1);
    }

    // The first key of the last tile, from `key` down to `begin`, of which some is seen; less than
    // `begin` if there is none.
    __device__ int last_key(int, int key, int begin) const {
        for (; key >= begin; key = (key / Keys / kTiles * kTiles - 1) * Keys) {
            const int tile = key / Keys;
            const Part seen = parts[tile / kTiles * 2] << (kTiles - 1 - tile % kTiles);
            if (seen != 0) return (tile - __clz(static_cast<int>(seen))) * Keys;
        }
        return begin - Keys;
    }

    // The number, among the tiles of all heads, of the tile with this key.
    __device__ long long number(const Part*, int, int key) const { return before + key / Keys; }

    // Finds out about a few tiles, by one warp. The bits of keys are as RowBits has them.
    template <class Params>
    __device__ static void find(Part* all, unsigned int* bits, const Params& params,
                                long long index) {
        constexpr int kWords = Keys / kWordKeys;
        const int groups = words(params) / 2 * kGroups, count = tiles(params);
        if (index >= matrices(params) * groups) return;
        const long long matrix = index / groups;
        const Sequence sequence(params, matrix % batches(params));
        if (sequence.seqlen_q == 0 || sequence.seqlen_k == 0) return;  // nobody asks
        const ScoreRules rules(params, sequence, matrix / batches(params));
        const int first = index % groups * kOfGroup, lane = threadIdx.x % 32;

        bool shown[kOfGroup][kWords];  // all loads are on their way at once
        const auto key_of = [&](int i, int word) {
            return (first + i) * Keys + word * kWordKeys + lane;
        };
#pragma unroll
        for (int i = 0; i < kOfGroup; ++i)
#pragma unroll
            for (int word = 0; word < kWords; ++word)
                shown[i][word] = rules.template shows<false>(0, key_of(i, word));
        unsigned int some = 0, whole = 0;
#pragma unroll
        for (int i = 0; i < kOfGroup; ++i) {
            RowBits<kWords> keys;
            FoundKeys found;
#pragma unroll
            for (int word = 0; word < kWords; ++word) {
                const bool seen = shown[i][word] && key_of(i, word) < sequence.seqlen_k;
                keys.of[word] = __ballot_sync(0xffffffffu, seen);
                found.add(keys.of[word] != 0, keys.of[word] == ~0u);
            }
            some |= found.some << i;
            whole |= found.all << i;
            const int tile = first + i;
            if (lane == 0 && tile < count) keys.store(bits + (matrix * count + tile) * kWords);
        }
        if (lane != 0) return;
        Part* const of_group = all + matrix * words(params) + first / kTiles * 2;
        const auto write = [&](Part* word, unsigned int of_tiles) {
            reinterpret_cast<unsigned short*>(word)[first % kTiles / kOfGroup] = of_tiles;
        };
        write(of_group, some);
        write(of_group + 1, whole);
    }

  private:
    static constexpr int kTiles = 32, kOfGroup = 16, kGroups = kTiles / kOfGroup;
    const Part* parts;
    long long before;  // the tiles of all heads before this one

    // The number of heads and sequences that may differ.
    template <class Params>
    __device__ static long long matrices(const Params& params) {
        return static_cast<long long>(heads(params)) * batches(params);
    }
    // Of each of them.
    template <class Params>
    __device__ static int tiles(const Params& params) {
        return ceil_div(params.sizes.most_keys, Keys);
    }
    template <class Params>
    __device__ static int words(const Params& params) {
        return ceil_div(tiles(params), kTiles) * 2;
    }
};
