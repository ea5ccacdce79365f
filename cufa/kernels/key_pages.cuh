// Copies of tiles of keys and values for tensor cores, wherever those lie: one after the other, or
// in pages, which are looked up ahead of the copies.
#pragma once

#include "mma_tiles.cuh"

// Which pages have the keys of a tile of so many. Where there are none it is empty.
template <int Keys, bool Paged = kPaged>
struct TilePages {
    TilePages() = default;
    __device__ TilePages(const Matrix<const scalar_t>&, int, int) {}
};

// All lanes of a warp look up together: each has one of the numbers, or a few, and tells the
// others.
template <int Keys>
class TilePages<Keys, true> {
  public:
    static constexpr bool kOnePage = kPageSize % Keys == 0;

    TilePages() = default;
    // Of keys [first_key, end_key), of which a tile begins with the first.
    __device__ TilePages(const PagedMatrix<const scalar_t>& source, int first_key, int end_key) {
        const int lane = kOnePage ? 0 : threadIdx.x % 32;
        const int first = first_key / kPageSize, end = ceil_div(end_key, kPageSize);
#pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            const int page = first + i * 32 + lane;
            numbers[i] = page < end ? source.table[page] : 0;
        }
    }

    // The number of the only page.
    __device__ int number() const { return numbers[0]; }

    // The number of the tile's page `page`.
    __device__ int number(int page) const {
        int number = 0;
#pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            const int found = __shfl_sync(0xffffffffu, numbers[i], page % 32);
            if (page / 32 == i) number = found;
        }
        return number;
    }

  private:
    // Tiles begin at multiples of their size; a page may end after the first key.
    static constexpr int kPages = kOnePage                ? 1
                                  : Keys % kPageSize == 0 ? Keys / kPageSize
                                                          : (Keys - 2) / kPageSize + 2;
    static constexpr int kLookups = ceil_div(kPages, 32);

    int numbers[kLookups];
};

// Starts the copy of keys from first_key on into a tile, as `copy_tile` does; those from end_key on
// become zeros. Whole warps take part.
template <int Threads, int Cols, class Tile, class Index = unsigned int>
__device__ inline void copy_keys(Tile& tile, const Matrix<const scalar_t>& source,
                                 const TilePages<Tile::kRows>&, int first_key, int end_key,
                                 Index thread = threadIdx.x) {
    copy_tile<Threads, Cols>(tile, source, first_key, end_key, thread);
}

template <int Threads, int Cols, class Tile, class Index = unsigned int>
__device__ inline void copy_keys(Tile& tile, const PagedMatrix<const scalar_t>& source,
                                 const TilePages<Tile::kRows>& pages, int first_key, int end_key,
                                 Index thread = threadIdx.x) {
    const int in_page = first_key % kPageSize;
    if constexpr (TilePages<Tile::kRows>::kOnePage) {
        copy_tile<Threads, Cols>(tile, source.page(pages.number()), in_page,
                                 end_key - first_key + in_page, thread);
    } else {
        using Copies = RowCopies<Threads, Cols>;
        const int thread_row = thread / Copies::kRowThreads;
        const int first_col = thread % Copies::kRowThreads * Copies::kChunk;
#pragma unroll
        for (int rows = 0; rows < Tile::kRows; rows += Copies::kRowsAtOnce) {
            const int row = thread_row + rows, place = in_page + row;
            const int number = pages.number(place / kPageSize);
            if (thread_row >= Copies::kRowsAtOnce || row >= Tile::kRows) continue;
            const scalar_t* const from = source.page(number).row(place % kPageSize);
            for (int col = first_col; col < Cols; col += Copies::kRowThreads * Copies::kChunk) {
                ptx::copy_async<Copies::kChunk * sizeof(scalar_t)>(tile.at(row, col), from + col,
                                                                   first_key + row < end_key);
            }
        }
    }
}
