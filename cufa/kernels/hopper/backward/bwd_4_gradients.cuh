// How a warpgroup of bwd_4_wgmma hands out the gradients of its keys: where the keys and values
// were, by an outbox or, if blocks have parts of the heads or rows, to sums in global memory.
#pragma once

#include "hopper/backward/bwd_4_block.cuh"

// Named barriers; __syncthreads has number 0.
enum NamedBarrier { kAllConsumers = 1, kFirstTurn, kFirstOfWarpgroup = kFirstTurn + kConsumers };

struct GradientHandout {
    Smem& smem;
    const Params& params;
    const int warpgroup;
    RingPosition<kKeyStages> keys_at;
    RingPosition<1> outbox_to;

    // What the warpgroup works on.
    __device__ const KeyWork& work() const { return smem.work[keys_at.stage]; }

    // Hands over the gradients of this warpgroup's values, to be stored.
    __device__ void hand_out_values(WgmmaSums<kValue>& dv) {
        if constexpr (kDropout) {
#pragma unroll
            for (float& sum : dv) sum *= kept_scale(params.call.features);
        }
        if constexpr (kParts > 1) {
            key_sums().write_values<kValue>(params.call, work(), warpgroup * kWgmmaM, 0, dv);
        } else if constexpr (kOutboxes) {
            wait_for_outbox();
            write_rounded<kValue>(smem.outboxes[warpgroup].values(), dv);
            post({OutboxLabel::kValues, nullptr, work()});
        } else {
            // All of its warps must be done with the values. With a part of each tile of dQ, they
            // have waited for the last dS^T, and so for each other.
            if (kWholeQueries) ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + warpgroup);
            write_rounded<kValue>(smem.v[keys_at.stage][warpgroup], dv);
        }
    }

    // The same for its keys. Where the gradients take their place, the other warpgroup must be
    // done, too.
    __device__ void hand_out_keys(WgmmaSums<kHead>& dk) {
        // Parts are scaled later.
        const float scale =
            (kParts > 1 ? 1 : params.call.softmax_scale) * kept_scale(params.call.features);
#pragma unroll
        for (int i = 0; i < kHead / 2; ++i) dk[i] *= scale;
        if constexpr (kParts > 1) {
            key_sums().write_keys<kHead>(params.call, work(), warpgroup * kWgmmaM, 0, dk);
            give_up_keys();
        } else if constexpr (kOutboxes) {
            const KeyWork done = work();
            give_up_keys();
            wait_for_outbox();
            write_rounded<kHead>(smem.outboxes[warpgroup].keys(), dk);
            post({OutboxLabel::kKeys, nullptr, done});
        } else {
            ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
            write_rounded<kHead>(smem.k[keys_at.stage][warpgroup], dk);
            ptx::proxy_fence();
            give_up_keys();
        }
        keys_at.advance();
    }

    __device__ void wait_for_outbox() { smem.outbox_rings[warpgroup].wait_empty(outbox_to); }

    // Hands the outbox to the sender.
    __device__ void post(const OutboxLabel& label) {
        if (threadIdx.x % kWarpgroup == 0) smem.outbox_labels[warpgroup] = label;
        ptx::proxy_fence();
        ptx::barrier_arrive(smem.outbox_rings[warpgroup].full[0]);
        outbox_to.advance();
    }

  private:
    __device__ WgmmaKeySums key_sums() const { return QueryWorkspace(params.call).key_sums; }

    // Signals that this thread is done with the keys and, if gradients lie there, has written them.
    __device__ void give_up_keys() {
        if constexpr (kOutboxes) {
            release(smem.keys_ring, keys_at);
        } else {
            ptx::barrier_arrive(smem.gradients[keys_at.stage]);
        }
    }
};
