// The online softmax of 16 rows in the fragments of a warp: a lane has part of two rows, one in
// each half of its fragments.
#pragma once

#include "mma_tiles.cuh"
#include "online_softmax.cuh"

// The largest of a row's scores.
template <int Fragments>
__device__ inline acc_t largest_of(const Fragment (&row)[Fragments], int half) {
    acc_t largest = negative_infinity();
#pragma unroll
    for (int n = 0; n < Fragments; ++n) {
        largest = max(largest, max(row[n][2 * half], row[n][2 * half + 1]));
    }
    return lanes_max<4>(largest);
}

// Raises both rows' maxima to these, and shrinks what has been summed up so far.
template <int Fragments>
__device__ inline void raise_maxima(OnlineSoftmax (&softmax)[2], Fragment (&o)[Fragments],
                                    const acc_t (&largest)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const acc_t shrink = softmax[half].raise_max(largest[half]);
#pragma unroll
        for (int n = 0; n < Fragments; ++n) {
            o[n][2 * half] *= shrink;
            o[n][2 * half + 1] *= shrink;
        }
    }
}
