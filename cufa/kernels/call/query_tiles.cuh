// Which tiles of queries see the keys of a tile.
#pragma once

#include "call/key_tiles.cuh"
#include "call/tensor.cuh"

template <int BlockM>
struct QueryTiles {
    int begin, end;              // the rows that see some key, from the first of a tile on
    int whole_begin, whole_end;  // the rows that see every key, if the tile is a whole one

    // Both ends of who sees a key move on from key to key, if they move.
    __device__ QueryTiles(const Mask& mask, int first_key, int keys) {
        const int last_key = min(first_key + keys, mask.seqlen_k) - 1;
        const bool whole = first_key + keys <= mask.seqlen_k;
        begin = mask.first_row(first_key) / BlockM * BlockM;
        end = mask.rows_end(last_key);
        if (kUsedKeys && last_key < first_key) end = 0;  // none of them counts
        whole_begin = whole ? mask.first_row(last_key) : mask.seqlen_q;
        whole_end = mask.rows_end(first_key);
    }

    // Whether some key of the tile is not seen by all BlockM rows from first_row on, which is so if
    // a mask may cut through it.
    __device__ bool masked(int first_row, bool cut = kKeyMask) const {
        return cut || first_row < whole_begin || whole_end - first_row < BlockM;
    }
};
