// Gradients of the arrays that a score_mod reads, from the registers of a warpgroup with dS^T of 64
// keys.
#pragma once

#include "gradients/array_gradients.cuh"
#include "hopper/backward/key_softmax.cuh"

// Adds to the gradients of elements that depend on the query alone: sums first over a thread's two
// keys, then over the eight lanes with the same two queries.
template <bool Masked, int BlockM>
__device__ inline void add_to_elements_of_queries(float* sums, const WgmmaSums<BlockM>& ds,
                                                  const KeySoftmax<BlockM>& softmax,
                                                  const TilePlace& place) {
#pragma unroll
    for (int eight = 0; eight < BlockM / 8; ++eight) {
        float gradients[2][kElements] = {};
        int places[2][kElements];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = place.first_row + softmax.query + eight * 8 + e;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = eight * 4 + 2 * half + e;
                ElementSlopes slopes;
                element_slopes(place.features, 0, place.batch, place.head,
                               min(row, softmax.last_row), softmax.key[half], slopes);
                const bool seen = !Masked || softmax.sees(i, place);
#pragma unroll
                for (int at = 0; at < kElements; ++at) {
                    places[e][at] = slopes[at].place;
                    if (seen) gradients[e][at] += ds[i] * slopes[at].slope;
                }
            }
        }
#pragma unroll
        for (int at = 0; at < kElements; ++at) {
            if (!is_of_query(at)) continue;
            // Half of these lanes continue with one query, half with the other.
            const bool second = threadIdx.x & 4;
            float sum = second ? gradients[1][at] : gradients[0][at];
            const float other = second ? gradients[0][at] : gradients[1][at];
            sum += __shfl_xor_sync(0xffffffffu, other, 4);
            sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            if (threadIdx.x % 32 < 8 && sum != 0)
                atomicAdd(sums + (second ? places[1][at] : places[0][at]), sum);
        }
    }
}

// Sums over the four lanes of a key: of four values of each, a lane gets the sum of the one with
// the lane's own number among the four.
__device__ inline float sum_of_own(const float (&values)[4], int lane) {
    const bool second = lane & 2, odd = lane & 1;
    float own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        own[i] = second ? values[2 + i] : values[i];
        const float other = second ? values[i] : values[2 + i];
        own[i] += __shfl_xor_sync(0xffffffffu, other, 2);
    }
    return (odd ? own[1] : own[0]) + __shfl_xor_sync(0xffffffffu, odd ? own[0] : own[1], 1);
}

// Adds to the gradients of elements that depend on the distance of query and key alone: sums first
// over all of a warp's scores with the same distance. All of the tile's scores are seen.
template <int BlockM>
__device__ inline void add_to_elements_of_distances(PendingSums<2, false>& of_arrays, float* sums,
                                                    const WgmmaSums<BlockM>& ds,
                                                    const KeySoftmax<BlockM>& softmax,
                                                    const TilePlace& place) {
    constexpr int kEights = BlockM / 8, kAtOnce = 4;
    const int lane = threadIdx.x % 32, key = lane / 4, pair = lane % 4;
    const auto slopes_at = [&](ElementSlopes& slopes, SplitIndex q_idx, SplitIndex kv_idx) {
        element_slopes(place.features, 0, place.batch, place.head, q_idx, kv_idx, slopes);
    };
    float second_before[kElements] = {}, sum_before[kElements] = {};
    // A lane's distances are multiples of eight from its first. Those of its first eight keys and
    // of its others are the same, but for one at either end.
#pragma unroll
    for (int first = -1; first <= kEights; first += kAtOnce) {
        float of_lanes[kElements][kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            float of_queries[2][kElements] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int eight = first + i + half;
                if (eight < 0 || eight >= kEights) continue;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    ElementSlopes slopes;
                    slopes_at(slopes, {place.first_row + softmax.query, eight * 8 + e},
                              softmax.template key_at<false>(half));
#pragma unroll
                    for (int at = 0; at < kElements; ++at)
                        of_queries[e][at] += ds[eight * 4 + 2 * half + e] * slopes[at].slope;
                }
            }
#pragma unroll
            for (int at = 0; at < kElements; ++at) {
                if (!is_of_distance(at)) continue;
                // A second query is as far from its key as the first is from the key before, or, of
                // the first key, from the last one of the next eight.
                const float second = key == 0 ? second_before[at] : of_queries[1][at];
                second_before[at] = of_queries[1][at];
                const float sum = of_queries[0][at] + __shfl_sync(0xffffffffu, second, lane + 4);
                // Two keys further, the next pair is as far, or is one of the eight before.
                const float own = key >= 2 * pair ? sum : sum_before[at];
                sum_before[at] = sum;
                of_lanes[at][i] = __shfl_sync(0xffffffffu, own, lane + 8 * pair);
            }
        }
        // A query and a key of the tile with the distance whose sum the lane gets. Past the last
        // distance there is nothing to add.
        const int of_first_key = (first + pair) * 8;
        const int query = min(max(of_first_key, 0), BlockM - 1);
        const int from_own = max(query - of_first_key, -key);
        ElementSlopes slopes;
        slopes_at(slopes, place.first_row + query,
                  int(softmax.template key_at<false>(0)) + from_own);
#pragma unroll
        for (int at = 0; at < kElements; ++at) {
            if (!is_of_distance(at)) continue;
            of_arrays.of[0][at].add(sums, slopes[at].place, sum_of_own(of_lanes[at], pair));
        }
    }
}

// Adds a tile's part to the gradients of the array elements that its scores read. Their slopes must
// be the same for all scores.
template <bool Masked, int BlockM>
__device__ inline void add_to_array_gradients(PendingSums<2, false>& of_arrays, float* sums,
                                              const WgmmaSums<BlockM>& ds,
                                              const KeySoftmax<BlockM>& softmax,
                                              const TilePlace& place) {
#pragma unroll
    for (int at = 0; at < BlockM / 2; ++at) {
        const int e = at / 2 % 2, half = 1 - at % 2, i = at / 4 * 4 + 2 * half + e;
        if (Masked && !softmax.sees(i, place)) continue;
        ElementSlopes slopes;
        const SplitIndex q_idx(place.first_row + softmax.query, at / 4 * 8 + e);
        element_slopes(place.features, 0, place.batch, place.head, q_idx,
                       softmax.template key_at<Masked>(half), slopes);
        of_arrays.template add<Masked>(sums, e, half, slopes, ds[i]);
    }
    if constexpr (!Masked && any_of_distance())
        add_to_elements_of_distances(of_arrays, sums, ds, softmax, place);
    if constexpr (any_of_query()) add_to_elements_of_queries<Masked>(sums, ds, softmax, place);
}
