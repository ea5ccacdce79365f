// Tiles in shared memory for tensor cores, and their way from and to global memory.
#pragma once

#include "call/columns.cuh"
#include "call/tensor.cuh"
#include "mma/operands_byte.cuh"
#include "mma/operands_double.cuh"
#include "mma/operands_half.cuh"
#include "mma/operands_single.cuh"

using Operands = OperandsOf<key_t>;

// A Rows x Cols tile; columns are padded to whole steps of a product. The eight rows of a matrix
// that ldmatrix loads must lie in different banks, so units of 16 bytes are swizzled: unit u of row
// r is at u ^ r % 8. Rows of bytes may be a half or a quarter of a line; then it is at u ^ r / 2 %
// 4 or u ^ r / 4 % 2. Rows that are not 1, 2, 4, ... lines long are padded to an odd number of
// units instead. Copies into them are slower, since a line of the source is then part of two.
template <int Rows, int Cols, class T = key_t>
struct MmaTile {
    using Element = T;
    static constexpr int kMatrixCols = kMatrixBytes / sizeof(T), kLineCols = kLineBytes / sizeof(T);
    static constexpr int kRows = Rows;
    static constexpr int kCols = round_up(Cols, kMmaK);
    static constexpr int kSpan = min_of(kCols, kLineCols);  // columns that a swizzle permutes
    static constexpr bool kSwizzled =
        (kSpan == kLineCols || sizeof(T) == 1) && (kCols & (kCols - 1)) == 0;
    static constexpr int kPitch = kSwizzled ? kCols : kCols + kMatrixCols;

    alignas(kLineBytes) T data[Rows * kPitch];

    __device__ static int place(int row, int col) {
        return row * kPitch + (kSwizzled ? col ^ swizzle(row) : col);
    }
    // The bits of a column that are flipped in this row.
    __device__ static int swizzle(int row) {
        constexpr int kRowsOfLine = kLineCols / kSpan, kUnits = kSpan / kMatrixCols;
        return (row / kRowsOfLine & (kUnits - 1)) * kMatrixCols;
    }
    __device__ T* at(int row, int col) { return data + place(row, col); }
    __device__ const T* at(int row, int col) const { return data + place(row, col); }
};

// Sets the padding columns to zero. Copies do not touch them, so once is enough.
//
// Here and below, the first Threads threads of the block take part; or others, if each passes its
// own index.
template <int Threads, int Cols, class Tile>
__device__ inline void clear_padding(Tile& tile, unsigned int thread = threadIdx.x) {
    constexpr int kPadding = Tile::kCols - Cols;
    if constexpr (kPadding > 0) {
        constexpr int kChunk = min_of(kPadding & -kPadding, Tile::kMatrixCols);
        constexpr int kRowChunks = kPadding / kChunk;
        using Chunk = Pack<typename Tile::Element, kChunk>;
        for (int i = thread; i < Tile::kRows * kRowChunks; i += Threads) {
            const int col = Cols + i % kRowChunks * kChunk;
            *reinterpret_cast<Chunk*>(tile.at(i / kRowChunks, col)) = Chunk{};
        }
    }
}

// How Threads threads divide the copy of rows of Cols columns of a type.
template <int Threads, int Cols, class T>
struct RowCopies {
    static constexpr int kChunk = kChunkOfRow<T, Cols>;
    static constexpr int kRowThreads = min_of(Cols / kChunk, Threads);
    static constexpr int kRowsAtOnce = floor_power_of_two(Threads / kRowThreads);
};

// Starts the copy of rows [first_row, first_row + Rows) and Cols columns to a tile's rows from
// to_row on; rows from end_row on become zeros. A thread stays in one column of chunks, so that
// address increments from row to row are the same for all threads.
template <int Threads, int Cols, int Rows, class Tile, class Index>
__device__ inline void copy_rows(Tile& tile, int to_row,
                                 Matrix<const typename Tile::Element> source, int first_row,
                                 int end_row, Index thread) {
    using Element = typename Tile::Element;
    using Copies = RowCopies<Threads, Cols, Element>;
    constexpr int kChunk = Copies::kChunk, kRowThreads = Copies::kRowThreads;
    constexpr int kRowsAtOnce = Copies::kRowsAtOnce;

    const int row = thread / kRowThreads, first_col = thread % kRowThreads * kChunk;
    if (Threads != kRowsAtOnce * kRowThreads && row >= kRowsAtOnce) return;
    const Element* const from = source.row(first_row + row);
    const bool whole = first_row + Rows <= end_row;
    // One round, unless a row has more chunks than there are threads.
    for (int col = first_col; col < Cols; col += kRowThreads * kChunk) {
        const TilePlace<Tile, Element> to(tile, row, col);
#pragma unroll(ptx::kCopiesAtOnce)
        for (int rows = 0; rows < Rows; rows += kRowsAtOnce) {
            if (Rows % kRowsAtOnce != 0 && row + rows >= Rows) break;
            const bool inside = whole || first_row + row + rows < end_row;
            ptx::copy_async<kChunk * sizeof(Element)>(
                to.at(to_row + rows, 0), from + rows * source.row_stride + col, inside);
        }
        if (kRowThreads * kChunk == Cols) break;
    }
}

// The same for all rows of a tile.
template <int Threads, int Cols, class Tile, class Index = unsigned int>
__device__ inline void copy_tile(Tile& tile, Matrix<const typename Tile::Element> source,
                                 int first_row, int end_row, Index thread = threadIdx.x) {
    copy_rows<Threads, Cols, Tile::kRows>(tile, 0, source, first_row, end_row, thread);
}

// Zeroes NaN and infinity in what this thread itself has copied to a tile and waited for. Returns
// whether there was any.
template <int Threads, int Cols, class Tile>
__device__ inline bool clear_copied_nonfinite(Tile& tile) {
    using Copies = RowCopies<Threads, Cols, scalar_t>;
    const int first_row = threadIdx.x / Copies::kRowThreads;
    const int first_col = threadIdx.x % Copies::kRowThreads * Copies::kChunk;
    if (first_row >= Copies::kRowsAtOnce) return false;
    bool found = false;
    for (int col = first_col; col < Cols; col += Copies::kRowThreads * Copies::kChunk)
#pragma unroll 4  // it runs for few tiles
        for (int row = first_row; row < Tile::kRows; row += Copies::kRowsAtOnce)
#pragma unroll
            for (int e = 0; e < Copies::kChunk; ++e) {
                scalar_t& value = *tile.at(row, col + e);
                if (is_finite(value)) continue;
                value = scalar_t{};
                found = true;
            }
    return found;
}

// Zeroes those rows that a thread itself has copied to a tile and waited for which are not `shown`.
template <int Threads, int Cols, class Tile, class Shown>
__device__ inline void clear_copied_rows(Tile& tile, const Shown& shown) {
    using Copies = RowCopies<Threads, Cols, scalar_t>;
    using Chunk = Pack<scalar_t, Copies::kChunk>;
    const int first_row = threadIdx.x / Copies::kRowThreads;
    const int first_col = threadIdx.x % Copies::kRowThreads * Copies::kChunk;
    if (first_row >= Copies::kRowsAtOnce) return;
#pragma unroll
    for (int rows = 0; rows < Tile::kRows; rows += Copies::kRowsAtOnce) {
        const int row = rows + first_row;
        if (row >= Tile::kRows || shown(row)) continue;
        for (int col = first_col; col < Cols; col += Copies::kRowThreads * Copies::kChunk)
            *reinterpret_cast<Chunk*>(tile.at(row, col)) = Chunk{};
    }
}

// Whether this thread, one of Threads that search together, finds NaN or infinity in a tile.
template <int Threads, class Tile>
__device__ inline bool finds_nonfinite(const Tile& tile, unsigned int thread = threadIdx.x) {
    using Element = typename Tile::Element;
    constexpr int kChunkCols = Tile::kMatrixCols, kRowChunks = Tile::kCols / kChunkCols;
    unsigned int found = 0;
#pragma unroll 1  // it runs for few tiles, and other code lacks registers
    for (int i = thread; i < Tile::kRows * kRowChunks; i += Threads) {
        const Element* chunk = tile.at(i / kRowChunks, i % kRowChunks * kChunkCols);
        if constexpr (sizeof(Element) == 2) {
            using Pairs = Pack<unsigned int, kChunkCols / 2>;
            const Pairs pairs = *reinterpret_cast<const Pairs*>(chunk);
#pragma unroll
            for (int e = 0; e < kChunkCols / 2; ++e) found |= nonfinite_of_pair<Element>(pairs[e]);
        } else {
            const auto values = *reinterpret_cast<const Pack<Element, kChunkCols>*>(chunk);
#pragma unroll
            for (int e = 0; e < kChunkCols; ++e) found |= !is_finite(values[e]);
        }
    }
    return found != 0;
}

// Writes the rows of a tile to rows [first_row, end_row) of a matrix. The whole block takes part.
template <int Threads, int Cols, class Tile>
__device__ inline void write_tile(const Tile& tile, Matrix<scalar_t> to, int first_row,
                                  int end_row) {
    constexpr int kChunk = kChunkOfRow<scalar_t, Cols>;
    constexpr int kRowChunks = Cols / kChunk;
    using Chunk = Pack<scalar_t, kChunk>;
    const int rows = min(Tile::kRows, end_row - first_row);
#pragma unroll 1  // it runs once, and other code lacks registers
    for (int i = threadIdx.x; i < rows * kRowChunks; i += Threads) {
        const int row = i / kRowChunks, col = i % kRowChunks * kChunk;
        *reinterpret_cast<Chunk*>(to.row(first_row + row) + col) =
            *reinterpret_cast<const Chunk*>(tile.at(row, col));
    }
}
