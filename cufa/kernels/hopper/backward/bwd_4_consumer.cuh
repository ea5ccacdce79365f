// What a warpgroup of bwd_4_wgmma does with a tile of queries and its 64 keys: the verbs of the
// main loops.
#pragma once

#include "hopper/backward/bwd_4_gradients.cuh"
#include "hopper/backward/key_array_gradients.cuh"
#include "hopper/backward/wgmma_key_nonfinite.cuh"
#include "hopper/product_turns.cuh"

// Whether slopes are kept where dS^T will be shared. Those of a soft cap alone follow from P.
constexpr bool kSlopesWait = kSlopes && !kSlopesOfPlaces && (kScoreMod || kAlibi || kBias);
constexpr bool kSlopesFromWeights = kSlopes && !kSlopesOfPlaces && !kSlopesWait;
static_assert(kScoresTogether || !kSlopesFromWeights, "that needs P before it is rounded");
static_assert(kScoresTogether || !kDropout, "nobody draws which weights are kept");

using Scores = WgmmaSums<kBlockM>;
using Weights = WgmmaOperand<kBlockM>;

using Turns = ProductTurns<kConsumers, kFirstTurn>;

struct Consumer : GradientHandout {
    const Turns turns;
    KeySoftmax<kBlockM> softmax;
    // What each tile of queries needs of the keys' work: read once, since shared memory is slow.
    int first_sums;
    int both_begin, both_end;  // the tiles of queries that see keys of both warpgroups
    bool sets_sums;  // whether this is the first to add to dQ; in a window, of tile_before
    RingPosition<kStages> at;
    RingPosition<1> bias_at;
    float* tile_before;  // sums of dQ of the tile before; its dS is a stage before
    bool last_before;    // whether these are the last keys that that tile sees
    // With whole tiles of dQ: whether this warpgroup has that one, and its turns to add.
    bool adds_before;
    RingPosition<kStages> turn_at;
    bool took_out;  // whether masked tiles of queries had NaN or infinity
    PendingSums<2, false> of_arrays;

    __device__ Consumer(Smem& smem, const Params& params, int warpgroup)
        : GradientHandout{smem, params, warpgroup}, turns(warpgroup) {}

    // Begins the next tile of keys, if there is one.
    __device__ bool receive() {
        smem.keys_ring.wait_full(keys_at);
        const int first_key = work().first_key + warpgroup * kWgmmaM;
        const Mask mask = work().mask(params.call);
        softmax = KeySoftmax<kBlockM>(params.call, mask, first_key);
        if constexpr (kPassesOver) {
            both_begin = OwnTiles(mask, work().first_key + kWgmmaM).begin;
            both_end = OwnTiles(mask, work().first_key).end;
        }
        first_sums = QueryWorkspace(params.call).first_sums_of(params.call, work());
        sets_sums = Keys::sets_sums(work());
        tile_before = nullptr;
        adds_before = false;
        took_out = false;
        return work().exists();
    }

    // Where a mask cuts through a tile, NaN or infinity in a row must not reach keys that the row
    // does not see, nor the reverse. But in a product over the whole tile 0 * NaN is NaN. So it is
    // taken out of the operands. Keys need not keep it, since their values become NaN.
    __device__ void clean_keys(const Tiles& tiles) {
        if (!tiles.any_masked()) return;
        if constexpr (kHidesKeys) softmax.hide_keys(work().key_mask(params.call));
        take_out_of_keys<kWarpgroup>(smem.k[keys_at.stage][warpgroup],
                                     smem.v[keys_at.stage][warpgroup], threadIdx.x % kWarpgroup);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
    }

    // The same for a tile of queries. They need not keep it either, since D is NaN. Values get NaN
    // and infinity from dO at the end.
    __device__ void clean_queries() {
        smem.ring.wait_full(at);
        wait_for_dout();
        if (!__any_sync(0xffffffffu, smem.rows[at.stage].nonfinite)) return;
        Queries& queries = smem.queries[at.stage];
        take_out_of_queries<kConsumers * kWarpgroup>(queries.q, queries.dout, kAllConsumers);
        took_out = true;
    }

    // Prepares for a tile that a mask cuts through.
    template <class Walk>
    __device__ void begin_masked(const Walk& walk) {
        clean_queries();
        if constexpr (kHidesScores) {
            const ScoreRules rules(params.call, work().sequence(params.call), walk.head);
            const int row = warpgroup * kWgmmaM + row_of_warp();
            softmax.find_seen(place_of(walk), rules, work().first_key + row);
        }
    }

    // Whether a tile of queries sees none of this warpgroup's keys.
    template <class Walk>
    __device__ bool passes_over(const Walk& walk) const {
        return kPassesOver && (warpgroup == 0 ? walk.tile >= both_end : walk.tile < both_begin);
    }
    // Whether both warpgroups compute for it.
    template <class Walk>
    __device__ bool both_see(const Walk& walk) const {
        return !kPassesOver || (walk.tile >= both_begin && walk.tile < both_end);
    }

    // Whether this warpgroup has a part of dQ of the tile before.
    __device__ bool has_query_part() const { return !kWholeQueries || adds_before; }

    template <class Walk>
    __device__ void wait_for_turn(const Walk& walk) const {
        if (kProductTurns && both_see(walk)) turns.wait();
    }
    template <class Walk>
    __device__ void pass_turn(const Walk& walk) const {
        if (kProductTurns && both_see(walk)) turns.pass();
    }

    template <class Walk>
    __device__ void draw_kept(const Walk& walk) {
        const unsigned int matrix = matrix_number(params.call.sizes, work().batch, walk.head);
        softmax.draw_kept(place_of(walk), matrix, work().first_key + warpgroup * kWgmmaM);
    }

    // Begins a tile of queries: the products start from the statistics of its rows.
    template <class Walk>
    __device__ void begin_scores(Scores& s, const Walk& walk) {
        softmax.find_line(place_of(walk));
        smem.ring.wait_full(at);
        softmax.begin_scores(s, smem.rows[at.stage]);
        if (kScoresBeginWithLse) hold_all(s);
    }
    __device__ void begin_weight_gradients(Scores& dp) {
        softmax.begin_gradients(dp, smem.rows[at.stage]);
        hold_all(dp);
    }

    // Issues S^T = K Q^T - LSE.
    __device__ void issue_scores(Scores& s) {
        issue_product_nt<kHead, kBlockM, kScoresBeginWithLse>(s, smem.k[keys_at.stage][warpgroup],
                                                              smem.queries[at.stage].q);
    }

    // Issues dP^T = V dO^T - D.
    __device__ void issue_weight_gradients(Scores& dp) {
        wait_for_dout();
        issue_product_nt<kValue, kBlockM, true>(dp, smem.v[keys_at.stage][warpgroup],
                                                smem.queries[at.stage].dout);
    }

    template <class Walk>
    __device__ void exponentiate(Scores& s, const Walk& walk) {
        if (kSlopesWait) smem.ds_ring.wait_empty(at);
        if (kScoreMod && walk.masked()) {
            shape<true>(s, walk);
        } else {
            shape<false>(s, walk);
        }
        if (walk.masked()) {
            softmax.exponentiate<true>(s, smem.rows[at.stage], walk.tile);
        } else {
            softmax.exponentiate<false>(s, smem.rows[at.stage], walk.tile);
        }
    }

    // P is as computed, or rounded.
    template <class P, class Walk>
    __device__ void differentiate(Scores& dp, const P& p, const Walk& walk) {
        const Statistics& rows = smem.rows[at.stage];
        if (walk.masked()) {
            softmax.template differentiate<true, kSlopesFromWeights>(dp, p, rows, walk.tile);
        } else {
            softmax.template differentiate<false, kSlopesFromWeights>(dp, p, rows, walk.tile);
        }
        if constexpr (kArrayGradients) add_to_arrays(dp, walk);
        if constexpr (kSlopesOfPlaces) apply_slopes_of_places(dp, walk);
        if constexpr (kSlopesWait)
            softmax.apply_slopes(dp, smem.ds[at.stage][warpgroup], row_of_warp());
    }

    __device__ void round_weights(Weights& p, const Scores& s) const { softmax.round_kept(p, s); }

    // Issues dV += P^T dO.
    __device__ void issue_value_gradients(WgmmaSums<kValue>& dv, const Weights& p) {
        issue_product_pn<kBlockM, kValue>(dv, p, smem.queries[at.stage].dout);
    }

    // Issues dK += dS^T Q.
    __device__ void issue_key_gradients(WgmmaSums<kHead>& dk, const Weights& ds) {
        issue_product_pn<kBlockM, kHead>(dk, ds, smem.queries[at.stage].q);
    }

    // The same, with dS^T read from shared memory. Only this warpgroup must have written it.
    __device__ void issue_key_gradients(WgmmaSums<kHead>& dk) {
        ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + warpgroup);
        const auto& ds = smem.ds[at.stage][warpgroup];
        issue_product_nn<kBlockM, kHead>(dk, ds, smem.queries[at.stage].q);
    }

    // Writes dS^T where the other warpgroup reads it, too.
    __device__ void write(const Weights& ds) {
        smem.ds_ring.wait_empty(at);
        write_rows<kBlockM>(smem.ds[at.stage][warpgroup], ds, row_of_warp());
    }
    // Says so. The fence waits for memory, such as for additions to dQ: at best beside products.
    __device__ void share() {
        ptx::proxy_fence();
        ptx::barrier_arrive(smem.ds_ring.full[at.stage]);
    }

    // Issues this warpgroup's part of dQ^T = K^T dS^T, or of dQ, over all keys, for the tile
    // before. Where they divide it, the product for the first tile reads the queries in place of
    // dS^T and is not used: a branch around it would make all products wait for each other. A
    // template, because parts differ.
    template <class Part>
    __device__ void issue_query_gradients(Part& dq) {
        using Shared = ScoreRows[kConsumers];
        static_assert(sizeof(Shared) <= sizeof(Queries), "there is not as much");
        const RingPosition<kStages> from = before(at);
        const bool is_there = tile_before != nullptr;
        if (is_there) smem.ds_ring.wait_full(from);
        const Shared& ds =
            is_there ? smem.ds[from.stage] : reinterpret_cast<Shared&>(smem.queries[at.stage]);
        const auto& k = smem.k[keys_at.stage];
        if constexpr (kWholeQueries) {
            issue_product_tn<kHead>(dq.panel, ds, 0, k, 0);
        } else if constexpr (kHasPanel) {
            issue_product_tn<kBlockM>(dq.panel, k, warpgroup, ds, 0);
        }
        if constexpr (kHalfPanel) {
            issue_product_tn<kBlockM / 2>(dq.half, k, kPanels - 1, ds, warpgroup * (kBlockM / 2));
        }
    }

    // Loads the sums of the tile before, if this warpgroup's part of dQ completes them.
    __device__ void load_query_sums(QueryPart& sums) const {
        for (float& sum : sums.panel) sum = 0;
        for (float& sum : sums.half) sum = 0;
        if (tile_before == nullptr || !last_before || sets_sums) return;
        const Sums::Part panel = Sums::panel_of(tile_before, warpgroup);
        const Sums::Part half = Sums::half_of(tile_before, warpgroup);
        if (kHasPanel && panel.has_own_slab()) Sums::collect(sums.panel, panel.sums);
        if (kHalfPanel && half.has_own_slab()) Sums::collect(sums.half, half.sums);
    }

    // Adds this warpgroup's part of dQ of the tile before to its sums, or rounds both together.
    __device__ void add_query_gradients(QueryPart& dq, const QueryPart& sums) {
        if (tile_before == nullptr) return;
        const RingPosition<kStages> from = before(at);
        release(smem.ds_ring, from);
        const Sums::Part panel = Sums::panel_of(tile_before, warpgroup);
        if constexpr (kOutboxes) {
            wait_for_outbox();
            if (panel.has_own_slab()) Sums::write(smem.outboxes[warpgroup].queries(), dq.panel);
            return post({OutboxLabel::kQueries, panel.sums, {}});
        }
        const Sums::Part half = Sums::half_of(tile_before, warpgroup);
        const RingPosition<kStages> turn = kWholeQueries ? turn_at : from;
        if (kTurns) smem.order[warpgroup].wait_full(turn);
        if (kHasPanel && panel.has_own_slab()) add_or_round(dq.panel, sums.panel, panel.sums);
        if (kHalfPanel && half.has_own_slab()) add_or_round(dq.half, sums.half, half.sums);
        if (kTurns) arrive_by_warp(smem.order[warpgroup].added[turn.stage]);
        if (kTurns && kWholeQueries) turn_at.advance();
    }
    // The same if it has no part.
    __device__ void add_nothing() {
        if (tile_before != nullptr) release(smem.ds_ring, before(at));
    }

    // Ends a tile of queries.
    template <class Walk>
    __device__ void finish(const Walk& walk) {
        release(smem.ring, at);
        at.advance();
        const QueryWorkspace workspace(params.call);
        tile_before = workspace.sums_at(workspace.place_from(first_sums, walk.head, walk.tile));
        last_before = walk.tiles.last_of(walk.tile);
        if (kWholeQueries) adds_before = Sums::has_part(warpgroup, walk.head, walk.tile);
        if (kWindow) sets_sums = walk.tiles.first_of(walk.tile);
    }

    // Adds the NaN and infinity of dO to the gradients of this warpgroup's values.
    __device__ void add_taken_out(WgmmaSums<kValue>& dv, const Tiles& tiles) const {
        if (!took_out) return;
        add_nonfinite<kValue>(dv, params.call, work().sequence(params.call),
                              work().heads(params.call.sizes), tiles, softmax, 0);
    }

    // Signals that nothing is left.
    __device__ void leave() {
        if constexpr (kArrayGradients) of_arrays.flush(sums_of_arrays(params.call));
        if constexpr (!kOutboxes) return;
        wait_for_outbox();
        post({OutboxLabel::kNothing, nullptr, {}});
    }

  private:
    template <class Walk>
    __device__ TilePlace place_of(const Walk& walk) const {
        return {params.call.features, work().batch, walk.head, walk.tile * kBlockM};
    }

    // A template, because Smem may have no bias.
    template <class Smem>
    __device__ auto receive_bias(Smem& smem, const TilePlace& place) const {
        if constexpr (kBiasBoxes) {
            smem.bias_ring.wait_full(bias_at);
            return BiasInTile<bias_t, kBlockM>(smem.bias[warpgroup]);
        } else {
            return softmax.template bias_in_memory<bias_t>(place);
        }
    }
    __device__ void release_bias() {
        if (!kBiasBoxes) return;
        ptx::proxy_fence();  // or TMA might overwrite the tile before loads are done
        release(smem.bias_ring, bias_at);
        bias_at.advance();
    }

    template <class Walk>
    __device__ void add_to_arrays(const Scores& ds, const Walk& walk) {
        float* const sums = sums_of_arrays(params.call);
        if (walk.masked()) {
            add_to_array_gradients<true>(of_arrays, sums, ds, softmax, place_of(walk));
        } else {
            add_to_array_gradients<false>(of_arrays, sums, ds, softmax, place_of(walk));
        }
    }

    template <class Walk>
    __device__ void apply_slopes_of_places(Scores& ds, const Walk& walk) const {
        if (walk.masked()) {
            softmax.template apply_slopes<true>(ds, place_of(walk));
        } else {
            softmax.template apply_slopes<false>(ds, place_of(walk));
        }
    }

    // Turns products into scores, if scores are more than scaled products. Masked matters only to
    // functions.
    template <bool Masked, class Walk>
    __device__ void shape(Scores& s, const Walk& walk) {
        const TilePlace place = place_of(walk);
        if constexpr (kSlopesWait) {
            const auto bias = receive_bias(smem, place);
            softmax.shape<Masked>(s, bias, smem.ds[at.stage][warpgroup], row_of_warp(), place);
            release_bias();
        } else if constexpr (kScoreMod || kBias) {
            softmax.shape<Masked>(s, receive_bias(smem, place), place);
            release_bias();
        } else if constexpr (kSoftcap) {
            softmax.bound(s);
        }
    }

    // Adds a part of dQ of the tile before, or rounds it with the sums of other keys, loaded or yet
    // to load.
    template <int Count>
    __device__ void add_or_round(float (&dq)[Count], const float (&loaded)[Count],
                                 float* part) const {
        if (!kRounds || !last_before) return Sums::add(part, dq, sets_sums);
        if (kSumsEarly) {
#pragma unroll
            for (int i = 0; i < Count; ++i) dq[i] += loaded[i];
        } else if (!sets_sums) {
            Sums::collect(dq, part);
        }
        QueryWorkspace(params.call)
            .round(params.call, work().sequence(params.call), first_sums, tile_before, part, dq);
    }

    __device__ void wait_for_dout() {
        if (kOutApart) wait_for(smem.dout_full[at.stage], at.parity, at.stage);
    }
};

// Waits for a part of dQ.
template <int Pending>
__device__ inline void wait_part(QueryPart& dq) {
    if constexpr (kHasPanel) wait_product<Pending>(dq.panel);
    if constexpr (kHalfPanel) wait_product<Pending>(dq.half);
}
