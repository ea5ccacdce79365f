// How the consumers of a block share the tensor cores.
#pragma once

#include "hopper/wgmma_products.cuh"
#include "ptx/ptx_common.cuh"

// The warpgroups issue their products in turn. While one waits for its turn, or for its products,
// another's softmax runs. Each has a named barrier, from FirstBarrier on.
template <int Warpgroups, int FirstBarrier>
struct ProductTurns {
    int warpgroup;

    __device__ explicit ProductTurns(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == Warpgroups - 1) pass();
    }
    __device__ void wait() const {
        if (Warpgroups > 1) ptx::named_barrier_sync<2 * kWarpgroup>(FirstBarrier + warpgroup);
    }
    __device__ void pass() const {
        const int next = warpgroup == Warpgroups - 1 ? 0 : warpgroup + 1;
        if (Warpgroups > 1) ptx::named_barrier_arrive<2 * kWarpgroup>(FirstBarrier + next);
    }
};
