// What a mask that is the same for all rows shows of tiles of keys: two bits of each tile, and one
// of each key. It is found out before the tiles are processed, as for seen_tiles.cuh.
#pragma once

#include "scores/row_bits.cuh"
#include "scores/seen_tiles.cuh"

// For one head, in tiles of Keys keys.
template <int Keys>
class SeenColumns : SeenHeads {
  public:
    // Words with a bit for each of kTiles tiles. They come in twos: of which tiles some key is
    // seen, and of which all are.
    using Part = unsigned int;
    // Of the keys of a tile, a bit for each.
    static constexpr int kWords = Keys / kWordKeys;
    using Bits = RowBits<kWords>;
    static constexpr int kOfGroup = 16;  // tiles that a warp finds out about

    // `all` points to the parts of all heads.
    template <class Params>
    __device__ SeenColumns(const Part* all, const Params& params, const Sequence& sequence,
                           int head) {
        const int batch = batch_of(params, sequence.batch);
        const long long matrix = head_of(params, head) * batches(params) + batch;
        parts = all + matrix * words(params);
        tiles_before = matrix * tiles(params);
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

    // Whether some of the tile is seen.
    __device__ bool shows_any(int, int key) const {
        const int tile = key / Keys;
        return parts[tile / kTiles * 2] >> tile % kTiles & 1;
    }

    // How many tiles before the one with this key are seen in part or whole, or are the first.
    __device__ int before(int key) const {
        const int tile = key / Keys;
        int count = tile > 0 && !(parts[0] & 1);
        for (int first = 0; first < tile; first += kTiles) {
            const Part beyond = tile - first < kTiles ? ~0u << (tile - first) : 0;
            count += __popc(parts[first / kTiles * 2] & ~beyond);
        }
        return count;
    }

    // The first key of the first tile from `key` on of which some is seen, or `end` or more.
    __device__ int next_key(int, int key, int end) const {
        for (; key < end; key = (key / Keys / kTiles + 1) * kTiles * Keys) {
            const int tile = key / Keys;
            const Part seen = parts[tile / kTiles * 2] >> tile % kTiles;
            if (seen != 0) return (tile + __ffs(static_cast<int>(seen)) - 1) * Keys;
        }
        return end;
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
    __device__ long long number(const Part*, int, int key) const {
        return tiles_before + key / Keys;
    }

    // The number of tiles of all heads.
    template <class Params>
    __device__ static long long all_tiles(const Params& params) {
        return matrices(params) * tiles(params);
    }

    // The number of warps that find out about all tiles.
    template <class Params>
    __device__ static long long warps(const Params& params) {
        return matrices(params) * (words(params) / 2 * kGroups);
    }

    // Finds out about a few tiles, by one warp, which loads AtOnce of them together. One lane calls
    // store(number, bits) with the number of a tile among those of all heads and the Bits of its
    // keys.
    template <int AtOnce, class Params, class Store>
    __device__ static void find(Part* all, const Params& params, long long index,
                                const Store& store) {
        const int groups = words(params) / 2 * kGroups, count = tiles(params);
        if (index >= warps(params)) return;
        const long long matrix = index / groups;
        const Sequence sequence(params, matrix % batches(params));
        if (sequence.seqlen_q == 0 || sequence.seqlen_k == 0) return;  // nobody asks
        const KeyMask mask(params.features, sequence.batch, matrix / batches(params));
        const int last_key = sequence.seqlen_k - 1;
        const int first = index % groups * kOfGroup, lane = threadIdx.x % 32;

        unsigned int some = 0, whole = 0;
#pragma unroll 1
        for (int done = 0; done < kOfGroup; done += AtOnce) {
            bool shown[AtOnce][kWords];
            const auto key_of = [&](int i, int word) {
                return (first + done + i) * Keys + word * 32 + lane;
            };
#pragma unroll
            for (int i = 0; i < AtOnce; ++i)
#pragma unroll
                for (int word = 0; word < kWords; ++word)
                    shown[i][word] = mask.shows(0, min(key_of(i, word), last_key));
#pragma unroll
            for (int i = 0; i < AtOnce; ++i) {
                Bits keys;
                FoundKeys found;
#pragma unroll
                for (int word = 0; word < kWords; ++word) {
                    const bool seen = shown[i][word] && key_of(i, word) <= last_key;
                    keys.of[word] = __ballot_sync(0xffffffffu, seen);
                    found.add(keys.of[word] != 0, keys.of[word] == ~0u);
                }
                some |= found.some << (done + i);
                whole |= found.all << (done + i);
                const int tile = first + done + i;
                if (lane == 0 && tile < count) store(matrix * count + tile, keys);
            }
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
    static constexpr int kTiles = 32, kGroups = kTiles / kOfGroup;
    const Part* parts;
    long long tiles_before;  // of the heads before this one

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
