// bwd_4_wgmma: FlashAttention-3's backward (Shah et al. 2024, section 3) on Hopper.
//
// Change from bwd_3_mma: a warp that does nothing but copy, by the copy engine, and two warpgroups
// that compute, by wgmma, each for 64 keys. S^T and dP^T are products of shared memory; P^T and
// dS^T stay in registers for dV += P^T dO and dK += dS^T Q. dS^T also goes to shared memory, where
// both warpgroups' parts meet in dQ^T = K^T dS^T, which is added to sums in global memory. A
// warpgroup does so one tile later, so that neither waits for the other and one multiplies while
// the other exponentiates.
//
// Three launches: row_sums (the rows' statistics, and dQ's sums set to zero), key_tiles,
// round_queries.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     block: 128 keys of one KV head; warpgroup: 64 of them
// Shared   K, V; rings of STAGES Q and dO tiles with the rows' statistics, and dS^T tiles
// Global   workspace: sums of dQ, then statistics (wgmma_backward.cuh)
// Writes   dQ, dK, dV
#include "wgmma_backward.cuh"

constexpr int kBlockM = BLOCK_M, kStages = STAGES;
constexpr int kBlockN = kConsumers * kWgmmaM;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kHelperThreads = HELPER_THREADS;
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
constexpr bool kWholeHead = WHOLE_HEAD;
// Of how many heads blocks run together that add to dQ in order; 0 if they add as they come.
constexpr int kOrderedHeads = ORDERED_HEADS;
constexpr bool kOrdered = kOrderedHeads > 0;
// With short tiles of queries a thread has registers for P as operand beside S and dP: dV's product
// then need not wait for dP. And warpgroups that do not take turns fall into step, both at their
// softmax.
constexpr bool kShortTiles = kBlockM <= kPanelCols;
constexpr bool kValuesEarly = kShortTiles, kTakeTurns = kShortTiles;
// Each warpgroup has a panel of dims of dQ if tiles of queries are short, and so there are two.
constexpr int kHeadCols = kShortTiles && kHeadDim <= kPanelCols ? 2 * kPanelCols : kHeadDim;
constexpr int kHead = round_up(kHeadCols, kWgmmaK), kValue = round_up(kValueDim, kWgmmaK);

struct Params {
    TensorMap q, k, v, dout, dk, dv;
    BackwardParams call;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "the host passes a different struct");

using KeyRows = PanelTile<kWgmmaM, kHeadCols>;
using ValueRows = PanelTile<kWgmmaM, kValueDim>;
using QueryRows = PanelTile<kBlockM, kHeadCols>;
using OutRows = PanelTile<kBlockM, kValueDim>;
using ScoreRows = PanelTile<kWgmmaM, kBlockM>;
using Keys = KeyTiles<kBlockN, kWholeHead, kCausal, SECTION_BYTES, kOrderedHeads>;
using Tiles = QueryTiles<kBlockM, kBlockN>;
using Walk = QueryWalk<Tiles>;
using Statistics = RowStatistics<kBlockM>;

// The warpgroups part a tile of dQ^T: its two panels of dims or, if there is but one, its queries.
constexpr int kPanels = KeyRows::kPanels;
static_assert(kPanels <= kConsumers, "a warpgroup has one panel of dQ");
using Sums = QuerySums<kBlockM, kPanels, kConsumers / kPanels>;
static_assert(kPanels > 1 || Sums::kCols == kPanelCols, "a warpgroup has one panel of dS");
using QueryPart = WgmmaSums<Sums::kCols>;
using QueryWorkspace = Workspace<kBlockM, Sums>;

struct Smem {
    KeyRows k[kConsumers];
    ValueRows v[kConsumers];
    QueryRows q[kStages];
    OutRows dout[kStages];
    ScoreRows ds[kStages][kConsumers];
    Statistics rows[kStages];
    Ring<kStages> ring;
    Ring<kStages> ds_ring;
    Ring<1> keys_ring;
    Ring<kStages> order[kConsumers];  // a warpgroup's turns to add to dQ, if they are ordered
    bool took_out[kConsumers];        // whether there was NaN or infinity in masked tiles
};

using Scores = WgmmaSums<kBlockM>;
using Weights = WgmmaOperand<kBlockM>;

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    row_sums(const __grid_constant__ Params params) {
    prepare_rows<kHelperThreads, kBlockM, Sums, !kWholeHead, kOrdered>(params.call);
}

// ---- the producer: one thread ----

__device__ inline void send_keys(Smem& smem, const Params& params, KeyWork work,
                                 RingPosition<1>& to) {
    smem.keys_ring.wait_empty(to);
    constexpr int kBytes = kConsumers * (KeyRows::kBytes + ValueRows::kBytes);
    ptx::Barrier& full = smem.keys_ring.announce(to, kBytes);
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
        const int first_key = work.first_key + w * kWgmmaM;
        copy_tile(smem.k[w], params.k, full, work.batch, work.kv_head, first_key);
        copy_tile(smem.v[w], params.v, full, work.batch, work.kv_head, first_key);
    }
    to.advance();
}

__device__ inline void send_queries(Smem& smem, const Params& params, KeyWork work, const Walk& at,
                                    RingPosition<kStages>& to) {
    const QueryWorkspace workspace(params.call.workspace, params.call.sizes);
    const int first_row = at.tile * kBlockM;
    smem.ring.wait_empty(to);
    ptx::Barrier& full =
        smem.ring.announce(to, QueryRows::kBytes + OutRows::kBytes + sizeof(Statistics));
    copy_tile(smem.q[to.stage], params.q, full, work.batch, at.head, first_row);
    ptx::copy_bytes(&smem.rows[to.stage], &workspace.rows_of(work.batch, at.head, at.tile),
                    sizeof(Statistics), full);
    copy_tile(smem.dout[to.stage], params.dout, full, work.batch, at.head, first_row);
    to.advance();
}

__device__ inline void produce(Smem& smem, const Params& params, KeyWork work) {
    const Sizes& sizes = params.call.sizes;
    RingPosition<1> keys_to;
    RingPosition<kStages> to;
    do {
        const Tiles tiles(sizes, work.first_key);
        Walk at(tiles, sizes, work.kv_head);
        if (!at.at_end()) send_keys(smem, params, work, keys_to);
        for (; !at.at_end(); at.advance()) send_queries(smem, params, work, at, to);
    } while (Keys::next(work, sizes));
}

// ---- two more beside it: one for each consumer ----

__device__ inline void keep_order(Smem& smem, const Params& params, KeyWork work, int consumer) {
    const Sizes& sizes = params.call.sizes;
    const QueryWorkspace workspace(params.call.workspace, sizes);
    const Tiles tiles(sizes, work.first_key);
    keep_order(smem.order[consumer], workspace, consumer, work.batch, work.first_key / kBlockN,
               Walk(tiles, sizes, work.kv_head));
}

// ---- the consumers: a warpgroup for 64 keys ----

// Barriers of parts of the block; __syncthreads has number 0.
enum NamedBarrier { kKeysDone = 1, kFirstTurn, kFirstOfWarpgroup = kFirstTurn + kConsumers };

// Warpgroups take turns from a tile's first product to its weights, so that the tensor cores serve
// one while the other waits for its dQ.
struct Turns {
    int warpgroup;

    __device__ explicit Turns(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == kConsumers - 1) pass();
    }
    __device__ void wait() const {
        if (kTakeTurns) ptx::named_barrier_sync<2 * kWarpgroup>(kFirstTurn + warpgroup);
    }
    __device__ void pass() const {
        const int next = kConsumers - 1 - warpgroup;
        if (kTakeTurns) ptx::named_barrier_arrive<2 * kWarpgroup>(kFirstTurn + next);
    }
};

struct Consumer {
    Smem& smem;
    const Params& params;
    const int warpgroup;
    const Turns turns;
    KeyWork work;
    KeySoftmax<kBlockM> softmax;
    RingPosition<1> keys_at;
    RingPosition<kStages> at;
    float* tile_before;  // the sums of dQ of the tile before, of which dS lies a stage before

    __device__ Consumer(Smem& smem, const Params& params, int warpgroup)
        : smem(smem), params(params), warpgroup(warpgroup), turns(warpgroup) {}

    // Takes up a tile of keys.
    __device__ void begin(KeyWork next) {
        work = next;
        softmax = KeySoftmax<kBlockM>(params.call.sizes, work.first_key + warpgroup * kWgmmaM,
                                      params.call.softmax_scale);
        tile_before = nullptr;
    }

    // The first of the 16 rows that a warp has of its warpgroup's 64.
    __device__ static int warp_row() { return threadIdx.x % kWarpgroup / 32 * 16; }

    // Issues S^T = K Q^T.
    __device__ void issue_scores(Scores& s) {
        smem.ring.wait_full(at);
        issue_product_nt<kHead, kBlockM>(s, smem.k[warpgroup], smem.q[at.stage]);
    }

    // Issues dP^T = V dO^T.
    __device__ void issue_weight_gradients(Scores& dp) {
        issue_product_nt<kValue, kBlockM>(dp, smem.v[warpgroup], smem.dout[at.stage]);
    }

    __device__ void exponentiate(Scores& s, const Walk& walk) {
        if (walk.masked()) {
            take_out_nonfinite(s);
            softmax.exponentiate<true>(s, smem.rows[at.stage], walk.tile);
        } else {
            softmax.exponentiate<false>(s, smem.rows[at.stage], walk.tile);
        }
    }

    __device__ void differentiate(Scores& dp, const Scores& p, const Walk& walk) const {
        if (walk.masked()) {
            softmax.differentiate<true>(dp, p, smem.rows[at.stage], walk.tile);
        } else {
            softmax.differentiate<false>(dp, p, smem.rows[at.stage], walk.tile);
        }
    }

    // Issues dV += P^T dO.
    __device__ void issue_value_gradients(WgmmaSums<kValue>& dv, const Weights& p) {
        issue_product_pn<kBlockM, kValue>(dv, p, smem.dout[at.stage]);
    }

    // Issues dK += dS^T Q.
    __device__ void issue_key_gradients(WgmmaSums<kHead>& dk, const Weights& ds) {
        issue_product_pn<kBlockM, kHead>(dk, ds, smem.q[at.stage]);
    }

    // Shows dS^T to the other warpgroup.
    __device__ void share(const Weights& ds) {
        smem.ds_ring.wait_empty(at);
        write_rows<kBlockM>(smem.ds[at.stage][warpgroup], ds, warp_row());
        ptx::proxy_fence();
        ptx::barrier_arrive(smem.ds_ring.full[at.stage]);
    }

    // Issues this warpgroup's part of dQ^T = K^T dS^T, of all keys, for the tile before. At the
    // first tile that is a product of K with what lies there, K and V, and is not used: a branch
    // around it would make all products wait for each other.
    __device__ void issue_query_gradients(QueryPart& dq) {
        using Shared = ScoreRows[kConsumers];
        static_assert(sizeof(Shared) <= sizeof(smem.k) + sizeof(smem.v), "there is not as much");
        const RingPosition<kStages> from = before(at);
        const bool is_there = tile_before != nullptr;
        if (is_there) smem.ds_ring.wait_full(from);
        const Shared& ds = is_there ? smem.ds[from.stage] : reinterpret_cast<Shared&>(smem.k);
        issue_product_tn<Sums::kCols>(dq, smem.k, kPanels > 1 ? warpgroup : 0, ds,
                                      kPanels > 1 ? 0 : warpgroup);
    }

    __device__ void add_query_gradients(const QueryPart& dq) {
        if (tile_before == nullptr) return;
        const RingPosition<kStages> from = before(at);
        release(smem.ds_ring, from);
        if (kOrdered) smem.order[warpgroup].wait_full(from);
        Sums::add(tile_before, warpgroup, dq, Keys::sets_sums(work));
        if (kOrdered) release(smem.order[warpgroup], from);
    }

    // Ends with a tile of queries.
    __device__ void finish(const Walk& walk) {
        release(smem.ring, at);
        at.advance();
        const QueryWorkspace workspace(params.call.workspace, params.call.sizes);
        tile_before = workspace.sums_of(work.batch, walk.head, walk.tile);
    }

    // Stores the gradients of this warpgroup's keys through the shared memory that had the keys.
    __device__ void store(WgmmaSums<kHead>& dk, WgmmaSums<kValue>& dv, bool took_keys) {
        if (smem.took_out[warpgroup]) {
            const int first_key = work.first_key + warpgroup * kWgmmaM;
            add_nonfinite<kValue, kBlockM, kBlockN>(dv, params.call, work, first_key, 0);
        }
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kKeysDone);
        store<kValue>(params.dv, smem.v[warpgroup], dv, 1);
        store<kHead>(params.dk, smem.k[warpgroup], dk, params.call.softmax_scale);
        if (threadIdx.x % kWarpgroup == 0) {
            ptx::wait_stores_read();
            if (took_keys) smem.keys_ring.release(keys_at);
        }
        if (took_keys) keys_at.advance();
    }

  private:
    // Where a mask cuts through a tile, NaN or infinity in a row or a key must not reach those that
    // it does not see; but 0 * NaN is NaN, and a product over the whole tile would multiply by it.
    // Keys and queries with it need not keep it: the rows that see them have an LSE that is NaN.
    __device__ void take_out_nonfinite(const Scores& s) {
        const int barrier = kFirstOfWarpgroup + warpgroup;
        const bool found = softmax.finds_nonfinite(s, smem.rows[at.stage]);
        if (!ptx::named_barrier_or<kWarpgroup>(barrier, found)) return;
        clear_nonfinite<kWarpgroup>(smem.k[warpgroup]);
        clear_nonfinite<kWarpgroup>(smem.q[at.stage]);
        clear_nonfinite<kWarpgroup>(smem.dout[at.stage]);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kWarpgroup>(barrier);
        smem.took_out[warpgroup] = true;
    }

    template <int Dims, class Rows>
    __device__ void store(const TensorMap& map, Rows& rows, WgmmaSums<Dims>& sums, float scale) {
#pragma unroll
        for (int i = 0; i < Dims / 2; ++i) sums[i] *= scale;
        WgmmaOperand<Dims> rounded;
        round_to_operand<Dims>(rounded, sums);
        write_rows<Dims>(rows, rounded, warp_row());
        ptx::proxy_fence();
        ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + warpgroup);
        if (threadIdx.x % kWarpgroup == 0) {
            store_tile(map, rows, work.batch, work.kv_head, work.first_key + warpgroup * kWgmmaM,
                       0);
        }
    }
};

// Sums up the gradients of a warpgroup's keys over all tiles of queries, of which there is one at
// least.
__device__ inline void attend(Consumer& consumer, WgmmaSums<kHead>& dk, WgmmaSums<kValue>& dv,
                              Walk walk) {
    const Turns& turns = consumer.turns;
    consumer.smem.keys_ring.wait_full(consumer.keys_at);
    for (; !walk.at_end(); walk.advance()) {
        Scores s, dp;
        QueryPart dq;
        Weights p, ds;
        turns.wait();
        consumer.issue_scores(s);
        consumer.issue_weight_gradients(dp);

        wait_product<1>(s);
        consumer.exponentiate(s, walk);
        if (kValuesEarly) {
            round_to_operand<kBlockM>(p, s);
            consumer.issue_value_gradients(dv, p);
        }
        turns.pass();

        wait_product<kValuesEarly ? 1 : 0>(dp);
        consumer.differentiate(dp, s, walk);
        round_to_operand<kBlockM>(ds, dp);
        if (!kValuesEarly) {
            round_to_operand<kBlockM>(p, s);
            consumer.issue_value_gradients(dv, p);
        }
        consumer.issue_query_gradients(dq);
        consumer.share(ds);
        consumer.issue_key_gradients(dk, ds);

        wait_product<1>(dq);
        consumer.add_query_gradients(dq);
        wait_product<0>(dk);
        hold_all(dv);
        consumer.finish(walk);
    }
    QueryPart dq;
    consumer.issue_query_gradients(dq);
    wait_product<0>(dq);
    consumer.add_query_gradients(dq);
}

__device__ inline void consume(Smem& smem, const Params& params, KeyWork work, int warpgroup) {
    const Sizes& sizes = params.call.sizes;
    Consumer consumer(smem, params, warpgroup);
    do {
        WgmmaSums<kHead> dk = {};
        WgmmaSums<kValue> dv = {};
        const Tiles tiles(sizes, work.first_key);
        const Walk walk(tiles, sizes, work.kv_head);
        consumer.begin(work);
        if (!walk.at_end()) attend(consumer, dk, dv, walk);
        consumer.store(dk, dv, !walk.at_end());
    } while (Keys::next(work, sizes));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    key_tiles(const __grid_constant__ Params params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) {
        constexpr int kWarps = kConsumers * kWarpgroup / 32;
        smem.ring.init(kWarps);
        init_shared_ring(smem.ds_ring, kConsumers * kWarpgroup, kWarps);
        smem.keys_ring.init(kConsumers);
        for (Ring<kStages>& order : smem.order) order.init(kWarpgroup / 32);
        for (bool& took_out : smem.took_out) took_out = false;
        ptx::barrier_init_fence();
    }
    __syncthreads();

    const KeyWork work = Keys::first(params.call.sizes);
    // A shuffle tells the compiler that all lanes of a warp have the same.
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
        if (warp == 0) {
            if (threadIdx.x == 0) produce(smem, params, work);
        } else if (kOrdered && warp <= kConsumers) {
            if (threadIdx.x % 32 == 0) keep_order(smem, params, work, warp - 1);
        }
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        consume(smem, params, work, warpgroup - 1);
    }
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    round_queries(const __grid_constant__ Params params) {
    round_tile<kHelperThreads, kBlockM, kPanels, Sums>(params.call);
}
