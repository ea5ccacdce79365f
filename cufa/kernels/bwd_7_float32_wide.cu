// bwd_7_float32_wide: the float32 backward on Hopper for head dims over 128.
//
// Change from bwd_6_float32: dK and dV of 64 keys are too wide for one warpgroup's registers, and
// shared memory has room for one tile of queries. So both warpgroups work on the same tile and
// divide the head dims of the gradients, as in bwd_5_wgmma_wide. One computes S^T, the other dP^T.
// Of half of the queries each gives its scores to the other, through shared memory, and of the
// other half it makes P^T and dS^T. These replace the scores in shared memory, for dV += P^T dO,
// dK += dS^T Q and dQ^T = K^T dS^T. Threads add dQ^T to the sums from their registers, as they come
// or in the order of keys.
//
// Launches: with a mask or a mask_mod, seen_tiles, as in fwd_5_mma; to_halves (also D; sets the
// sums of dQ^T to zero); key_tiles; store_query_gradients, which turns these sums into rows;
// exact_tiles, for numbers that halves cannot hold, with blocks for tiles of keys and for tiles of
// queries; sink_gradient, if wanted.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     block: 64 keys of one KV head, for all query heads that share them; warpgroup: whole
//          panels of the head dims of dK, dV and dQ
// Shared   K and V; STAGES tiles of Q and dO with the statistics of their rows; S^T and dP^T, later
//          P^T and dS^T
// Global   workspace: as bwd_6_float32, with sums of dQ^T
// Needs    sm_90a
// Writes   dQ, dK, dV
#include "call/grid.cuh"
#include "hopper/float32/backward_exact.cuh"
#include "hopper/float32/backward_halves.cuh"
#include "hopper/float32/bwd_7_consumer.cuh"

constexpr int kThreads = THREADS;
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
static_assert((kConsumers + 1) * kWarpgroup == kThreads, "one warpgroup copies, others compute");
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "the host passes a different struct");

extern "C" __global__ void __launch_bounds__(kHalvingThreads)
    seen_tiles(const __grid_constant__ BackwardParams params) {
    const long long tile = warp_of_grid<kHalvingThreads>();
    if (kKeyMask && tile < Seen::count(params)) Seen::find(seen_parts(params), params, tile);
}

extern "C" __global__ void __launch_bounds__(kHalvingThreads)
    to_halves(const __grid_constant__ BackwardParams params) {
    ptx::let_next_launch_begin();
    halve_tile(params, shared_memory<HalvingSmem, HALVING_SMEM_BYTES>());
}

// ---- the producer: one thread ----

template <class Walk>
__device__ inline void produce_queries(Smem& smem, const BackwardParams& call, const KeyTile& work,
                                       Walk walk) {
    const Workspace workspace(call);
    RingPosition<kStages> at;
    for (; !walk.at_end(); walk.advance(), at.advance()) {
        const QueryHalves& from =
            workspace.queries_from(work.sequence, walk.head(), walk.first_row());
        smem.dout_ring.wait_empty(at);
        smem.dout_ring.label(at, walk.label());
        ptx::copy_bytes(&smem.dout[at.stage], &from.dout, OutRows::kBytes,
                        smem.dout_ring.announce(at, OutRows::kBytes));
        smem.q_ring.wait_empty(at);
        ptx::Barrier& full = smem.q_ring.announce(at, QueryRows::kBytes + sizeof(Statistics));
        ptx::copy_bytes(&smem.q[at.stage], &from.q, QueryRows::kBytes, full);
        ptx::copy_bytes(&smem.statistics[at.stage], &from.statistics, sizeof(Statistics), full);
    }
    if constexpr (kKeyMask) {
        smem.dout_ring.wait_empty(at);
        smem.dout_ring.label(at, no_tile());
        ptx::barrier_arrive(smem.dout_ring.full[at.stage]);
    }
}

__device__ inline void produce(Smem& smem, const BackwardParams& call, const KeyTile& work) {
    produce_keys(smem, call, work);
    if constexpr (kKeyMask) {
        produce_queries(smem, call, work, SeenWalk(call, work, 0, 1));
    } else {
        produce_queries(smem, call, work, RangeWalk(call, work, 0, 1));
    }
}

// ---- the consumers ----

// Processes a tile of queries: adds its part to the gradients.
template <Role kRole, class Walk>
__device__ inline void attend(Consumer<kRole>& consumer, const Walk& walk) {
    ScoreParts own;
    typename Consumer<kRole>::Scores s, dp;
    consumer.issue_scores(own);
    consumer.pass_turn();
    consumer.look_up(walk);
    consumer.wait_for_others();
    consumer.wait_for_scores(own);
    const Statistics& rows = consumer.rows();
    if (!halves_hold(rows, consumer.smem.units, walk.masked(rows.first_row))) {
        consumer.leave_to_exact();
        return;
    }
    consumer.exchange(own[0], s, dp);
    consumer.differentiate(s, dp, walk);
    const int exponent = consumer.share(s, dp);
    consumer.add_key_gradients(exponent);
    consumer.add_value_gradients();
    consumer.add_query_gradients(exponent);
}

template <Role kRole, class Walk>
__device__ inline void attend_all(Consumer<kRole>& consumer, Walk walk) {
    while (!walk.at_end()) {
        attend(consumer, walk);
        consumer.at.advance();
        walk.advance();
    }
}

template <Role kRole>
__device__ inline void consume(Smem& smem, const BackwardParams& call, const KeyTile& work) {
    Consumer<kRole> consumer(smem, call, work);
    consumer.wait_for_keys();
    if constexpr (kKeyMask) {
        attend_all(consumer, LabelledWalk(smem.dout_ring, consumer.at));
    } else {
        attend_all(consumer, RangeWalk(call, work, 0, 1));
    }
    consumer.pass_turn();
    consumer.store();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    key_tiles(const __grid_constant__ BackwardParams params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) smem.init();
    __syncthreads();
    ptx::wait_for_launch_before();

    const KeyTile work = key_tile(params);
    // Packed sequences do not have all tiles.
    if (kPacked && work.first_key >= end_of_keys(params, work.sequence)) return;
    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        if (threadIdx.x == 0) produce(smem, params, work);
    } else if (warpgroup == 1) {
        ptx::registers_increase<kConsumerRegisters>();
        consume<kWeights>(smem, params, work);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        consume<kWeightGradients>(smem, params, work);
    }
}

extern "C" __global__ void __launch_bounds__(kHalvingThreads)
    store_query_gradients(const __grid_constant__ BackwardParams params) {
    ptx::wait_for_launch_before();
    store_queries(params);
}

extern "C" __global__ void __launch_bounds__(kExactThreads)
    exact_tiles(const __grid_constant__ BackwardParams params) {
    ptx::wait_for_launch_before();
    add_left(shared_memory<ExactSmem, EXACT_SMEM_BYTES>(), params);
}

extern "C" __global__ void __launch_bounds__(kHalvingThreads)
    sink_gradient(const __grid_constant__ BackwardParams params) {
    if constexpr (kSink)
        sum_up_sink(params, shared_memory<WarpSums<kHalvingThreads>, SINK_SMEM_BYTES>());
}
