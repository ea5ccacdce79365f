// Values that the products of the Hopper forwards read as they were copied. Where a mask cuts
// through a tile, its NaN and infinity are taken out before the product. Inspectors look for
// them.
#pragma once

#include "hopper/forward/wgmma_forward_copies.cuh"
#include "hopper/nonfinite_elements.cuh"

// Whether a tile may have keys in memory that do not count for some rows or for all. Beyond the end
// of the tensor, TMA fills in zeros.
constexpr bool kCutKeys = kRangeMask || kEndsByHead || kPacked || kUsedKeys || kKeyMask;
// Inspectors: the helpers that look for NaN and infinity in such tiles, or all warps that widen
// keys.
constexpr int kInspectors = !kCutKeys ? 0 : kWidensKeys ? kWarps : kHelperWarps;

// The inspectors' shared memory.
struct Inspection {
    ptx::Barrier done[kStages];
    unsigned int found[kStages][kWarps];  // what each inspector found

    __device__ void init() {
        for (ptx::Barrier& barrier : done)
            ptx::barrier_init(barrier, kInspectors == 0 ? 1 : kInspectors);
    }
    __device__ void report(RingPosition<kStages> at, int inspector, bool what) {
        found[at.stage][inspector] = what;
        ptx::barrier_arrive(done[at.stage]);
    }
};

// Says for each tile of values that a mask cuts through whether it has NaN or infinity.
template <class Smem>
__device__ inline void inspect_values(Smem& smem, const Params& params, int inspector) {
    constexpr int kLookers = (kInspectors == 0 ? 1 : kInspectors) * 32;
    const int lane = threadIdx.x % 32;
    follow_values(smem, params, [&](bool cut, bool, RingPosition<kStages> at) {
        bool found = false;
        if (cut)
            found = finds_nonfinite<kLookers>(value_columns(value_tiles(smem)[at.stage]),
                                              inspector * 32 + lane);
        found = __any_sync(0xffffffffu, found);
        __syncwarp();  // a vote does not order reads
        if (lane == 0) {
            smem.helpers.report(at, inspector, found);
            value_ring(smem).release(at);
        }
    });
}

// A warpgroup that computes with these values, as Base does.
template <class Base>
struct InspectedConsumer : Base {
    using Base::Base;
    using Base::smem;
    using Base::v_at;
    using typename Base::Output;

    template <int Pending>
    __device__ void wait_output(Output& o, const WorkTile&, int) {
        wait_product<Pending>(o);
        release_and_advance(value_ring(smem), v_at);
    }

    static constexpr int kSums = sizeof(Output) / sizeof(float);

    // Adds the NaN and infinity of a key to the sums of one of a thread's rows.
    template <class Values>
    __device__ static void add_nonfinite(Output& o, Values& values, int key, int half) {
        if constexpr (kColumnWarpgroups > 1) {  // so many sums at once would take long to compile
#pragma unroll 1
            for (int i = 0; i < kSums / 2; ++i) {
                const scalar_t value = *values.at(key, i / 2 * 8 + col_of_thread() + i % 2);
                if (!is_finite(value)) add_at(o, i / 2 * 4 + 2 * half + i % 2, to_acc(value));
            }
        } else {
#pragma unroll
            for (int i = 2 * half; i < kSums; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const scalar_t value = *values.at(key, i / 4 * 8 + col_of_thread() + e);
                    if (!is_finite(value)) o[i + e] += to_acc(value);
                }
        }
    }

    // Where a mask cuts through a tile, a value that is NaN or infinite must reach the rows that
    // see its key, and no other; but 0 * NaN is NaN. Such values are added here to the outputs of
    // the rows that see them, whatever their weight, and are zero in the product.
    __device__ void take_out_nonfinite(Output& o, const WorkTile& work, int tile) {
        if (!kCutKeys) return;
        wait_for(smem.helpers.done[v_at.stage], v_at.parity, v_at.stage);
        unsigned int found = 0;
#pragma unroll
        for (int i = 0; i < kInspectors; ++i) found |= smem.helpers.found[v_at.stage][i];
        // All lanes must have read before one releases the stage; with several teams, turns ensure
        // it.
        if (kTeams == 1) __syncwarp();
        if (!found) return;

        auto& v = value_columns(value_tiles(smem)[v_at.stage]);
        auto& own = own_columns(v, Base::warpgroup);
        const Mask mask = this->mask_of(work);
        for (int key = 0; key < kBlockN; ++key)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!this->sees(mask, work, row_of(work, half), tile * kBlockN + key)) continue;
                add_nonfinite(o, own, key, half);
            }
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
        clear_nonfinite<kConsumers * kWarpgroup>(v, threadIdx.x - kFirstConsumer * kWarpgroup);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
    }
};
