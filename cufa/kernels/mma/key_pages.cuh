// Copies of tiles of keys and values for tensor cores, contiguous or in pages, which are looked up
// ahead of the copies.
#pragma once

#include "call/tile_pages.cuh"
#include "mma/mma_tile.cuh"

// Starts the copy of keys from first_key on into a tile, like `copy_tile`; keys from end_key on
// become zeros. Whole warps take part.
template <int Threads, int Cols, class Tile, class Index = unsigned int>
__device__ inline void copy_keys(Tile& tile, const Matrix<const key_t>& source,
                                 const TilePages<Tile::kRows>&, int first_key, int end_key,
                                 Index thread = threadIdx.x) {
    copy_tile<Threads, Cols>(tile, source, first_key, end_key, thread);
}

// All numbers are shuffled before the first copy: shuffles wait for copies already started.
template <int Threads, int Cols, class Tile, class Index = unsigned int>
__device__ inline void copy_keys(Tile& tile, const PagedMatrix<const key_t>& source,
                                 const TilePages<Tile::kRows>& pages, int first_key, int end_key,
                                 Index thread = threadIdx.x) {
    using Copies = RowCopies<Threads, Cols, key_t>;
    using Pages = TilePages<Tile::kRows>;
    const int in_page = Tile::kRows % kPageSize == 0 ? 0 : first_key % kPageSize;
    if constexpr (Pages::kWhole && min_of(kPageSize, Tile::kRows) % Copies::kRowsAtOnce == 0) {
        constexpr int kRows = min_of(kPageSize, Tile::kRows);
        int numbers[Pages::kPages];
#pragma unroll
        for (int page = 0; page < Pages::kPages; ++page) numbers[page] = pages.number(page);
#pragma unroll
        for (int page = 0; page < Pages::kPages; ++page) {
            copy_rows<Threads, Cols, kRows>(tile, page * kRows, source.page(numbers[page]), in_page,
                                            end_key - first_key + in_page - page * kRows, thread);
        }
    } else {
        const int thread_row = thread / Copies::kRowThreads;
        const int first_col = thread % Copies::kRowThreads * Copies::kChunk;
        constexpr int kRounds = ceil_div(Tile::kRows, Copies::kRowsAtOnce);
        int numbers[kRounds];
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int row = thread_row + round * Copies::kRowsAtOnce;
            numbers[round] = pages.number((in_page + row) / kPageSize);
        }
        if (thread_row >= Copies::kRowsAtOnce) return;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int row = thread_row + round * Copies::kRowsAtOnce;
            if (row >= Tile::kRows) break;
            const key_t* const from = source.page(numbers[round]).row((in_page + row) % kPageSize);
            for (int col = first_col; col < Cols; col += Copies::kRowThreads * Copies::kChunk) {
                ptx::copy_async<Copies::kChunk * sizeof(key_t)>(tile.at(row, col), from + col,
                                                                first_key + row < end_key);
            }
        }
    }
}
