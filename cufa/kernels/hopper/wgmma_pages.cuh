// Copies of paged keys and values into the tiles that wgmma reads: TMA copies one box for each part
// of a tile that is in one page.
#pragma once

#include "call/tile_pages.cuh"
#include "hopper/panel_tile.cuh"

// The pages of a tile's boxes of BoxKeys keys, from first_key on. For keys from end_key on, it is a
// page before the tensor's first, for which TMA fills in zeros. A warp's lanes create one together
// and each holds all numbers, so that the lane that starts the copies has nothing else to do.
template <int BoxKeys, int Keys, bool Paged = kPaged>
struct BoxPages {
    static constexpr int kNoPage = -1;

    int in_page;  // the first key's place in its page
    int numbers[Keys / BoxKeys];

    __device__ BoxPages(const TilePages<Keys>& pages, int first_key, int end_key)
        : in_page(Keys % kPageSize == 0 ? 0 : first_key % kPageSize) {
#pragma unroll
        for (int box = 0; box < Keys / BoxKeys; ++box) {
            const int key = box * BoxKeys, number = pages.number((in_page + key) / kPageSize);
            numbers[box] = first_key + key < end_key ? number : kNoPage;
        }
    }

    // Starts the copies of a tile, from column first_col on.
    template <class Tile>
    __device__ void copy(Tile& tile, const TensorMap& map, ptx::Barrier& full, int head,
                         int first_col) const {
#pragma unroll
        for (int box = 0; box < Keys / BoxKeys; ++box) {
            const int row = box * BoxKeys;
            copy_tile(tile, map, full, numbers[box], head, (in_page + row) % kPageSize, row,
                      first_col);
        }
    }
};
// Without pages there is nothing to know.
template <int BoxKeys, int Keys>
struct BoxPages<BoxKeys, Keys, false> {
    __device__ BoxPages(const TilePages<Keys>&, int, int) {}
};
