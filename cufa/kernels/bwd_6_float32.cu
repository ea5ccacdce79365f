// bwd_6_float32: the float32 backward on Hopper's 16-bit tensor cores.
//
// Change from bwd_4_wgmma: each element is a sum of two halves, as in fwd_9_float32, and each
// product becomes three. A first launch makes the halves (backward_halves.cuh), in tiles laid out
// as in shared memory. Shared memory has room for 64 keys and a tile of queries for each warpgroup.
// So the warpgroups share the keys and alternate between tiles of queries, and their parts of dK
// and dV are added up at the end. Tensor cores truncate the sums that they add to, so a tile's part
// of dK and dV is a product of its own, added afterwards. A tile's part of dQ replaces its queries
// in shared memory, and TMA adds it to the sums: a warpgroup's own additions would delay all its
// other memory accesses. If every run must give the same bits, blocks add in the order of their
// keys. Products of one warpgroup overlap the softmax of the other.
//
// Launches: with a mask or a mask_mod, seen_tiles, as in fwd_5_mma; to_halves (also D; sets the
// sums of dQ to zero); key_tiles; store_query_gradients, which turns these sums into rows;
// exact_tiles, for numbers that halves cannot hold, with blocks for tiles of keys and for tiles of
// queries; sink_gradient, if wanted.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (...,
//          value_dim), dO, O as Q with value_dim; dQ, dK, dV as Q, K, V; packed sequences: (tokens,
//          heads, dim)
// Owns     block: 64 keys of one KV head, for all query heads that share them
// Shared   K and V; for each warpgroup STAGES tiles of Q and dO, later dQ, with the statistics of
//          their rows, and dS^T
// Global   workspace: tiles of halves of queries and dO with their sums of dQ and how many tiles of
//          keys are done with those, then of halves of keys and values; with a mask or a mask_mod,
//          what it shows of each tile of scores
// Needs    sm_90a
// Writes   dQ, dK, dV
#include "call/grid.cuh"
#include "hopper/float32/addition_turns.cuh"
#include "hopper/float32/backward_exact.cuh"
#include "hopper/float32/backward_halves.cuh"
#include "hopper/float32/bwd_6_consumer.cuh"

constexpr int kThreads = THREADS;
constexpr int kHalvingBlocks = 2;  // the least number on an SM
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
static_assert((kConsumers + 1) * kWarpgroup == kThreads, "one warpgroup copies, others compute");
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "the host passes a different struct");

extern "C" __global__ void __launch_bounds__(kHalvingThreads)
    seen_tiles(const __grid_constant__ BackwardParams params) {
    const long long tile = warp_of_grid<kHalvingThreads>();
    if (kKeyMask && tile < Seen::count(params)) Seen::find(seen_parts(params), params, tile);
}

extern "C" __global__ void __launch_bounds__(kHalvingThreads, kHalvingBlocks)
    to_halves(const __grid_constant__ BackwardParams params) {
    ptx::let_next_launch_begin();
    halve_tile(params, shared_memory<HalvingSmem, HALVING_SMEM_BYTES>());
}

// ---- the producers: one thread for each warpgroup's queries; the first also copies keys ----

// Copies tiles of queries for a warpgroup, and sends out the sums of dQ that replace them.
struct QueryProducer {
    QueryStage (&queries)[kStages];
    Statistics (&statistics)[kStages];
    Ring<kStages>& q_ring;
    LabelledRing<kStages, HeadTileLabel>& dout_ring;
    RingPosition<kStages> at;
    int filled = 0;  // stages that have held a tile
    AdditionTurns turns;

    __device__ QueryProducer(Smem& smem, const KeyTile& work, int warpgroup)
        : queries(smem.queries[warpgroup]),
          statistics(smem.statistics[warpgroup]),
          q_ring(smem.q_rings[warpgroup]),
          dout_ring(smem.dout_rings[warpgroup]),
          turns(work) {}

    // Sends out the sums of a stage, if there are any, once they are complete.
    __device__ void send_out() {
        q_ring.wait_empty(at);
        if (at.stage >= filled) return;
        const Statistics& rows = statistics[at.stage];
        turns.take(*rows.tile);
        if (kDeterministic) ptx::proxy_fence_global();
        if (rows.left_to_exact) return;
        ptx::add_to_global(rows.tile->dq.quads[0].v, queries[at.stage].dq.quads[0].v,
                           sizeof(QuerySums));
        ptx::commit_stores();
        ptx::wait_stores_read();
    }
    // Waiting for what was added takes a while: other work should come first.
    __device__ void pass_turn() {
        if (!turns.has_one()) return;
        ptx::wait_stores();
        turns.pass();
    }

    __device__ void copy_queries(const QueryHalves& from) {
        ptx::Barrier& full = q_ring.announce(at, QueryRows::kBytes + sizeof(Statistics));
        ptx::copy_bytes(&queries[at.stage].rows.q, &from.q, QueryRows::kBytes, full);
        ptx::copy_bytes(&statistics[at.stage], &from.statistics, sizeof(Statistics), full);
    }
    template <class Walk>
    __device__ void copy_dout(const QueryHalves& from, const Walk& walk) {
        dout_ring.wait_empty(at);
        dout_ring.label(at, walk.label());
        ptx::copy_bytes(&queries[at.stage].rows.dout, &from.dout, OutRows::kBytes,
                        dout_ring.announce(at, OutRows::kBytes));
    }
    // Says that no tile is left.
    __device__ void copy_nothing() {
        dout_ring.wait_empty(at);
        dout_ring.label(at, no_tile());
        ptx::barrier_arrive(dout_ring.full[at.stage]);
    }
    __device__ void advance() {
        filled = max(filled, at.stage + 1);
        at.advance();
    }
};

// Before a stage gets its next tile, and at the end, its sums of dQ are sent out.
template <class Walk>
__device__ inline void produce_queries(Smem& smem, const BackwardParams& call, const KeyTile& work,
                                       int warpgroup, Walk walk) {
    const Workspace workspace(call);
    QueryProducer producer(smem, work, warpgroup);
    for (; !walk.at_end(); walk.advance()) {
        const QueryHalves& from =
            workspace.queries_from(work.sequence, walk.head(), walk.first_row());
        // dO is released before the sums are ready.
        if (!QueryStage::kSumsTakeDout) producer.copy_dout(from, walk);
        producer.send_out();
        producer.copy_queries(from);
        if (QueryStage::kSumsTakeDout) producer.copy_dout(from, walk);
        producer.pass_turn();
        producer.advance();
    }
    if constexpr (kKeyMask) producer.copy_nothing();
    for (int stage = 0; stage < kStages; ++stage, producer.at.advance()) {
        producer.send_out();
        producer.pass_turn();
    }
}
__device__ inline void produce_queries(Smem& smem, const BackwardParams& call, const KeyTile& work,
                                       int warpgroup) {
    if constexpr (kKeyMask) {
        produce_queries(smem, call, work, warpgroup, SeenWalk(call, work, warpgroup, kConsumers));
    } else {
        produce_queries(smem, call, work, warpgroup, RangeWalk(call, work, warpgroup, kConsumers));
    }
}

// ---- the consumers ----

// Processes a tile of queries, whose dP is under way: adds its part to the gradients.
template <class Walk>
__device__ inline void attend(Consumer& consumer, Scores& dp, const Walk& walk) {
    Scores s;
    Weights p[kHalves], ds[kHalves];
    consumer.make_scores(s);
    consumer.differentiate(s, dp, walk);
    const int exponent = consumer.make_operands(p, ds, s, dp);
    consumer.add_gradients(p, ds, exponent);
    consumer.release_queries();
}

template <class Walk>
__device__ inline void attend_all(Consumer& consumer, Walk walk) {
    for (; !walk.at_end(); walk.advance()) {
        Scores dp;
        consumer.wait_for_dout();
        consumer.issue_weight_gradients(dp);
        consumer.look_up(walk);
        consumer.wait_for_queries();
        const Statistics& rows = consumer.rows();
        if (halves_hold(rows, consumer.smem.units, walk.masked(rows.first_row))) {
            attend(consumer, dp, walk);
        } else {
            wait_product<0>(dp);
            consumer.leave_to_exact();
        }
        consumer.at.advance();
    }
}

__device__ inline void consume(Smem& smem, const BackwardParams& call, const KeyTile& work,
                               int warpgroup) {
    Consumer consumer(smem, call, work, warpgroup);
    consumer.wait_for_keys();
    if constexpr (kKeyMask) {
        attend_all(consumer, LabelledWalk(smem.dout_rings[warpgroup], consumer.at));
    } else {
        attend_all(consumer, RangeWalk(call, work, warpgroup, kConsumers));
    }
    consumer.hand_in();
    store_key_gradients(smem, call);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    key_tiles(const __grid_constant__ BackwardParams params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) smem.init();
    __syncthreads();
    ptx::wait_for_launch_before();

    const KeyTile work = key_tile(params);
    // Packed sequences do not have all tiles.
    const bool exists = !kPacked || work.first_key < end_of_keys(params, work.sequence);
    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        const int warp = uniform(threadIdx.x / 32);
        if (exists) {
            if (threadIdx.x == 0) produce_keys(smem, params, work);
            if (warp >= kConsumers) return;
            if (threadIdx.x % 32 == 0) produce_queries(smem, params, work, warp);
            __syncwarp();
            ptx::named_barrier_arrive<kConsumersAndSenders>(kAllWhoRead);
        }
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        if (exists) consume(smem, params, work, warpgroup - 1);
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
