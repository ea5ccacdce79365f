// The keys that a row may see by position alone: a range that follows the diagonal. The diagonal
// ends in the bottom right corner: whatever the lengths are, the last query is at the last key.
#pragma once

#include "call/config.cuh"

struct Mask {
    int seqlen_q, seqlen_k;
    int left, right;  // how far from the diagonal keys are seen, if there is a window

    // Row `row` sees keys [first_key(row), keys_end(row)); rows past the end see none.
    __device__ int keys_end(int row) const {
        if (row >= seqlen_q) return 0;
        if (kWindow) return range_end(diagonal(row), seqlen_k, right);
        return kCausal ? max(diagonal(row) + 1, 0) : seqlen_k;
    }
    __device__ int first_key(int row) const {
        return kWindow ? range_begin(diagonal(row), left) : 0;
    }
    __device__ bool sees_any(int row) const { return keys_end(row) > first_key(row); }
    __device__ bool in_range(int row, int key) const {
        return key < keys_end(row) && (!kWindow || key >= first_key(row));
    }

    // Rows [first_row(key), rows_end(key)) see key `key`.
    __device__ int first_row(int key) const {
        if (kWindow) return range_begin(row_at(key), right);
        return kCausal ? max(row_at(key), 0) : 0;
    }
    __device__ int rows_end(int key) const {
        return kWindow ? range_end(row_at(key), seqlen_q, left) : seqlen_q;
    }

    // The key on the diagonal of a row, even beyond the last key; and the inverse.
    __device__ int diagonal(int row) const { return row + (seqlen_k - seqlen_q); }
    __device__ int row_at(int key) const { return key + (seqlen_q - seqlen_k); }

  private:
    // The end and the beginning of the range within `reach` of a place, clipped to 0 and `length`.
    // A reach may be anything up to 2^31 - 1, so it is only subtracted from numbers that are not
    // negative. Even where the result is not used, the compiler may assume that no sum or
    // difference overflows.
    __device__ static int range_end(int place, int length, int reach) {
        const int beyond = max(length - 1 - place, 0);
        return max(length - max(beyond - reach, 0), 0);
    }
    __device__ static int range_begin(int place, int reach) {
        return max(max(place, 0) - reach, 0);
    }
};
