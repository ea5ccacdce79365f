// Rows in 8 bits for products in float16. The copy engine cannot convert. So a warpgroup loads rows
// to registers, widens them, and writes them where the engine would have.
#pragma once

#include "hopper/forward/wgmma_forward_block.cuh"
#include "hopper/nonfinite_elements.cuh"
#include "ptx/ptx_sm89.cuh"

// What a lane holds of a row in 8 bits at once, and half of it in 16: a chunk.
constexpr int kNarrowCols = 16;
using NarrowCols = Pack<unsigned int, kNarrowCols / 4>;
using WideCols = Pack<unsigned int, kChunkCols / 2>;

// The half of these columns that fills a chunk; exact, and NaN stays NaN.
__device__ inline WideCols widen(const NarrowCols& narrow, int half) {
    WideCols wide;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        unsigned int pairs[2];
        ptx::half_from_e4m3(pairs, narrow[2 * half + i]);
        wide[2 * i] = pairs[0];
        wide[2 * i + 1] = pairs[1];
    }
    return wide;
}

// A lane's part of a tile. A warp has swizzled units of eight rows, and four lanes share a row: in
// each panel, a lane has the columns from `first_col` on.
template <class Tile>
class RowWidener {
    static constexpr int kRowLanes = kPanelCols / kNarrowCols;
    static constexpr int kUnitRows = 32 / kRowLanes;

  public:
    static constexpr int kUnits = Tile::kRows / (kWarps * kUnitRows);  // of a tile that a warp has

    __device__ RowWidener()
        : first_row(threadIdx.x / 32 * kUnits * kUnitRows + threadIdx.x % 32 / kRowLanes),
          first_col(threadIdx.x % kRowLanes * kNarrowCols) {}

    // This lane's row of a unit.
    __device__ int row_of(int unit) const { return first_row + unit * kUnitRows; }

    // Starts to load that row; zeros, if it does not exist.
    __device__ void load(int unit, const float8_e4m3fn* row) {
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel)
            held[unit][panel] = load_cols(row, panel);
    }

    // Writes what was loaded.
    __device__ void write(Tile& to) const {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
            for (int panel = 0; panel < Tile::kPanels; ++panel)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *chunk(to, unit, panel, half) = widen(held[unit][panel], half);
    }

    // Whether there is NaN in what this lane has written.
    __device__ bool finds_nan(Tile& written) const {
        NonfiniteSearch search;
#pragma unroll 1
        for (int i = 0; i < kUnits * Tile::kPanels; ++i) {
            search.look_at(chunk(written, i % kUnits, i / kUnits, 0));
            search.look_at(chunk(written, i % kUnits, i / kUnits, 1));
        }
        return search.found();
    }

  private:
    static_assert(!kWidensKeys ||
                      (kUnitRows == kSwizzleRows && Tile::kRows % (kWarps * kUnitRows) == 0),
                  "each warp writes whole swizzled units");
    static_assert(!kWidensKeys || kHeadDim % kNarrowCols == 0,
                  "loads are inside a row or beyond it");

    // Columns that the head does not have are zero.
    __device__ NarrowCols load_cols(const float8_e4m3fn* row, int panel) const {
        const int col = panel * kPanelCols + first_col;
        if (row == nullptr || col >= kHeadDim) return {};
        return *reinterpret_cast<const NarrowCols*>(row + col);
    }
    __device__ WideCols* chunk(Tile& tile, int unit, int panel, int half) const {
        const int col = panel * kPanelCols + first_col + half * kChunkCols;
        return reinterpret_cast<WideCols*>(tile.at(row_of(unit), col));
    }

    const int first_row, first_col;
    NarrowCols held[kUnits][Tile::kPanels];
};
