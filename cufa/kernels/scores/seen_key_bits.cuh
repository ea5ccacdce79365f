// What a mask that is the same for all rows shows of tiles of keys (seen_columns.cuh), and of each
// key, as one bit. In the workspace, the bits come first.
#pragma once

#include "scores/seen_columns.cuh"

template <int Keys>
class SeenKeyBits : public SeenColumns<Keys> {
    using Columns = SeenColumns<Keys>;
    using Columns::kWords;

  public:
    using typename Columns::Bits;

    template <class Params>
    __device__ SeenKeyBits(const Params& params, const Sequence& sequence, int head)
        : Columns(parts_of(params), params, sequence, head),
          bits(bits_of(params) + this->number(nullptr, 0, 0) * kWords) {}

    // The bits of the tile with this key.
    __device__ Bits of_tile(int key) const {
        Bits words;
        words.load(bits + key / Keys * kWords);
        return words;
    }

    // Finds out about a few tiles, by one warp of those that `warps` counts.
    template <class Params>
    __device__ static void find(const Params& params, long long warp) {
        const auto store = [&](long long number, const Bits& keys) {
            keys.store(bits_of(params) + number * kWords);
        };
        constexpr int kAtOnce = 4;  // with more, threads need registers, and fewer blocks run
        Columns::template find<kAtOnce>(parts_of(params), params, warp, store);
    }

  private:
    const unsigned int* bits;  // of this head

    template <class Params>
    __device__ static unsigned int* bits_of(const Params& params) {
        return static_cast<unsigned int*>(params.workspace);
    }
    template <class Params>
    __device__ static unsigned int* parts_of(const Params& params) {
        return bits_of(params) + Columns::all_tiles(params) * kWords;
    }
};
