// How partners, two blocks of a cluster that have half of the head dims each, add up their scores:
// a warpgroup sends its sums to the same warpgroup of the partner and adds those that come from
// there.
#pragma once

#include "hopper/pipeline.cuh"
#include "hopper/wgmma_products.cuh"

// What comes from the partner's warpgroup, Count sums of each thread, and who may write it.
template <int Count>
struct PartnerSums {
    // Those of neighbouring threads are adjacent.
    Pack<float, 4> fours[Count / 4][kWarpgroup];
    ptx::Barrier full;           // here
    ptx::Barrier partner_empty;  // there

    __device__ void init() {
        ptx::barrier_init(full, 1);
        ptx::barrier_init(partner_empty, kWarpgroup / 32);
    }

    // Adds the partner's sums to those of this block. Both get the same bits.
    __device__ void add_to(float (&sums)[Count], RingPosition<1> at) {
        const int thread = threadIdx.x % kWarpgroup;
        if (thread == 0) ptx::barrier_arrive_expecting(full, sizeof(fours));
        wait_for_partner(partner_empty, at.parity ^ 1);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) {
            const float four[] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
            ptx::send_to_partner(fours[i][thread].v, four, full);
        }
        wait_for_partner(full, at.parity);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) {
            const Pack<float, 4> four = fours[i][thread];
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[4 * i + e] += four[e];
        }
        __syncwarp();
        if (thread % 32 == 0) ptx::barrier_arrive_at_partner(partner_empty);
    }
};
