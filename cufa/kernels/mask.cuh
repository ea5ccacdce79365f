// Which keys a query row sees. Causal masks are aligned to the bottom-right corner: the last query
// sees every key, whatever the two lengths are.
#pragma once

template <bool Causal>
struct Mask {
    int seqlen_q, seqlen_k;

    // Row `row` sees keys [0, keys_seen(row)); rows past the end see none.
    __device__ int keys_seen(int row) const {
        if (row >= seqlen_q) return 0;
        if (!Causal) return seqlen_k;
        const int end = row + 1 + seqlen_k - seqlen_q;
        return end < 0 ? 0 : end;
    }

    // Rows [first_row(key), seqlen_q) see key `key`.
    __device__ int first_row(int key) const {
        if (!Causal) return 0;
        const int row = key + seqlen_q - seqlen_k;
        return row < 0 ? 0 : row;
    }
};
