// ALiBi as the Hopper kernels add it to a tile of scores: -slope * |distance|, the distance of a
// key from the diagonal being that by which it lies to the left. On either side that is a line: it
// is the sum of what is the same for a whole row and what is the same for a whole column, so that
// either is worked out once, and but one of them is added to each score.
#pragma once

#include "call/params.cuh"
#include "scores/mask.cuh"

// The slope of a head.
__device__ inline float alibi_slope_of(const Features& features, int batch, int head) {
    return static_cast<const float*>(
        features.alibi_slopes)[batch * features.alibi_batch_stride + head];
}

// The line of the scores that a warp has of a tile: -step * distance.
struct AlibiLine {
    float step;
    bool bent;  // whether the diagonal passes through: keys to its right are to be bent down

    AlibiLine() = default;
    // The distances of this thread's scores are from `least` to `most`.
    __device__ AlibiLine(float slope, int least, int most) : step(slope), bent(false) {
        if constexpr (kCausal) return;  // nobody sees a key to the right
        if (__all_sync(0xffffffffu, most <= 0)) {
            step = -slope;
        } else {
            bent = __any_sync(0xffffffffu, least < 0);
        }
    }

    // Bends a score of that distance, to which the line was added or will be.
    __device__ void bend(float& score, float distance) const {
        score += 2 * step * fminf(distance, 0);
    }
};
