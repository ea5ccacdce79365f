// ALiBi (Press et al. 2022) as the Hopper kernels add it to a tile of scores: -slope * |distance|,
// where distance is how far a key lies to the left of the diagonal. On either side of the diagonal
// this is a line: the sum of a term per row and a term per column. So each term is computed once,
// and only one is added to each score.
#pragma once

#include "call/config.cuh"

// The line for a warp's scores of a tile: -step * distance.
struct AlibiLine {
    float step;
    bool bent;  // whether the diagonal passes through: keys to its right are then bent down

    AlibiLine() = default;
    // The distances of this thread's scores range from `least` to `most`.
    __device__ AlibiLine(float slope, int least, int most) : step(slope), bent(false) {
        if constexpr (kCausal) return;  // no row sees a key to the right
        if (__all_sync(0xffffffffu, most <= 0)) {
            step = -slope;
        } else {
            bent = __any_sync(0xffffffffu, least < 0);
        }
    }

    // Bends a score with that distance, before or after the line is added.
    __device__ void bend(float& score, float distance) const {
        score += 2 * step * fminf(distance, 0);
    }
};
