// bwd_4_wgmma: FlashAttention-3's backward (Shah et al. 2024, Algorithm 3) on Hopper.
//
// Change from bwd_3_mma: one thread only copies, by TMA, and two warpgroups only compute, by
// wgmma, each for 64 keys. Warps beside that thread store gradients and, if blocks take turns to
// add to dQ, wait for the turns. S^T and dP^T are products of shared memory. P^T and dS^T stay in
// registers for dV += P^T dO and dK += dS^T Q. dS^T also goes to shared memory, where the parts of
// both warpgroups meet in dQ^T = K^T dS^T, which is added to sums in global memory.
//
// The warpgroups divide dQ by panels of 64 dims or, if registers allow it up to head dim 112, in
// tiles of 64 queries have it in turn, all dims of it: then no product is wasted on dims that only
// pad a panel. dQ lags one tile behind: then neither warpgroup waits for the other, and one
// multiplies while the other exponentiates.
//
// A block processes many tiles of keys: while the gradients of one are stored, the products of the
// next run.
//
// Where many queries see a key, a warpgroup puts all its gradients into an outbox, from which TMA
// adds dQ to the sums. If the warpgroup added them itself, it would wait until memory took them.
// Where a mask leaves a tile of queries to the keys of one warpgroup, the other passes over it.
//
// Above head dim 128, with at most 128 value dims, dK leaves registers for S or for dP, but not
// for both, and none for a soft cap, a bias or dropout: such calls are left to bwd_5_wgmma_wide
// (HopperBackward.unsupported in __init__.py).
//
// Launches: with a mask or a mask_mod that hides scores (hidden_keys.cuh), seen_tiles, which finds
// out what it shows of each tile of scores, so that tiles of which it shows nothing are skipped;
// row_sums (statistics; sets the sums of dQ to zero unless the first block to add does; finds out
// which tiles of keys a mask hides, if it hides keys), key_tiles, round_keys (if blocks have parts
// of the heads or rows), round_queries (unless the last block rounds); array_gradients and
// sink_gradient, each if wanted. key_tiles, round_keys and round_queries begin while the launch
// before them ends.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     block: 128 keys of one KV head at a time, for all query heads that share them or a part
//          of those heads and of their rows; warpgroup: 64 of the keys
// Shared   rings: KEY_STAGES K and V tiles, replaced by dK and dV unless there are outboxes; STAGES
//          Q and dO tiles with the statistics of their rows; dS^T tiles. For each warpgroup an
//          outbox, if used, and the bias of a tile of scores, if TMA can copy it
// Global   workspace: sums of dQ, statistics, parts of dK and dV, counts, what a mask shows of
//          tiles of keys (wgmma_workspace.cuh); if it hides scores, what it shows of tiles of
//          these; sums of the gradients of score_mod's arrays, if wanted
// Needs    sm_90a; addresses and strides that are multiples of 16 bytes
// Writes   dQ, dK, dV
#include "call/grid.cuh"
#include "hopper/backward/bwd_4_consumer.cuh"
#include "hopper/backward/bwd_4_copies.cuh"
#include "hopper/backward/wgmma_query_rows.cuh"

constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kHelperThreads = HELPER_THREADS;
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
// With short tiles of queries, a thread has registers for P as an operand beside S and dP. Then the
// product for dV need not wait for dP.
constexpr bool kValuesEarly = kShortTiles;

// The phases of a tile of queries.

// Adds up this warpgroup's part of dQ of the tile before, if it has one. `meanwhile` is done while
// the product runs, and may issue Products more.
template <int Products, class Meanwhile>
__device__ inline void add_query_gradients(Consumer& consumer, const Meanwhile& meanwhile) {
    QueryPart dq, sums;
    if (consumer.has_query_part()) {
        consumer.issue_query_gradients(dq);
        meanwhile(sums);
        wait_part<Products>(dq);
        consumer.add_query_gradients(dq, sums);
    } else {
        meanwhile(sums);
        consumer.add_nothing();
    }
}

// Passes over a tile that sees none of a warpgroup's keys: dS^T is 0, and dQ of the tile before is
// due.
template <class Walk>
__device__ inline void pass_over(Consumer& consumer, const Walk& walk) {
    const Weights none = {};
    consumer.write(none);
    consumer.share();
    add_query_gradients<0>(consumer, [](QueryPart&) {});
    consumer.finish(walk);
}

// Issues S^T and dP^T, once it is the warpgroup's turn.
template <class Walk>
__device__ inline void begin_products(Consumer& consumer, Scores& s, Scores& dp, const Walk& walk) {
    if constexpr (kDropout) consumer.draw_kept(walk);
    consumer.begin_scores(s, walk);
    consumer.begin_weight_gradients(dp);
    consumer.wait_for_turn(walk);
    consumer.issue_scores(s);
    consumer.issue_weight_gradients(dp);
}

// P^T = 2^(S^T - LSE), while dP^T is under way.
template <class Walk>
__device__ inline void make_weights(Consumer& consumer, Scores& s, Weights& p,
                                    WgmmaSums<kValue>& dv, const Walk& walk) {
    wait_product<1>(s);
    consumer.exponentiate(s, walk);
    if (kValuesEarly) {
        consumer.round_weights(p, s);
        consumer.issue_value_gradients(dv, p);
    }
    consumer.pass_turn(walk);
}

// dS^T = P^T o (dP^T - D).
template <class Walk>
__device__ inline void make_score_gradients(Consumer& consumer, Scores& dp, Weights& ds,
                                            const Scores& s, Weights& p, WgmmaSums<kValue>& dv,
                                            const Walk& walk) {
    wait_product<kValuesEarly ? 1 : 0>(dp);
    consumer.differentiate(dp, s, walk);
    round_to_operand<kBlockM>(ds, dp);
    if (!kValuesEarly) {
        consumer.round_weights(p, s);
        consumer.issue_value_gradients(dv, p);
    }
    consumer.write(ds);
}

// Adds up dK, beside dQ of the tile before, and shares dS^T with the other warpgroup.
__device__ inline void add_gradients(Consumer& consumer, WgmmaSums<kHead>& dk, const Weights& ds) {
    add_query_gradients<1>(consumer, [&](QueryPart& sums) {
        consumer.issue_key_gradients(dk, ds);
        consumer.share();
        if (kSumsEarly) consumer.load_query_sums(sums);
    });
    wait_product<0>(dk);
}

// Sums the gradients of a warpgroup's keys over all tiles of queries. dQ of the last tile is left
// to the caller.
template <class Walk>
__device__ inline void attend(Consumer& consumer, WgmmaSums<kHead>& dk, WgmmaSums<kValue>& dv,
                              Walk walk) {
    for (; !walk.at_end(); walk.advance()) {
        Scores s, dp;
        Weights p, ds;
        if (walk.masked()) consumer.begin_masked(walk);
        if (consumer.passes_over(walk)) {
            pass_over(consumer, walk);
            continue;
        }
        begin_products(consumer, s, dp, walk);
        make_weights(consumer, s, p, dv, walk);
        make_score_gradients(consumer, dp, ds, s, p, dv, walk);
        add_gradients(consumer, dk, ds);
        hold_all(dv);
        consumer.finish(walk);
    }
}

// The phases with registers for only one of S and dP: P is rounded before the product for dP
// begins, and dS^T is read from shared memory.

template <class Walk>
__device__ inline void make_weights_first(Consumer& consumer, Weights& p, const Walk& walk) {
    Scores s;
    consumer.begin_scores(s, walk);
    consumer.turns.wait();
    consumer.issue_scores(s);
    wait_product<0>(s);
    consumer.exponentiate(s, walk);
    round_to_operand<kBlockM>(p, s);
}

template <class Walk>
__device__ inline void make_score_gradients_after(Consumer& consumer, const Weights& p,
                                                  WgmmaSums<kValue>& dv, const Walk& walk) {
    Weights own_p, ds;
    copy_operand<kBlockM>(own_p, p);
    Scores dp;
    consumer.begin_weight_gradients(dp);
    consumer.issue_weight_gradients(dp);
    consumer.issue_value_gradients(dv, p);
    consumer.turns.pass();

    wait_product<1>(dp);
    consumer.differentiate(dp, own_p, walk);
    round_to_operand<kBlockM>(ds, dp);
    consumer.write(ds);
    consumer.share();
    wait_product<0>(dv);
}

__device__ inline void add_shared_gradients(Consumer& consumer, WgmmaSums<kHead>& dk) {
    add_query_gradients<1>(consumer, [&](QueryPart&) { consumer.issue_key_gradients(dk); });
    wait_product<0>(dk);
}

template <class Walk>
__device__ inline void attend_in_turn(Consumer& consumer, WgmmaSums<kHead>& dk,
                                      WgmmaSums<kValue>& dv, Walk walk) {
    for (; !walk.at_end(); walk.advance()) {
        Weights p;
        if (walk.masked()) consumer.begin_masked(walk);
        make_weights_first(consumer, p, walk);
        make_score_gradients_after(consumer, p, dv, walk);
        add_shared_gradients(consumer, dk);
        consumer.finish(walk);
    }
}

// A consumer's walk over its tiles of queries.
__device__ inline auto walk_of(const Consumer& consumer, const Tiles& tiles) {
    if constexpr (kHidesScores) {
        return LabelledWalk(consumer.smem.ring, consumer.at, tiles);
    } else {
        return RangeWalk(tiles, consumer.params.call.sizes, consumer.work().part);
    }
}

__device__ inline void consume(Smem& smem, const Params& params, int warpgroup) {
    Consumer consumer(smem, params, warpgroup);
    while (consumer.receive()) {
        WgmmaSums<kHead> dk = {};
        WgmmaSums<kValue> dv = {};
        const Tiles tiles(params.call, consumer.work());
        const auto walk = walk_of(consumer, tiles);
        if (walk.at_end()) {
            consumer.hand_out_values(dv);
        } else {
            consumer.clean_keys(tiles);
            kScoresTogether ? attend(consumer, dk, dv, walk)
                            : attend_in_turn(consumer, dk, dv, walk);
            consumer.add_taken_out(dv, tiles);
            add_query_gradients<0>(consumer, [&](QueryPart& sums) {
                if (kSumsEarly) consumer.load_query_sums(sums);
                consumer.hand_out_values(dv);
            });
        }
        consumer.hand_out_keys(dk);
    }
    consumer.leave();
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    seen_tiles(const __grid_constant__ Params params) {
    const long long tile = warp_of_grid<kHelperThreads>();
    if (kHidesScores && tile < Seen::count(params.call))
        Seen::find(seen_parts(params.call), params.call, tile);
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    row_sums(const __grid_constant__ Params params) {
    ptx::let_next_launch_begin();
    if (blockIdx.x == 0 && threadIdx.x == 0) *key_tiles_taken(params.call) = 0;
    const Sizes& sizes = params.call.sizes;
    if constexpr (kArrayGradients) {
        clear_sums<kHelperThreads>(sums_of_arrays(params.call), array_sums(params.call.features));
        if (sizes.batch == 0 || sizes.heads == 0) return;  // one block runs just to clear the sums
    }
    if (sizes.seqlen_q == 0) return;
    SeenKeys::find<kHelperThreads>(QueryWorkspace(params.call).seen, params.call);
    prepare_rows<kHelperThreads, kBlockM, Sums>(params.call);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    key_tiles(const __grid_constant__ Params params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) smem.init();
    __syncthreads();
    ptx::let_next_launch_begin();
    ptx::wait_for_launch_before();

    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0) {
            if (threadIdx.x == 0) produce(smem, params);
        } else if (kOutboxes) {
            if (warp <= kConsumers) send(smem, params, warp - 1);
        } else if (kTurns) {
            if (warp <= kConsumers) {
                send_gradients<1>(smem, params, warp - 1);
            } else if (threadIdx.x % 32 == 0) {
                take_turns(smem, params);
            }
        } else if (warp == 1) {
            send_gradients<kConsumers>(smem, params, 0);
        }
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        consume(smem, params, warpgroup - 1);
    }
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    round_keys(const __grid_constant__ Params params) {
    ptx::let_next_launch_begin();
    ptx::wait_for_launch_before();
    add_parts<kHelperThreads>(params.call, QueryWorkspace(params.call).key_sums);
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    round_queries(const __grid_constant__ Params params) {
    ptx::wait_for_launch_before();
    round_tile<kHelperThreads, kBlockM, Sums>(params.call);
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    array_gradients(const __grid_constant__ Params params) {
    if constexpr (kArrayGradients)
        round_array_sums<kHelperThreads>(params.call, sums_of_arrays(params.call));
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    sink_gradient(const __grid_constant__ Params params) {
    if constexpr (kSink) sum_up_sink<kHelperThreads, kBlockM, Sums>(params.call);
}
