// The online softmax of 16 rows in the fragments of a warp: a lane has part of two rows, one in
// each half of its fragments.
#pragma once

#include "mma/mma_products.cuh"
#include "softmax/online_softmax.cuh"

// The largest of a lane's scores in a row, and of all lanes' scores.
template <int Fragments>
__device__ inline acc_t own_largest(const Fragment (&row)[Fragments], int half) {
    acc_t largest = negative_infinity();
#pragma unroll
    for (int n = 0; n < Fragments; ++n) {
        largest = max(largest, max(row[n][2 * half], row[n][2 * half + 1]));
    }
    return largest;
}
template <int Fragments>
__device__ inline acc_t largest_of(const Fragment (&row)[Fragments], int half) {
    return lanes_max<4>(own_largest(row, half));
}

// Whether one of a lane's scores in a row may exceed a limit when scaled. float64 scores are
// compared by their upper halves, as integers. Integers are ordered like the numbers where these
// are positive, and only those count, unless the limit is negative.
template <int Fragments>
__device__ inline bool may_pass(const Fragment (&row)[Fragments], int half, acc_t scale,
                                acc_t limit) {
    if constexpr (sizeof(acc_t) == sizeof(double)) {
        int upper = 0;
#pragma unroll
        for (int n = 0; n < Fragments; ++n) {
            upper = max(
                upper, max(__double2hiint(row[n][2 * half]), __double2hiint(row[n][2 * half + 1])));
        }
        return __hiloint2double(upper + 1, 0) * scale > limit;
    } else {
        return own_largest(row, half) * scale > limit;
    }
}

// Raises the maxima of both rows to `largest`, and shrinks earlier sums.
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
