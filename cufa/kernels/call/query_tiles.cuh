// The tiles of queries that see the keys of a tile.
#pragma once

#include "call/key_tiles.cuh"
#include "call/tensor.cuh"

template <int BlockM>
struct QueryTiles {
    int begin, end;              // the rows that see some key, from the first of a tile on
    int whole_begin, whole_end;  // the rows that see every key, if the tile is whole

    // Both ends of the rows that see a key never decrease from key to key.
    __device__ QueryTiles(const Mask& mask, int first_key, int keys) {
        const int last_key = min(first_key + keys, mask.seqlen_k) - 1;
        const bool whole = first_key + keys <= mask.seqlen_k;
        begin = mask.first_row(first_key) / BlockM * BlockM;
        end = mask.rows_end(last_key);
        if (kUsedKeys && last_key < first_key) end = 0;  // none of the keys counts
        whole_begin = whole ? mask.first_row(last_key) : mask.seqlen_q;
        whole_end = mask.rows_end(first_key);
    }

    // Whether some key of the tile is not seen by all BlockM rows from first_row on. True if a mask
    // may cut through the tile.
    __device__ bool masked(int first_row, bool cut = kKeyMask) const {
        return cut || first_row < whole_begin || whole_end - first_row < BlockM;
    }
};
