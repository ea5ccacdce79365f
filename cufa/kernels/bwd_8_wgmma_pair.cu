// bwd_8_wgmma_pair: the Hopper backward by pairs of blocks that divide the five products.
//
// Change from bwd_5_wgmma_wide: there, a tile of dQ is added to memory once for each 64 keys, as
// many bytes as its Q and dO have, and takes as long as all products. Here two blocks of a cluster,
// partners, have 128 keys. The key block holds K and a ring of Q: it computes S^T and P^T, and dK
// += dS^T Q. The value block holds V and a ring of dO: it computes dP^T and dS^T, and dV += P^T dO.
// P^T goes from the key block to the value block and dS^T back, in 16 bits, from shared memory to
// shared memory. Each of the four warpgroups has 64 keys, and one of four panels of dQ^T = K^T dS^T
// over all keys. So a tile of dQ is added once for 128 keys, and each block loads only one of Q and
// dO.
//
// P^T and dS^T are long on their way. So the key block computes dK and dQ two tiles later; and each
// block sends them before it does anything that nobody waits for.
//
// Launches: row_sums, key_tiles, round_keys, round_queries and sink_gradient, as in bwd_4_wgmma.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     two partners: 128 keys of one KV head, or all of them, 128 at a time, for all query
//          heads that share them or a part of those heads and of their rows; warpgroup: 64 of the
//          keys, for dK or dV, and one panel of dQ
// Shared   key block: K, a ring of STAGES Q tiles; value block: V, later panels of K, a ring of
//          SCORE_STAGES dO tiles; both: rings of P^T and dS^T, the statistics of rows
// Global   workspace: sums of dQ, statistics, parts of dK and dV, counts of turns, what a mask
//          shows of tiles of keys (wgmma_workspace.cuh)
// Needs    sm_90a; addresses and strides that are multiples of 16 bytes
// Writes   dQ, dK, dV
#include "hopper/backward/bwd_8_consumer.cuh"
#include "hopper/backward/bwd_8_copies.cuh"
#include "hopper/backward/wgmma_query_rows.cuh"

constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kHelperThreads = HELPER_THREADS;
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;

// ---- the key block ----

// Issues S^T and, unless the tile is one of the First, the lagging dK, in turn with the other
// warpgroup. dQ, which needs what that one sent, too, is not part of a turn.
template <bool First>
__device__ inline void issue_products(KeyConsumer& consumer, Scores& s, WgmmaSums<kHead>& dk,
                                      const RangeWalk& walk) {
    consumer.turns.wait();
    if (!First) consumer.issue_key_gradients(dk);
    consumer.issue_scores(s, walk);
    consumer.turns.pass();
}
// Waits for the lagging dK, and issues dQ.
__device__ inline void issue_lagging_queries(KeyConsumer& consumer, WgmmaSums<kHead>& dk,
                                             QueryPart& dq) {
    wait_product<1>(dk);
    consumer.release_queries();
    consumer.issue_query_gradients(dq);
}
__device__ inline void add_lagging_queries(KeyConsumer& consumer, QueryPart& dq) {
    wait_product<0>(dq);
    consumer.release_gradients();
    consumer.add_query_gradients(dq);
}

// Processes one tile of queries and, unless it is one of the First, the lagging products.
template <bool First>
__device__ inline void attend(KeyConsumer& consumer, WgmmaSums<kHead>& dk, QueryPart& dq,
                              const RangeWalk& walk) {
    Scores s;
    if (walk.masked()) consumer.clean_queries();
    issue_products<First>(consumer, s, dk, walk);
    if (!First) issue_lagging_queries(consumer, dk, dq);
    wait_product<!First>(s);
    consumer.share_weights(s, walk);
    if (!First) add_lagging_queries(consumer, dq);
}

__device__ inline void consume_queries(KeyConsumer& consumer, const Tiles& tiles, RangeWalk walk) {
    WgmmaSums<kHead> dk = {};
    QueryPart dq;
    consumer.receive_keys(tiles);
#pragma unroll 1
    for (int i = 0; i < kLag && !walk.at_end(); ++i, consumer.advance(walk))
        attend<true>(consumer, dk, dq, walk);
    for (; !walk.at_end(); consumer.advance(walk)) attend<false>(consumer, dk, dq, walk);
#pragma unroll 1
    for (int i = 0; i < kLag; ++i, consumer.advance()) {
        if (!consumer.has_pending()) continue;
        consumer.issue_key_gradients(dk);
        consumer.issue_query_gradients(dq);
        wait_product<0>(dq);
        hold_all(dk);
        consumer.release_queries();
        consumer.release_gradients();
        consumer.add_query_gradients(dq);
    }
    consumer.go_back();
    consumer.store_keys(dk);
}

// ---- the value block ----

// Waits for dV of the tile before, but for Pending products that were issued later, and issues its
// dQ.
template <int Pending>
__device__ inline void issue_lagging_queries(ValueConsumer& consumer, WgmmaSums<kValue>& dv,
                                             QueryPart& dq) {
    wait_product<Pending>(dv);
    consumer.release_tile_before();
    consumer.issue_query_gradients(dq);
}
template <int Pending>
__device__ inline void add_lagging_queries(ValueConsumer& consumer, QueryPart& dq) {
    wait_product<Pending>(dq);
    consumer.add_query_gradients(dq);
}

// Processes one tile of queries and, unless it is the First, dQ of the tile before.
template <bool First>
__device__ inline void attend(ValueConsumer& consumer, WgmmaSums<kValue>& dv, QueryPart& dq,
                              const RangeWalk& walk) {
    Scores dp;
    if (walk.masked()) consumer.clean_queries();
    consumer.issue_weight_gradients(dp);
    if (!First) issue_lagging_queries<1>(consumer, dv, dq);
    wait_product<!First>(dp);
    consumer.share_gradients(dp, walk);
    consumer.issue_value_gradients(dv);
    if (!First) add_lagging_queries<1>(consumer, dq);
}

__device__ inline void consume_queries(ValueConsumer& consumer, const Tiles& tiles,
                                       RangeWalk walk) {
    WgmmaSums<kValue> dv = {};
    consumer.receive_keys(tiles);
    if (!walk.at_end()) {
        QueryPart dq;
        attend<true>(consumer, dv, dq, walk);
        for (consumer.advance(walk); !walk.at_end(); consumer.advance(walk))
            attend<false>(consumer, dv, dq, walk);
        issue_lagging_queries<0>(consumer, dv, dq);
        add_lagging_queries<0>(consumer, dq);
    }
    consumer.store_values(dv);
}

// ---- both ----

template <class Consumer>
__device__ inline void consume(Smem& smem, const Params& params, KeyWork work, int warpgroup) {
    Consumer consumer(smem, params, warpgroup);
    do {
        const Tiles tiles(params.call, work);
        consumer.begin(work);
        consume_queries(consumer, tiles, RangeWalk(tiles, params.call.sizes, work.part));
    } while (Keys::next(work, params.call));
}

template <Role kRole, class Consumer>
__device__ inline void process(Smem& smem, const Params& params, const KeyWork& work) {
    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (warpgroup > 0) {
        ptx::registers_increase<kConsumerRegisters>();
        return consume<Consumer>(smem, params, work, warpgroup - 1);
    }
    ptx::registers_decrease<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
        if (threadIdx.x == 0) produce<kRole>(smem, params, work);
    } else if (kTurns && warp <= kConsumers) {
        pass_turns<QueryWorkspace>(smem.order[warp - 1], warp - 1, params.call, work);
    } else if (kTurns && threadIdx.x % 32 == 0) {
        take_turns<QueryWorkspace>(smem.order, params.call, work);
    }
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    row_sums(const __grid_constant__ Params params) {
    ptx::let_next_launch_begin();
    SeenKeys::find<kHelperThreads>(QueryWorkspace(params.call).seen, params.call);
    prepare_rows<kHelperThreads, kBlockM, Sums>(params.call);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    key_tiles(const __grid_constant__ Params params) {
    const KeyWork work = Keys::first(params.call);
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) smem.init();
    ptx::pair_sync();
    ptx::let_next_launch_begin();
    ptx::wait_for_launch_before();
    if (!work.has_keys(params.call)) return;  // nor has a partner, so nobody waits for this block
    if (rank_in_cluster() == kKeyBlock) {
        process<kKeyBlock, KeyConsumer>(smem, params, work);
    } else {
        process<kValueBlock, ValueConsumer>(smem, params, work);
    }
    ptx::pair_sync();  // or a partner would arrive where no block is any more
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
