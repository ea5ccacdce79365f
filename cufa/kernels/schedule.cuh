// Which tile of queries a block works on next, where there are as many blocks as SMs and each takes
// tile after tile.
#pragma once

#include "mask.cuh"
#include "memory.cuh"
#include "ptx_sm90a.cuh"
#include "tensor.cuh"

// A tile of queries of one head; batch -1: there is none left.
struct WorkTile {
    int batch, head, kv_head, first_row;

    __device__ bool exists() const { return batch >= 0; }
};

// The order in which tiles are taken. Heads come in sections: enough of them to keep all blocks
// busy for a while, no more than have their keys and values in the L2 cache at once. Under a causal
// mask the last queries of a section's heads come first: those see most keys, and long work that
// starts late would leave the GPU waiting for it. Sections differ by no more than one group of
// heads, since it is the last one whose end matters.
template <int BlockM, bool Causal, int SectionBytes>
struct TileOrder {
    Sizes sizes;
    int tiles;          // of one head
    int heads;          // of all batches
    int section_heads;  // of the later sections
    int long_sections;  // how many sections, the first ones, have a group of heads more

    __device__ explicit TileOrder(const Sizes& sizes)
        : sizes(sizes), tiles(ceil_div(sizes.seqlen_q, BlockM)), heads(sizes.batch * sizes.heads) {
        constexpr int kRounds = 3;
        const int groups = heads / group();
        const int busy = ceil_div(kRounds * gridDim.x, tiles * group());
        const int sections = Causal ? ceil_div(groups, max(1, min(busy, cached_groups()))) : groups;
        section_heads = groups / sections * group();
        long_sections = groups % sections;
    }

    __device__ WorkTile at(int index) const {
        if (index >= heads * tiles) return {-1, 0, 0, 0};
        const int long_heads = section_heads + group();
        unsigned int sections = long_sections;
        ptx::hold(sections);  // or the next two would be kept in registers from tile to tile
        const int in_long = sections * long_heads;
        const bool is_long = index < in_long * tiles;
        const int size = is_long ? long_heads : section_heads;
        const int begin = is_long ? 0 : in_long;

        const int place = index - begin * tiles;
        const int section = place / (size * tiles);
        const int in_section = place - section * size * tiles;
        const int row_tile = Causal ? tiles - 1 - in_section / size : in_section / size;
        const int head = begin + section * size + in_section % size;
        return {head / sizes.heads, head % sizes.heads, kv_head_of(head % sizes.heads, sizes),
                row_tile * BlockM};
    }

  private:
    __device__ int group() const { return sizes.heads / sizes.kv_heads; }

    // How many heads' keys and values fit into a section's part of the L2 cache.
    __device__ int cached_groups() const {
        const long long head_bytes = static_cast<long long>(max(1, sizes.seqlen_k)) *
                                     (kHeadDim + kValueDim) * static_cast<int>(sizeof(scalar_t));
        return SectionBytes / head_bytes;
    }
};

// Hands out the indices of tiles: each block's own first, then those that `taken` counts. It is
// taken from exactly as often as there are tiles, and the last time puts it back to 0 for the next
// launch.
struct TileCounter {
    unsigned int* taken;
    unsigned int tiles;

    __device__ int next() const { return gridDim.x + atomicInc(taken, tiles - 1); }
};
