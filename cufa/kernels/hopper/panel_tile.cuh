// Tiles of 16-bit and 8-bit elements in shared memory, in the layout that TMA writes and wgmma
// reads, and their way from and to global memory.
#pragma once

#include "call/config.cuh"
#include "call/memory.cuh"
#include "call/tensor.cuh"
#include "hopper/pipeline.cuh"
#include "ptx/ptx_sm90.cuh"

constexpr int kWarpgroup = 128;

// The element type of products: the call's own type. For float32, whose elements are sums of halves
// (hopper/float32/halves.cuh), it is float16.
template <class T>
struct OperandElement {
    using type = T;
};
template <>
struct OperandElement<float32> {
    using type = float16;
};
using operand_t = OperandElement<scalar_t>::type;

// A value that is the same in these lanes of a warp, made known as such to the compiler. It and
// what follows from it then live in uniform registers, and instructions that need them there are
// not issued once per lane.
template <unsigned int Lanes = 0xffffffffu>
__device__ inline int uniform(int value) {
    return __shfl_sync(Lanes, value, 0);
}

// A tile consists of panels with rows of 128 bytes. Eight rows of a panel are one swizzled unit:
// 16-byte chunk c of row r is at c ^ r. Columns that do not fill a panel can be in panels with rows
// of 32 bytes, in which the chunk is at c ^ r / 4. TMA does not use those.
constexpr int kPanelRowBytes = 128;
constexpr int kPanelCols = kPanelRowBytes / sizeof(operand_t);
constexpr int kNarrowRowBytes = 32;
constexpr int kSwizzleRows = 8;
constexpr int kSwizzleBytes = kSwizzleRows * kPanelRowBytes;
constexpr int kChunkBytes = 16;
constexpr int kChunkCols = kChunkBytes / sizeof(operand_t);

// A Rows x Cols tile; columns are padded to whole panels. If StepsByXor, a warp that writes rows
// computes the addresses of chunks from that of the first.
template <int Rows, int Cols, class T = operand_t, int RowBytes = kPanelRowBytes,
          bool StepsByXor = false>
struct PanelTile {
    static_assert(Rows % kSwizzleRows == 0, "a panel is made of eights of rows");
    using Element = T;
    static constexpr int kRows = Rows;
    static constexpr int kRowBytes = RowBytes;
    static constexpr bool kStepsByXor = StepsByXor;
    static constexpr int kPanelCols = RowBytes / sizeof(T);
    static constexpr int kChunkCols = kChunkBytes / sizeof(T);
    static constexpr int kPanels = ceil_div(Cols, kPanelCols);
    static constexpr int kPanelBytes = Rows * RowBytes;
    static constexpr int kBytes = kPanels * kPanelBytes;

    alignas(kSwizzleBytes) T data[kPanels][Rows][kPanelCols];

    __device__ T* at(int row, int col) {
        constexpr int kRowsOfPattern = kPanelRowBytes / RowBytes;
        const int chunk =
            col % kPanelCols / kChunkCols ^ row / kRowsOfPattern % (RowBytes / kChunkBytes);
        return &data[col / kPanelCols][row][chunk * kChunkCols + col % kChunkCols];
    }

    // Some of the tile's panels as a tile of Count columns.
    template <int Count>
    __device__ auto& panels_from(int first_panel) {
        using Part = PanelTile<Rows, Count, T, RowBytes, StepsByXor>;
        return reinterpret_cast<Part&>(data[first_panel]);
    }
};

// Starts the copy of one head's rows from first_row on and columns from first_col on, to the tile's
// rows from to_row on: as many rows as a box of the map has. Columns that the head does not have,
// including those before 0, become zero.
template <class Tile>
__device__ inline void copy_tile(Tile& tile, const TensorMap& map, ptx::Barrier& barrier, int batch,
                                 int head, int first_row, int to_row = 0, int first_col = 0) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
        ptx::copy_box(tile.data[panel][to_row], map, barrier, first_col + panel * Tile::kPanelCols,
                      first_row, head, batch);
    }
}

// The same for a whole tile that is needed once.
template <class Tile>
__device__ inline void copy_tile_once(Tile& tile, const TensorMap& map, ptx::Barrier& barrier,
                                      int batch, int head, int first_row, int first_col = 0) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
        ptx::copy_box_once(tile.data[panel][0], map, barrier, first_col + panel * Tile::kPanelCols,
                           first_row, head, batch);
    }
}

// Starts the copy of a tile to one head's rows from first_row on and columns from first_col on.
template <class Tile>
__device__ inline void store_tile(const TensorMap& map, const Tile& tile, int batch, int head,
                                  int first_row, int first_col) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
        ptx::store_box(map, tile.data[panel], first_col + panel * Tile::kPanelCols, first_row, head,
                       batch);
    }
    ptx::commit_stores();
}

// Writes the first `count` rows of a tile to a head's rows from first_row on and columns from
// first_col on, where TMA cannot. Columns outside the head's Dims, also those before 0, are
// skipped. `thread` is one of Threads that do this together.
template <int Dims, int Threads, class Tile>
__device__ inline void write_first_rows(Matrix<typename Tile::Element> to, Tile& tile, int count,
                                        int first_row, int first_col, int thread) {
    using Chunk = Pack<typename Tile::Element, Tile::kChunkCols>;
    constexpr int kRowChunks = Tile::kPanels * Tile::kPanelCols / Tile::kChunkCols;
#pragma unroll 1  // or warps that only store would spill, and others read threadIdx again and again
    for (int i = thread; i < count * kRowChunks; i += Threads) {
        const int row = i / kRowChunks, col = i % kRowChunks * Tile::kChunkCols;
        if (first_col + col < 0 || first_col + col >= Dims) continue;
        const Chunk chunk = *reinterpret_cast<const Chunk*>(tile.at(row, col));
        typename Tile::Element* const out = to.row(first_row + row) + first_col + col;
        if constexpr (Dims % Tile::kChunkCols == 0) {
            *reinterpret_cast<Chunk*>(out) = chunk;
        } else {
#pragma unroll
            for (int e = 0; e < Tile::kChunkCols; ++e) {
                if (first_col + col + e < Dims) out[e] = chunk[e];
            }
        }
    }
}
