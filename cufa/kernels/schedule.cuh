// Which tile of queries a block works on next, where there are as many blocks as SMs and each takes tile
// after tile.
#pragma once

#include "mask.cuh"
#include "memory.cuh"
#include "tensor.cuh"

// A tile of queries of one head; batch -1: there is none left.
struct WorkTile {
    int batch, head, kv_head, first_row;

    __device__ bool exists() const { return batch >= 0; }
};

// The order in which tiles are taken. Heads come in sections: enough of them to keep all blocks busy
// for a while, no more than have their keys and values in the L2 cache at once. Under a causal mask
// the last queries of a section's heads come first: those see most keys, and long work that starts
// late would leave the GPU waiting for it. Sections are of one size, since it is the last one whose
// end matters.
template <int BlockM, bool Causal, int SectionBytes>
struct TileOrder {
    Sizes sizes;
    int tiles;  // of one head
    int heads;  // of all batches
    int section_heads;

    __device__ explicit TileOrder(const Sizes& sizes)
        : sizes(sizes), tiles(ceil_div(sizes.seqlen_q, BlockM)), heads(sizes.batch * sizes.heads) {
        const int group = sizes.heads / sizes.kv_heads;
        section_heads = group;
        if (!Causal) return;
        constexpr int kRounds = 3;
        const int busy = ceil_div(kRounds * gridDim.x, tiles * group);
        const long long head_bytes = static_cast<long long>(max(1, sizes.seqlen_k)) *
                                     (kHeadDim + kValueDim) * static_cast<int>(sizeof(scalar_t));
        const int cached = SectionBytes / head_bytes;
        const int groups = heads / group;
        const int sections = ceil_div(groups, max(1, min(busy, cached)));
        section_heads = ceil_div(groups, sections) * group;
    }

    __device__ WorkTile at(int index) const {
        if (index >= heads * tiles) return {-1, 0, 0, 0};
        const int section = index / (section_heads * tiles);
        const int first_head = section * section_heads;
        const int in_section = min(section_heads, heads - first_head);
        const int place = index - first_head * tiles;
        const int row_tile = Causal ? tiles - 1 - place / in_section : place / in_section;
        const int head = first_head + place % in_section;
        return {head / sizes.heads, head % sizes.heads, kv_head_of(head % sizes.heads, sizes),
                row_tile * BlockM};
    }
};

// Hands out the indices of tiles: each block's own first, then those that `taken` counts. It is taken
// from exactly as often as there are tiles, and the last time puts it back to 0 for the next launch.
struct TileCounter {
    unsigned int* taken;
    unsigned int tiles;

    __device__ int next() const { return gridDim.x + atomicInc(taken, tiles - 1); }
};
