// The gradients of the arrays that a score_mod reads: a score adds its own times the slope in an
// element to that element's sum in the workspace, and an entry of its own rounds the sums.
//
// Millions of scores may read one element, and additions to one address come one after the other.
// So a lane keeps what it has for an element until it comes to a score that reads another. On
// tensor cores it has pairs of neighbouring queries, of two keys eight apart. For elements that
// change with the query, as those of a relative bias do along diagonals, it keeps a sum for either
// of the pair, and goes to the second key first: on the diagonal the first one follows, eight
// queries on. For others it keeps one for each key. Elements that change with the query alone are
// of no use to a lane's next queries, but other lanes of a warp have the same queries: those on
// Hopper add theirs up first.
#pragma once

#include "call/warp_rows.cuh"

// By how much a score changes with each of the elements that it reads.
using ElementSlopes = ElementSlope[kElements > 0 ? kElements : 1];

// Whether an element is the same for all keys, and another for each query.
__device__ constexpr bool is_of_query(int element) {
    return changes_with_query(element) && !changes_with_key(element);
}
__device__ constexpr bool any_of_query() {
    for (int i = 0; i < kElements; ++i)
        if (is_of_query(i)) return true;
    return false;
}

// What a lane has yet to add to the sum of one element.
struct PendingSum {
    int place = 0;  // of that sum among all
    acc_t sum = 0;

    __device__ void add(acc_t* sums, int element, acc_t gradient) {
        if (element != place) {
            flush(sums);
            *this = {element};
        }
        sum += gradient;
    }

    __device__ void flush(acc_t* sums) const {
        if (sum != 0) atomicAdd(sums + place, sum);
    }
};

// Those of a lane, so many for each element that scores read; without OfQueries not for elements
// that change with the query alone.
template <int Count, bool OfQueries = true>
struct PendingSums {
    PendingSum of[Count][kElements > 0 ? kElements : 1];

    // `gradient` is that of the new score which score_mod made. `of_query` and `of_key` are which
    // of the sums are for elements that change with the query, and which for others.
    __device__ void add(acc_t* sums, int of_query, int of_key, const ElementSlopes& slopes,
                        acc_t gradient) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            if (!OfQueries && is_of_query(i)) continue;
            PendingSum& own = of[changes_with_query(i) ? of_query : of_key][i];
            own.add(sums, slopes[i].place, gradient * slopes[i].slope);
        }
    }

    __device__ void flush(acc_t* sums) const {
#pragma unroll
        for (int own = 0; own < Count; ++own)
#pragma unroll
            for (int i = 0; i < kElements; ++i) of[own][i].flush(sums);
    }
};

// A thread for each element of all arrays.
template <int Threads>
__device__ inline void round_array_sums(const BackwardParams& params, const acc_t* sums) {
    const int place = blockIdx.x * Threads + threadIdx.x;
    if (place < array_sums(params.features)) write_array_gradients(params.features, sums, place);
}
