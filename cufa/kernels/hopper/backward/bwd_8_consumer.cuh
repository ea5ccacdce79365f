// What a warpgroup of bwd_8_wgmma_pair does with a tile of queries and its 64 keys: the verbs of
// the main loops, of the key block and of the value block.
#pragma once

#include "hopper/backward/bwd_8_block.cuh"
#include "hopper/backward/wgmma_key_nonfinite.cuh"
#include "hopper/product_turns.cuh"

using Scores = WgmmaSums<kBlockM>;
using Weights = WgmmaOperand<kBlockM>;
using QueryPart = WgmmaSums<kBlockM>;  // 64 dims of dQ^T

// Named barriers; __syncthreads has number 0.
enum NamedBarrier {
    kAllConsumers = 1,
    kFirstOfWarpgroup,
    kFirstTurn = kFirstOfWarpgroup + kConsumers
};

using Turns = ProductTurns<kConsumers, kFirstTurn>;

// A tile of dQ to which sums are still to be added.
struct PendingTile {
    float* sums = nullptr;
    bool last;  // whether these are the last keys that it sees
    bool sets;  // in a window, whether these are the first to add to it
};

// What the warpgroups of both blocks do.
struct PairConsumer {
    Smem& smem;
    const Params& params;
    const int warpgroup;
    KeyWork work;
    KeySoftmax<kBlockM> softmax;
    RingPosition<1> keys_at;

    __device__ PairConsumer(Smem& smem, const Params& params, int warpgroup)
        : smem(smem), params(params), warpgroup(warpgroup) {}

    // Begins a tile of keys.
    __device__ void begin(KeyWork next) {
        work = next;
        softmax = KeySoftmax<kBlockM>(params.call, work.mask(params.call), first_key());
        smem.keys_ring.wait_full(keys_at);
    }

    template <class Walk>
    __device__ PendingTile pending_of(const Walk& walk) const {
        const QueryWorkspace workspace(params.call);
        return {workspace.sums_of(work.sequence(params.call), walk.head, walk.tile),
                walk.tiles.last_of(walk.tile), kWindow && walk.tiles.first_of(walk.tile)};
    }

    // Adds a panel to the sums of a tile, once it is this warpgroup's turn.
    __device__ void add(const PendingTile& tile, QueryPart& dq, RingPosition<kScoreStages> turn) {
        if (kTurns) smem.order[warpgroup].wait_full(turn);
        const Sums::Part part = Sums::panel_of(tile.sums, adder_of(warpgroup));
        if (part.has_own_slab()) {
            const bool sets = kWindow ? tile.sets : Keys::sets_sums(work);
            QueryWorkspace::add_or_round(params.call, work.sequence(params.call), tile.sums,
                                         part.sums, dq, tile.last, sets);
        }
        if (kTurns) arrive_by_warp(smem.order[warpgroup].added[turn.stage]);
    }

    __device__ int first_key() const { return work.first_key + warpgroup * kWgmmaM; }

    __device__ static void sync_consumers() {
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
    }
    __device__ void sync_warpgroup() const {
        ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + warpgroup);
    }

    template <class Walk>
    __device__ TilePlace place_of(const Walk& walk) const {
        return {params.call.features, work.batch, walk.head, walk.tile * kBlockM};
    }

    // Waits for a tile of this warpgroup's keys from the partner.
    __device__ void receive(PartnerRing<kScoreStages>& ring,
                            RingPosition<kScoreStages> from) const {
        ring.wait_full(from);
        if (threadIdx.x % kWarpgroup == 0) ring.expect(from, ScoreRows::kBytes);
    }

    // Takes NaN and infinity out of a tile of Q or dO that a mask cuts through, once no product
    // reads it.
    template <bool ToNearest, class Tile>
    __device__ void clean(Tile& tile) const {
        sync_consumers();
        clear_nonfinite<kConsumers * kWarpgroup, ToNearest>(tile, threadIdx.x - kWarpgroup);
        ptx::proxy_fence();
        sync_consumers();
    }
    // The same for this warpgroup's keys; notes which of them had any.
    template <class Tile>
    __device__ void clean_keys(Tile& k) {
        const int thread = threadIdx.x % kWarpgroup;
        auto& lost = smem.lost[warpgroup];
        *lost.at(thread % kWgmmaM, thread / kWgmmaM) = scalar_t{};
        take_out_of_keys<kWarpgroup>(k, lost, thread);
        ptx::proxy_fence();
        sync_consumers();
    }

    // Stores gradients of this warpgroup's keys through the shared memory of `rows`.
    template <int Dims, int TensorDims, class Rows>
    __device__ void store(const TensorMap& map, const Tensor& tensor, Rows& rows,
                          WgmmaSums<Dims>& sums, float scale) {
#pragma unroll
        for (int i = 0; i < Dims / 2; ++i) sums[i] *= scale;
        write_rounded<Dims>(rows, sums);
        ptx::proxy_fence();
        sync_warpgroup();
        send_out<TensorDims, kWarpgroup>(map, tensor, rows, params.call, work, warpgroup * kWgmmaM,
                                         0);
    }
    // Ends a tile of keys.
    __device__ void release_keys() {
        if (threadIdx.x % kWarpgroup == 0) {
            ptx::wait_stores_read();
            smem.keys_ring.release(keys_at);
        }
        keys_at.advance();
    }
};

struct KeyConsumer : PairConsumer {
    RingPosition<kQueryStages> at;        // of Q
    RingPosition<kScoreStages> score_at;  // of P, dS and turns to add
    PendingTile pending[kLag];            // the tiles before, the oldest first
    bool lost[2];                         // whether a thread's keys had NaN or infinity
    Turns turns;

    __device__ KeyConsumer(Smem& smem, const Params& params, int warpgroup)
        : PairConsumer(smem, params, warpgroup), turns(warpgroup) {}

    // Where a mask cuts through a tile, NaN or infinity in a row must not reach keys that the row
    // does not see, nor the reverse. But in a product over the whole tile 0 * NaN is NaN. So it is
    // taken out of the operands, and weights of such keys become NaN.
    __device__ void receive_keys(const Tiles& tiles) {
        for (PendingTile& tile : pending) tile.sums = nullptr;
        lost[0] = lost[1] = false;
        if (!tiles.any_masked()) return;
        if constexpr (kHidesKeys) softmax.hide_keys(work.key_mask(params.call));
        clean_keys(smem.keys.k[warpgroup]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            for (int part = 0; part < kWarpgroup / kWgmmaM; ++part) {
                const int key = row_of_thread() + half * 8;
                lost[half] |= !is_finite(*smem.lost[warpgroup].at(key, part));
            }
        }
    }

    // Queries need not keep it, since D is NaN.
    __device__ void clean_queries() {
        smem.q_ring.wait_full(at);
        if (__any_sync(0xffffffffu, smem.rows[at.stage].nonfinite))
            clean<true>(smem.keys.q[at.stage]);
    }

    // Issues S^T = K Q^T - LSE. The rows' statistics come with Q.
    template <class Walk>
    __device__ void issue_scores(Scores& s, const Walk& walk) {
        softmax.find_line(place_of(walk));
        smem.q_ring.wait_full(at);
        softmax.begin_scores(s, smem.rows[at.stage]);
        issue_product_nt<kHead, kBlockM, true>(s, smem.keys.k[warpgroup], smem.keys.q[at.stage]);
    }

    // Computes P^T and sends it to the value block.
    template <class Walk>
    __device__ void share_weights(Scores& s, const Walk& walk) {
        if (walk.masked()) {
            softmax.template exponentiate<true>(s, smem.rows[at.stage], walk.tile);
        } else {
            softmax.template exponentiate<false>(s, smem.rows[at.stage], walk.tile);
        }
        if (lost[0] || lost[1]) lose(s, walk);
        Weights p;
        round_to_operand<kBlockM>(p, s);
        ScoreRows& tile = smem.p[score_at.stage][warpgroup];
        smem.p_ring[warpgroup].wait_empty(score_at);
        write_rows<kBlockM>(tile, p, row_of_warp());
        ptx::proxy_fence();
        smem.p_ring[warpgroup].send_rows(tile, row_of_warp(), score_at);
    }

    // Issues dK += dS^T Q for the oldest pending tile.
    __device__ void issue_key_gradients(WgmmaSums<kHead>& dk) {
        const RingPosition<kScoreStages> from = lagging(score_at);
        receive(smem.ds_ring[warpgroup], from);
        issue_product_nn<kBlockM, kHead>(dk, smem.ds[from.stage][warpgroup],
                                         smem.keys.q[lagging(at).stage]);
    }

    // Issues this warpgroup's panel of dQ^T = K^T dS^T for it.
    __device__ void issue_query_gradients(QueryPart& dq) {
        const RingPosition<kScoreStages> from = lagging(score_at);
        smem.ds_ring[warpgroup ^ 1].wait_full(from);
        issue_product_tn<kBlockM>(dq, smem.keys.k, warpgroup, smem.ds[from.stage], 0);
    }

    // Releases Q of the oldest pending tile.
    __device__ void release_queries() { release(smem.q_ring, lagging(at)); }
    // Releases dS of it.
    __device__ void release_gradients() {
#pragma unroll
        for (int w = 0; w < kConsumers; ++w) smem.ds_ring[w].release(lagging(score_at));
    }

    __device__ bool has_pending() const { return pending[0].sums != nullptr; }
    __device__ void add_query_gradients(QueryPart& dq) { add(pending[0], dq, lagging(score_at)); }

    // Advances to the next tile, or to one that does not exist.
    template <class Walk>
    __device__ void advance(Walk& walk) {
        advance(pending_of(walk));
        walk.advance();
    }
    __device__ void advance(const PendingTile& newest = {}) {
#pragma unroll
        for (int i = 0; i + 1 < kLag; ++i) pending[i] = pending[i + 1];
        pending[kLag - 1] = newest;
        at.advance();
        score_at.advance();
    }
    // Goes back by the kLag tiles that did not exist.
    __device__ void go_back() {
        at = lagging(at);
        score_at = lagging(score_at);
    }

    // Stores the gradients of the keys, when nobody reads these any more.
    __device__ void store_keys(WgmmaSums<kHead>& dk) {
        const BackwardParams& call = params.call;
        sync_consumers();
        if constexpr (kParts > 1) {
            QueryWorkspace(call).key_sums.write_keys<kHead>(call, work, warpgroup * kWgmmaM, 0, dk);
        } else {
            store<kHead, kHeadDim>(params.dk, call.dk, smem.keys.k[warpgroup], dk,
                                   call.softmax_scale);
        }
        release_keys();
    }

  private:
    // Makes weights of keys that had NaN or infinity NaN, for the rows that see them.
    template <class Walk>
    __device__ void lose(Scores& p, const Walk& walk) const {
        const TilePlace place = place_of(walk);
#pragma unroll
        for (int i = 0; i < kBlockM / 2; ++i) {
            if (lost[i / 2 % 2] && softmax.sees(i, place)) p[i] = negative_infinity() * 0;
        }
    }
};

struct ValueConsumer : PairConsumer {
    RingPosition<kScoreStages> at;  // of dO, P, dS and turns to add
    PendingTile pending;            // the tile before
    bool took_out;                  // whether masked tiles of dO had NaN or infinity

    using PairConsumer::PairConsumer;

    // As that of the key block. Here weights are NaN already.
    __device__ void receive_keys(const Tiles& tiles) {
        pending.sums = nullptr;
        took_out = false;
        if (!tiles.any_masked()) return;
        if constexpr (kHidesKeys) softmax.hide_keys(work.key_mask(params.call));
        clean_keys(smem.values.k[warpgroup]);
    }

    // Values get NaN and infinity from dO at the end.
    __device__ void clean_queries() {
        smem.dout_ring.wait_full(at);
        if (!__any_sync(0xffffffffu, smem.rows[at.stage].nonfinite)) return;
        clean<false>(smem.values.dout[at.stage]);
        took_out = true;
    }

    // Issues dP^T = V dO^T - D.
    __device__ void issue_weight_gradients(Scores& dp) {
        smem.dout_ring.wait_full(at);
        softmax.begin_gradients(dp, smem.rows[at.stage]);
        hold_all(dp);
        issue_product_nt<kValue, kBlockM, true>(dp, smem.values.v[warpgroup],
                                                smem.values.dout[at.stage]);
    }

    // Issues this warpgroup's panel of dQ^T = K^T dS^T for the tile before.
    __device__ void issue_query_gradients(QueryPart& dq) {
        smem.own_ds_ring.wait_full(before(at));
        issue_product_tn<kBlockM>(dq, smem.values.k, warpgroup, smem.ds[before(at).stage], 0);
    }

    // Issues dV += P^T dO.
    __device__ void issue_value_gradients(WgmmaSums<kValue>& dv) {
        issue_product_nn<kBlockM, kValue>(dv, smem.p[at.stage][warpgroup],
                                          smem.values.dout[at.stage]);
    }

    // Waits for P^T and computes dS^T, for dQ here and in the key block.
    template <class Walk>
    __device__ void share_gradients(Scores& dp, const Walk& walk) {
        receive(smem.p_ring[warpgroup], at);
        Weights p;
        read_rows<kBlockM>(p, smem.p[at.stage][warpgroup], row_of_warp());
        if (walk.masked()) {
            softmax.template differentiate<true, false>(dp, p, smem.rows[at.stage], walk.tile);
        } else {
            softmax.template differentiate<false, false>(dp, p, smem.rows[at.stage], walk.tile);
        }
        Weights ds;
        round_to_operand<kBlockM>(ds, dp);
        ScoreRows& tile = smem.ds[at.stage][warpgroup];
        smem.own_ds_ring.wait_empty(at);
        smem.ds_ring[warpgroup].wait_empty(at);
        write_rows<kBlockM>(tile, ds, row_of_warp());
        ptx::proxy_fence();
        smem.ds_ring[warpgroup].send_rows(tile, row_of_warp(), at);
        ptx::barrier_arrive(smem.own_ds_ring.full[at.stage]);
    }

    // Adds dQ of the tile before and releases its dS.
    __device__ void add_query_gradients(QueryPart& dq) {
        release(smem.own_ds_ring, before(at));
        add(pending, dq, before(at));
    }

    // Releases what dV of the tile before read.
    __device__ void release_tile_before() {
        smem.p_ring[warpgroup].release(before(at));
        release(smem.dout_ring, before(at));
    }
    template <class Walk>
    __device__ void advance(Walk& walk) {
        pending = pending_of(walk);
        at.advance();
        walk.advance();
    }

    // Stores the gradients of the values, when nobody reads these and keys any more.
    __device__ void store_values(WgmmaSums<kValue>& dv) {
        const BackwardParams& call = params.call;
        sync_consumers();
        if (took_out) {
            const Tiles tiles(call, work);
            add_nonfinite<kValue>(dv, call, work.sequence(call), work.heads(call.sizes), tiles,
                                  softmax, 0);
        }
        if constexpr (kParts > 1) {
            QueryWorkspace(call).key_sums.write_values<kValue>(call, work, warpgroup * kWgmmaM, 0,
                                                               dv);
        } else {
            store<kValue, kValueDim>(params.dv, call.dv, smem.values.v[warpgroup], dv, 1);
        }
        release_keys();
    }
};
