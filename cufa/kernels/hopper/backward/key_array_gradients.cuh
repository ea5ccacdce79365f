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

// Adds a tile's part to the gradients of the array elements that its scores read. Neither their
// slopes nor their indices depend on scores.
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
    if constexpr (!Masked && any_of_distance()) {
        const int first_key = softmax.key[0] - static_cast<int>(threadIdx.x % 32 / 4);
        add_to_elements_of_distances<BlockM>(
            of_arrays.of[0], sums, place.first_row, first_key,
            [&](int eight, int half, int e) { return ds[eight * 4 + 2 * half + e]; },
            [&](ElementSlopes& slopes, SplitIndex q_idx, SplitIndex kv_idx) {
                element_slopes(place.features, 0, place.batch, place.head, q_idx, kv_idx, slopes);
            });
    }
    if constexpr (any_of_query()) add_to_elements_of_queries<Masked>(sums, ds, softmax, place);
}
