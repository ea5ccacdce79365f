// Which tile of queries a block works on next, where there are as many blocks as SMs and each takes
// tile after tile.
#pragma once

#include "mask.cuh"
#include "memory.cuh"
#include "tensor.cuh"

// A tile of queries of one head; batch -1: there is none left.
struct WorkTile {
    int batch, head, kv_head, first_row;

    __device__ bool exists() const { return batch >= 0; }
};

// The order in which tiles are taken. Heads come in sections: enough of them to keep all blocks
// busy for a while, no more than have their keys and values in the L2 cache at once. Under a causal
// mask the last queries of a section's heads come first: those see most keys, and long work that
// starts late would leave the GPU waiting for it. Sections are powers of two, as numbers of heads
// mostly are: a small one at the end would start its long work late.
template <int BlockM, bool Causal, int SectionBytes>
struct TileOrder {
    Sizes sizes;
    unsigned int tiles;  // of one head
    unsigned int heads;  // of all batches
    unsigned int section_heads;

    __device__ explicit TileOrder(const Sizes& sizes)
        : sizes(sizes), tiles(ceil_div(sizes.seqlen_q, BlockM)), heads(sizes.batch * sizes.heads) {
        section_heads = group();
        if (!Causal) return;
        constexpr int kRounds = 3, kRowBytes = (kHeadDim + kValueDim) * int(sizeof(scalar_t));
        const unsigned int cached = SectionBytes / kRowBytes / max(1, sizes.seqlen_k) * group();
        while (2 * section_heads <= cached && section_heads * tiles < kRounds * gridDim.x) {
            section_heads *= 2;
        }
    }

    __device__ WorkTile at(unsigned int index) const {
        if (index >= heads * tiles) return {-1, 0, 0, 0};
        const unsigned int section = index / (section_heads * tiles);
        const unsigned int first_head = section * section_heads;
        const unsigned int in_section = min(section_heads, heads - first_head);
        const unsigned int place = index - first_head * tiles;
        const unsigned int row_tile = Causal ? tiles - 1 - place / in_section : place / in_section;
        const unsigned int head = first_head + place % in_section;
        const unsigned int batch = head / sizes.heads, in_batch = head - batch * sizes.heads;
        return {int(batch), int(in_batch), int(in_batch / group()), int(row_tile * BlockM)};
    }

  private:
    // Query heads that share keys and values.
    __device__ unsigned int group() const {
        return unsigned(sizes.heads) / unsigned(sizes.kv_heads);
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
