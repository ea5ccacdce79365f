// The pages of a tile's keys, looked up ahead of the copies.
#pragma once

#include "call/memory.cuh"
#include "call/tensor.cuh"

// The pages of a tile of `Keys` keys. Empty if there are no pages.
template <int Keys, bool Paged = kPaged>
struct TilePages {
    TilePages() = default;
    __device__ TilePages(const Matrix<const key_t>&, int, int) {}
};

// All lanes of a warp look pages up together. Each holds all numbers if there are few; otherwise
// one or some, which it passes to the others by shuffles.
template <int Keys>
class TilePages<Keys, true> {
  public:
    // Whether a tile is whole pages or within one; tiles begin at multiples of their size.
    static constexpr bool kWhole = kPageSize % Keys == 0 || Keys % kPageSize == 0;
    static constexpr int kPages = kPageSize % Keys == 0   ? 1
                                  : Keys % kPageSize == 0 ? Keys / kPageSize
                                                          : (Keys - 2) / kPageSize + 2;

    TilePages() = default;
    // For keys [first_key, end_key); a tile begins with first_key.
    __device__ TilePages(const PagedMatrix<const key_t>& source, int first_key, int end_key) {
        const int first = first_key / kPageSize, end = ceil_div(end_key, kPageSize);
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) {
            const int page = first + (kShared ? i * 32 + threadIdx.x % 32 : i);
            numbers[i] = page < end ? source.table[page] : 0;
        }
    }

    // The number of page `page` of the tile.
    __device__ int number(int page) const {
        int number = numbers[0];
        if constexpr (kShared) number = __shfl_sync(0xffffffffu, number, page % 32);
#pragma unroll
        for (int i = 1; i < kNumbers; ++i) {
            int other = numbers[i];
            if constexpr (kShared) other = __shfl_sync(0xffffffffu, other, page % 32);
            if ((kShared ? page / 32 : page) == i) number = other;
        }
        return number;
    }

  private:
    static constexpr int kMostOfLane = 4;
    static constexpr bool kShared = kPages > kMostOfLane;
    static constexpr int kNumbers = kShared ? ceil_div(kPages, 32) : kPages;

    int numbers[kNumbers];
};
