// Values that the products of the Hopper forwards read as they were copied. Where a mask cuts
// through a tile, NaN and infinity in it are taken out before the product: warps beside the
// producer look for them.
#pragma once

#include "hopper/forward/wgmma_forward.cuh"
#include "hopper/forward/wgmma_forward_copies.cuh"

// Whether a tile of keys may have some that count for none or not for all of the rows, and yet be
// in memory: beyond the last key of all, the copy engine fills in zeros.
constexpr bool kCutKeys = kRangeMask || kPacked || kUsedKeys || kKeyMask;
// Warps beside the producer that look for NaN and infinity in those tiles.
constexpr int kInspectors = kCutKeys ? kWarpgroup / 32 - 1 : 0;

// What is in shared memory for that.
struct Inspection {
    ptx::Barrier done[kStages];
    unsigned int found[kStages][kWarpgroup / 32];  // what each inspector found

    __device__ void init() {
        for (ptx::Barrier& barrier : done)
            ptx::barrier_init(barrier, kInspectors == 0 ? 1 : kInspectors);
    }
};

// Says of every tile of values that a mask cuts through whether there is NaN or infinity in it.
template <class Smem>
__device__ inline void inspect_values(Smem& smem, const Params& params, int inspector) {
    constexpr int kLookers = (kInspectors == 0 ? 1 : kInspectors) * 32;
    const int lane = threadIdx.x % 32;
    follow_values(smem, params, [&](bool cut, bool, RingPosition<kStages> at) {
        bool found = false;
        if (cut) found = finds_nonfinite<kLookers>(smem.v[at.stage], inspector * 32 + lane);
        found = __any_sync(0xffffffffu, found);
        __syncwarp();  // a vote says nothing of what was read
        if (lane == 0) {
            smem.helpers.found[at.stage][inspector] = found;
            ptx::barrier_arrive(smem.helpers.done[at.stage]);
            smem.v_ring.release(at);
        }
    });
}

// A warpgroup that computes with such values.
template <class Self, class Smem, int Dims>
struct InspectedConsumer : ForwardConsumer<Self, Smem, Dims> {
    using Base = ForwardConsumer<Self, Smem, Dims>;
    using Base::Base;
    using Base::smem;
    using Base::v_at;
    using typename Base::Output;

    template <int Pending>
    __device__ void wait_output(Output& o, const WorkTile&, int) {
        wait_product<Pending>(o);
        release_and_advance(smem.v_ring, v_at);
    }

    // Where a mask cuts through a tile, a value that is NaN or infinite must reach the rows that
    // see its key and no other; but in the product 0 * NaN is NaN. Such values are added here to
    // the outputs of the rows that see them, whatever their weight, and are zero in the product.
    __device__ void take_out_nonfinite(Output& o, const WorkTile& work, int tile) {
        if (!kCutKeys) return;
        wait_for(smem.helpers.done[v_at.stage], v_at.parity, v_at.stage);
        unsigned int found = 0;
#pragma unroll
        for (int i = 0; i < kInspectors; ++i) found |= smem.helpers.found[v_at.stage][i];
        // All have read before one says that the stage is empty; of several warpgroups, turns do.
        if (kConsumers == 1) __syncwarp();
        if (!found) return;

        auto& v = smem.v[v_at.stage];
        const Mask mask = this->mask_of(work);
        for (int key = 0; key < kBlockN; ++key)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!this->sees(mask, work, row_of(work, half), tile * kBlockN + key)) continue;
#pragma unroll
                for (int i = 2 * half; i < Dims / 2; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const scalar_t value = *v.at(key, i / 4 * 8 + col_of_thread() + e);
                        if (!is_finite(value)) o[i + e] += to_acc(value);
                    }
            }
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
        clear_nonfinite<kConsumers * kWarpgroup>(v, threadIdx.x - kWarpgroup);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
    }
};
