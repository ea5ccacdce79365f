// bwd_5_wgmma_wide: the Hopper backward for head dims that leave bwd_4_wgmma too few registers or,
// over 256, a block too little shared memory.
//
// Change from bwd_4_wgmma: dK and dV of 64 keys are too wide for one warpgroup's registers, or
// leave too few for a soft cap, a bias or dropout (HopperBackward.unsupported in __init__.py). So
// both warpgroups work on the same 64 keys. One computes S^T and P^T. The other computes dP^T and,
// with P^T, dS^T. P^T and dS^T pass through shared memory. Of dV += P^T dO, dK += dS^T Q and dQ^T =
// K^T dS^T, each warpgroup computes a part of the head dims. dK and dQ lag one tile behind: they
// keep the tensor cores busy during the softmax. Dropout keeps a part of P^T, for dV only. The
// first warpgroup has it in registers. The second reads P^T, then overwrites it with the kept part.
//
// Over head dim 256, a block's shared memory and registers have room for half of the head dims. So
// two blocks of a cluster, partners, work on the same 64 keys and the same queries, each with half
// of the columns of all operands and gradients. S and dP are sums over both halves: each warpgroup
// sends what it has to the same warpgroup of the partner and adds what comes from there. Then both
// blocks compute the same P and dS.
//
// Launches: seen_tiles, row_sums, key_tiles, round_keys, round_queries and sink_gradient, as in
// bwd_4_wgmma.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     block, or two partners: 64 keys of one KV head, or all of them, 64 at a time, for all
//          query heads that share them or a part of those heads and of their rows; warpgroup: whole
//          panels of the head dims of dK, dV and dQ
// Shared   K, V; rings of STAGES Q tiles with the statistics of their rows, dO tiles, P^T and dS^T;
//          a bias that TMA copies lies where P^T will be written; what partners send
// Global   workspace: sums of dQ, statistics, parts of dK and dV, counts of turns, what a mask
//          shows of tiles of keys (wgmma_workspace.cuh); if it hides scores, what it shows of tiles
//          of these
// Needs    sm_90a; addresses and strides that are multiples of 16 bytes
// Writes   dQ, dK, dV
#include "call/grid.cuh"
#include "hopper/backward/bwd_5_consumer.cuh"
#include "hopper/backward/bwd_5_copies.cuh"
#include "hopper/backward/wgmma_query_rows.cuh"

constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kHelperThreads = HELPER_THREADS;
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;

// The lagging products of the tile before. Panels of dQ are added while products run: the first
// during the product for dV, the last during the next scores.

template <Role kRole>
__device__ inline void issue_lagging(Consumer<kRole>& consumer,
                                     typename Consumer<kRole>::KeyGradients& dk, QueryPart& dq) {
    consumer.add_late(dq);
    consumer.issue_key_gradients(dk);
    consumer.issue_query_gradients(dq, 0);
}
template <Role kRole>
__device__ inline void finish_keys(Consumer<kRole>& consumer,
                                   typename Consumer<kRole>::KeyGradients& dk, QueryPart& dq) {
    wait_product<0>(dq);
    hold_all(dk);
    release(consumer.smem.q_ring, before(consumer.at));
}
template <Role kRole>
__device__ inline void add_first_panel(Consumer<kRole>& consumer, QueryPart& dq) {
    constexpr int kQueryPanels = Consumer<kRole>::kQueryPart.count;
    static_assert(kQueryPanels <= 2, "a panel is added during each of two products");
    consumer.add_query_gradients(dq, 0);
    if (kQueryPanels > 1) consumer.issue_query_gradients(dq, 1);
}
// Call it once all products are there.
template <Role kRole>
__device__ inline void finish_queries(Consumer<kRole>& consumer, QueryPart& dq) {
    hold_all(dq);
    release(consumer.smem.ds_ring, before(consumer.at));
}

// Processes one tile of queries and, unless it is the First, the lagging products.
template <bool First, Role kRole, class Walk>
__device__ inline void attend(Consumer<kRole>& consumer, typename Consumer<kRole>::KeyGradients& dk,
                              typename Consumer<kRole>::ValueGradients& dv, QueryPart& dq,
                              const Walk& walk) {
    Scores s;
    Weights p;  // if there is dropout
    if (walk.masked()) consumer.clean_queries();
    consumer.issue_scores(s, walk);
    if (!First) issue_lagging(consumer, dk, dq);
    consumer.find_seen(walk);
    consumer.draw_kept(walk);
    wait_product<First ? 0 : 2>(s);
    consumer.add_partner(s);
    if (kRole == kWeights) consumer.share_weights(s, p, walk);
    if (!First) finish_keys(consumer, dk, dq);
    kDropout ? consumer.issue_kept_value_gradients(dv, p) : consumer.issue_value_gradients(dv);
    if (kRole == kWeightGradients) consumer.share_gradients(s, p, walk);
    if (!First) add_first_panel(consumer, dq);
    wait_product<0>(dv);
    if (!First) finish_queries(consumer, dq);
    release(consumer.smem.p_ring, consumer.at);
    release(consumer.smem.dout_ring, consumer.at);
}

// The lagging products of the last tile.
template <Role kRole>
__device__ inline void finish(Consumer<kRole>& consumer, typename Consumer<kRole>::KeyGradients& dk,
                              QueryPart& dq) {
    Smem& smem = consumer.smem;
    consumer.issue_key_gradients(dk);
    consumer.add_late(dq);
#pragma unroll
    for (int panel = 0; panel < Consumer<kRole>::kQueryPart.count; ++panel) {
        consumer.issue_query_gradients(dq, panel);
        wait_product<0>(dq);
        hold_all(dk);
        consumer.add_query_gradients(dq, panel);
    }
    release(smem.q_ring, before(consumer.at));
    release(smem.ds_ring, before(consumer.at));
}

// A consumer's walk over its tiles of queries.
template <Role kRole>
__device__ inline auto walk_of(const Consumer<kRole>& consumer, const Tiles& tiles, int part) {
    if constexpr (kHidesScores) {
        return LabelledWalk(consumer.smem.q_ring, consumer.at, tiles);
    } else {
        return RangeWalk(tiles, consumer.params.call.sizes, part);
    }
}

template <Role kRole>
__device__ inline void consume(Smem& smem, const Params& params, KeyWork work) {
    Consumer<kRole> consumer(smem, params);
    do {
        typename Consumer<kRole>::KeyGradients dk = {};
        typename Consumer<kRole>::ValueGradients dv = {};
        const Tiles tiles(params.call, work);
        auto walk = walk_of(consumer, tiles, work.part);
        consumer.begin(work);
        consumer.receive_keys(tiles);
        if (!walk.at_end()) {
            QueryPart dq = {};  // or ptxas before 12.9 makes every product wait for the one before
            attend<true>(consumer, dk, dv, dq, walk);
            for (consumer.advance(walk); !walk.at_end(); consumer.advance(walk)) {
                attend<false>(consumer, dk, dv, dq, walk);
            }
            finish(consumer, dk, dq);
        }
        consumer.store(dk, dv);
    } while (Keys::next(work, params.call));
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
    SeenKeys::find<kHelperThreads>(QueryWorkspace(params.call).seen, params.call);
    prepare_rows<kHelperThreads, kBlockM, Sums>(params.call);
}

// Waits for all threads of the cluster.
__device__ inline void sync_cluster() {
    if constexpr (kClusterBlocks > 1) {
        ptx::pair_sync();
    } else {
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    key_tiles(const __grid_constant__ Params params) {
    const KeyWork work = Keys::first(params.call);
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) smem.init();
    sync_cluster();
    ptx::let_next_launch_begin();
    ptx::wait_for_launch_before();
    if (!work.has_keys(params.call)) return;  // nor has a partner, so nobody waits for this block

    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0) {
            if (threadIdx.x == 0) produce(smem, params, work);
        } else if (kTurns && warp <= kConsumers) {
            pass_turns<QueryWorkspace>(smem.order[warp - 1], warp - 1, params.call, work);
        } else if (kTurns && threadIdx.x % 32 == 0) {
            take_turns<QueryWorkspace>(smem.order, params.call, work);
        }
    } else if (warpgroup == 1) {
        ptx::registers_increase<kConsumerRegisters>();
        consume<kWeights>(smem, params, work);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        consume<kWeightGradients>(smem, params, work);
    }
    // Or a partner would arrive where no block is any more.
    if constexpr (kClusterBlocks > 1) ptx::pair_sync();
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
    sink_gradient(const __grid_constant__ Params params) {
    if constexpr (kSink) sum_up_sink<kHelperThreads, kBlockM, Sums>(params.call);
}
