// How two warpgroups that share a tile of keys divide the head dims of its gradients.
#pragma once

#include "hopper/panel_tile.cuh"

// The warpgroup that computes S, and the one that computes dP.
enum Role { kWeights, kWeightGradients };

// A warpgroup's part of a tile's panels.
struct PanelRange {
    int begin, count;

    __device__ constexpr int cols() const { return count * kPanelCols; }
    __device__ constexpr int first_col() const { return begin * kPanelCols; }
};
// Two ways to divide panels: the larger part, if any, goes to the first warpgroup or to the second.
// Both keep equally many panels of sums if the first has more of dK and the second more of dV.
__device__ constexpr PanelRange more_for_first(Role role, int panels) {
    return role == kWeights ? PanelRange{0, ceil_div(panels, 2)}
                            : PanelRange{ceil_div(panels, 2), panels / 2};
}
__device__ constexpr PanelRange more_for_second(Role role, int panels) {
    return role == kWeights ? PanelRange{0, panels / 2}
                            : PanelRange{panels / 2, ceil_div(panels, 2)};
}
