// The tiles of keys that the rows of a tile of queries see.
#pragma once

#include "scores/mask.cuh"

// Whether rows of one tile may see only some keys of a tile.
constexpr bool kCutTiles = kRangeMask || kKeyMask;

template <int BlockN>
struct KeyTiles {
    int begin, end;              // the keys that some row sees, from the first of a tile on
    int whole_begin, whole_end;  // the keys that every row sees

    // Both ends of what a row sees never decrease from row to row.
    __device__ KeyTiles(const Mask& mask, int first_row, int rows) {
        whole_end = kRangeMask ? mask.keys_end(first_row) : mask.seqlen_k;
        const int last_row = min(first_row + rows, mask.seqlen_q) - 1;
        end = mask.keys_end(last_row);
        begin = mask.first_key(first_row) / BlockN * BlockN;
        whole_begin = mask.first_key(last_row);
    }

    // Whether some row does not see all keys of the tile that begins with first_key. True if a mask
    // may cut through the tile.
    __device__ bool masked(int first_key, bool cut = kKeyMask) const {
        return cut || whole_end - first_key < BlockN || (kWindow && first_key < whole_begin);
    }
};
