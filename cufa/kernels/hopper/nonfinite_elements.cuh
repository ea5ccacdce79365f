// NaN and infinity in tiles: where a mask cuts through one, they must not reach rows that do not
// see them.
#pragma once

#include "hopper/panel_tile.cuh"

// Searches for NaN and infinity among 16-bit elements: 0 times anything else is 0.
class NonfiniteSearch {
  public:
    __device__ void look_at(const void* chunk) {
        const Pairs pairs = *static_cast<const Pairs*>(chunk);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums[e] = ptx::multiply_add_pairs<is_bfloat16<operand_t>>(pairs[e], 0, sums[e]);
        }
    }
    __device__ bool found() const {
        constexpr unsigned int kMagnitudes = 0x7fff7fff;
        return ((sums[0] | sums[1] | sums[2] | sums[3]) & kMagnitudes) != 0;
    }

  private:
    using Pairs = Pack<unsigned int, 4>;
    static_assert(sizeof(Pairs) == kChunkCols * sizeof(operand_t), "it looks at whole chunks");
    Pairs sums = {};
};

// Whether `thread`, one of Threads that search together, finds NaN or infinity in a tile.
template <int Threads, class Tile>
__device__ inline bool finds_nonfinite(const Tile& tile, int thread) {
    const operand_t* const values = &tile.data[0][0][0];
    NonfiniteSearch search;
#pragma unroll 2
    for (int i = thread; i < Tile::kBytes / kChunkBytes; i += Threads) {
        search.look_at(values + i * kChunkCols);
    }
    return search.found();
}

// Replaces NaN in a tile by zero, and infinity, too, or ToNearest by the largest number; `thread`
// is one of Threads that do this together. All leave the loop together, so that what is uniform
// around it stays uniform.
template <int Threads, bool ToNearest = false, class Tile>
__device__ inline void clear_nonfinite(Tile& tile, int thread) {
    constexpr int kCount = Tile::kBytes / int(sizeof(operand_t));
    operand_t* const values = &tile.data[0][0][0] + thread;
#pragma unroll 1
    for (int i = 0; i < kCount; i += Threads) {
        const bool inside = kCount % Threads == 0 || i + thread < kCount;
        if (inside && !is_finite(values[i]))
            values[i] = ToNearest ? nearest_finite(values[i]) : operand_t{};
    }
}
