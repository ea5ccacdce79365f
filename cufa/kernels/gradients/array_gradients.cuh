// The gradients of the arrays that a score_mod reads. Each score adds its gradient, times the slope
// of an element, to that element's sum in the workspace; a separate entry rounds the sums.
//
// Millions of scores may read one element, and additions to one address are serialized. So a lane
// keeps its sum for an element until it reaches a score that reads another element. On tensor
// cores, a lane has pairs of neighbouring queries and two keys eight apart. For elements that
// depend on the query, such as a relative bias along diagonals, it keeps one sum for each query of
// the pair and takes the second key first: on the diagonal, the first key follows eight queries
// later. For other elements it keeps one sum for each key. Elements that depend on the query alone
// do not recur for a lane's next queries, but other lanes of the warp have the same queries: on
// Hopper, these lanes add up their sums first.
#pragma once

#include "call/grid.cuh"
#include "call/params.cuh"

// The derivatives of a score by each of the elements that it reads.
using ElementSlopes = ElementSlope[kElements > 0 ? kElements : 1];

// Whether an element depends on the query and not on the key.
__device__ constexpr bool is_of_query(int element) {
    return changes_with_query(element) && !changes_with_key(element);
}
__device__ constexpr bool any_of_query() {
    for (int i = 0; i < kElements; ++i)
        if (is_of_query(i)) return true;
    return false;
}
__device__ constexpr bool any_of_distance() {
    for (int i = 0; i < kElements; ++i)
        if (is_of_distance(i)) return true;
    return false;
}

// A lane's sum that is still to be added to an element's sum.
struct PendingSum {
    int place = 0;  // the index of the element's sum
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

// A lane's pending sums: Count for each element that scores read; without OfQueries, not for
// elements that depend on the query alone.
template <int Count, bool OfQueries = true>
struct PendingSums {
    PendingSum of[Count][kElements > 0 ? kElements : 1];

    // `gradient` is the gradient of the new score. `of_query` and `of_key` select the sums for
    // elements that depend on the query, and for others.
    template <bool OfDistances = true>
    __device__ void add(acc_t* sums, int of_query, int of_key, const ElementSlopes& slopes,
                        acc_t gradient) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            if (!OfQueries && is_of_query(i)) continue;
            if (!OfDistances && is_of_distance(i)) continue;
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

// One thread per element of all arrays.
template <int Threads>
__device__ inline void round_array_sums(const BackwardParams& params, const acc_t* sums) {
    const long long place = thread_of_grid<Threads>();
    if (place < array_sums(params.features))
        write_array_gradients(params.features, sums, static_cast<int>(place));
}
