// The gradients of the arrays that a score_mod reads. Each score adds its gradient, times the slope
// of an element, to that element's sum in the workspace; a separate entry rounds the sums.
//
// Millions of scores may read one element, and additions to one address are serialized. So a lane
// keeps its sum for an element until it reaches a score that reads another element. On tensor
// cores, a lane has pairs of neighbouring queries and two keys eight apart. For elements that
// depend on the query it keeps one sum for each query of the pair and takes the second key first:
// on the diagonal, the first key follows eight queries later. For other elements it keeps one sum
// for each key. Elements that depend on the distance of query and key alone, such as a relative
// bias, are the same along diagonals of a warp's scores: on tensor cores its lanes add these up
// first, in tiles that no mask cuts. Elements that depend on the query alone do not recur for a
// lane's next queries, but other lanes of the warp have the same queries: on Hopper, these lanes
// add up their sums first.
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
    // elements that depend on the query, and for others. Without OfDistances, it leaves out those
    // that add_to_elements_of_distances adds to.
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

// Sums over the four lanes of a key: of four values of each, a lane gets the sum of the one with
// the lane's own number among them.
__device__ inline acc_t sum_of_own(const acc_t (&values)[4], int number) {
    const bool second = number & 2, odd = number & 1;
    acc_t own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        own[i] = second ? values[2 + i] : values[i];
        const acc_t other = second ? values[i] : values[2 + i];
        own[i] += __shfl_xor_sync(0xffffffffu, other, 2);
    }
    return (odd ? own[1] : own[0]) + __shfl_xor_sync(0xffffffffu, odd ? own[0] : own[1], 1);
}

// Adds to the gradients of elements that depend on the distance of query and key alone: sums first
// over all scores of a warp with the same distance. These are the scores of Queries queries and 16
// keys; all are seen. A lane has two of each eight queries and two keys, gradient_of(eight, half,
// e); slopes_at(slopes, q_idx, kv_idx) finds the slopes of elements. `pending` are any of the
// lane's.
template <int Queries, int Count, class GradientOf, class SlopesAt>
__device__ inline void add_to_elements_of_distances(PendingSum (&pending)[Count], acc_t* sums,
                                                    int first_query, int first_key,
                                                    const GradientOf& gradient_of,
                                                    const SlopesAt& slopes_at) {
    constexpr int kEights = Queries / 8, kAtOnce = 4;
    const int lane = threadIdx.x % 32, key = lane / 4, pair = lane % 4;
    acc_t second_before[Count] = {}, sum_before[Count] = {};
    // A lane's distances are multiples of eight from its first. Those of its two keys are the same,
    // but for one at either end.
#pragma unroll
    for (int first_eight = -1; first_eight <= kEights; first_eight += kAtOnce) {
        acc_t of_lanes[Count][kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            acc_t of_queries[2][Count] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int eight = first_eight + i + half;
                if (eight < 0 || eight >= kEights) continue;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    ElementSlopes slopes;
                    slopes_at(slopes, {first_query + 2 * pair, eight * 8 + e},
                              {first_key + key, half * 8});
#pragma unroll
                    for (int at = 0; at < Count; ++at)
                        of_queries[e][at] += gradient_of(eight, half, e) * slopes[at].slope;
                }
            }
#pragma unroll
            for (int at = 0; at < Count; ++at) {
                if (!is_of_distance(at)) continue;
                // A second query is as far from its key as the first is from the key before, or, of
                // the first key, from the last one of the next eight.
                const acc_t second = key == 0 ? second_before[at] : of_queries[1][at];
                second_before[at] = of_queries[1][at];
                const acc_t sum = of_queries[0][at] + __shfl_sync(0xffffffffu, second, lane + 4);
                // Two keys further, the next pair is as far, or is one of the eight before.
                const acc_t own = key >= 2 * pair ? sum : sum_before[at];
                sum_before[at] = sum;
                of_lanes[at][i] = __shfl_sync(0xffffffffu, own, lane + 8 * pair);
            }
        }
        // A query and a key of the tile with the distance whose sum the lane gets. Past the last
        // distance there is nothing to add.
        const int from_first_key = (first_eight + pair) * 8;
        const int query = min(max(from_first_key, 0), Queries - 1);
        const int from_own_key = max(query - from_first_key, -key);
        ElementSlopes slopes;
        slopes_at(slopes, first_query + query, first_key + key + from_own_key);
#pragma unroll
        for (int at = 0; at < Count; ++at) {
            if (is_of_distance(at))
                pending[at].add(sums, slopes[at].place, sum_of_own(of_lanes[at], pair));
        }
    }
}

// One thread per element of all arrays.
template <int Threads>
__device__ inline void round_array_sums(const BackwardParams& params, const acc_t* sums) {
    const long long place = thread_of_grid<Threads>();
    if (place < array_sums(params.features))
        write_array_gradients(params.features, sums, static_cast<int>(place));
}
