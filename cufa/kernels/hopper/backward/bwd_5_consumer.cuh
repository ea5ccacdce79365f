// What a warpgroup of bwd_5_wgmma_wide does with a tile of queries, the 64 keys and its part of the
// head dims: the verbs of the main loop.
#pragma once

#include "hopper/backward/bwd_5_block.cuh"
#include "hopper/backward/wgmma_key_nonfinite.cuh"
#include "hopper/panel_ranges.cuh"

using Scores = WgmmaSums<kBlockM>;
using Weights = WgmmaOperand<kBlockM>;
using QueryPart = WgmmaSums<kBlockM>;  // 64 dims of dQ^T

// Whether slopes are kept where dS^T will be shared.
constexpr bool kKeepsSlopes = kSlopes && !kSlopesOfPlaces;

// Named barriers; __syncthreads has number 0.
enum NamedBarrier { kAllConsumers = 1, kFirstOfWarpgroup };

template <Role kRole>
struct Consumer {
    static constexpr PanelRange kKeyPart = more_for_first(kRole, kHeadPanels);
    static constexpr PanelRange kValuePart = more_for_second(kRole, kValuePanels);
    // The second, which waits for P, has more of dQ.
    static constexpr PanelRange kQueryPart = more_for_second(kRole, kHeadPanels);
    static constexpr int kKeyCols = kKeyPart.cols(), kValueCols = kValuePart.cols();
    using KeyGradients = WgmmaSums<kKeyCols>;
    using ValueGradients = WgmmaSums<kValueCols>;

    Smem& smem;
    const Params& params;
    KeyWork work;
    KeySoftmax<kBlockM> softmax;
    RingPosition<1> keys_at;
    RingPosition<kStages> at;
    RingPosition<kStages> turn;   // the next to add to dQ, if blocks take turns
    RingPosition<1> partner_at;   // the next sums that come from the partner
    float* tile_before;           // the sums of dQ of the tile before
    float* late_tile;             // the sums of the tile before it, without the last panel
    bool last_before, last_late;  // whether these are the last keys that those tiles see
    bool sets_sums, sets_late;    // whether this is the first to add to their dQ
    bool took_out;                // whether masked tiles of queries had NaN or infinity

    __device__ Consumer(Smem& smem, const Params& params) : smem(smem), params(params) {}

    // Begins a tile of keys.
    __device__ void begin(KeyWork next) {
        work = next;
        sets_sums = Keys::sets_sums(work);
        tile_before = nullptr;
        took_out = false;
        softmax = KeySoftmax<kBlockM>(params.call, work.mask(params.call), work.first_key);
    }

    // Waits for the keys.
    //
    // Where a mask cuts through a tile, NaN or infinity in a row must not reach keys that the row
    // does not see, nor the reverse. But in a product over the whole tile 0 * NaN is NaN. So it is
    // taken out of the operands. Keys need not keep it, since their values become NaN.
    __device__ void receive_keys(const Tiles& tiles) {
        smem.keys_ring.wait_full(keys_at);
        if (!tiles.any_masked()) return;
        if constexpr (kHidesKeys) softmax.hide_keys(work.key_mask(params.call));
        take_out_of_keys<kConsumers * kWarpgroup>(smem.k, smem.v, threadIdx.x - kWarpgroup);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
    }

    // The same for a tile of queries. They need not keep it either, since D is NaN. Values get NaN
    // and infinity from dO at the end.
    __device__ void clean_queries() {
        smem.q_ring.wait_full(at);
        smem.dout_ring.wait_full(at);
        if (!__any_sync(0xffffffffu, smem.rows[at.stage].nonfinite)) return;
        take_out_of_queries<kConsumers * kWarpgroup>(smem.q[at.stage], smem.dout[at.stage],
                                                     kAllConsumers);
        took_out = true;
    }

    // Finds out which scores of a tile are seen, if a mask or a mask_mod cuts through it. This
    // waits for memory, so it happens while products run.
    template <class Walk>
    __device__ void find_seen(const Walk& walk) {
        if constexpr (kHidesScores) {
            if (!walk.masked()) return;
            const ScoreRules rules(params.call, work.sequence(params.call), walk.head);
            softmax.find_seen(place_of(walk), rules, work.first_key + row_of_warp());
        }
    }

    // Draws which weights of a tile dropout keeps.
    template <class Walk>
    __device__ void draw_kept(const Walk& walk) {
        if constexpr (kDropout) {
            const unsigned int matrix = matrix_number(params.call.sizes, work.batch, walk.head);
            softmax.draw_kept(place_of(walk), matrix, work.first_key);
        }
    }

    // Issues S^T = K Q^T - LSE or dP^T = V dO^T - D. The rows' statistics come with Q.
    template <class Walk>
    __device__ void issue_scores(Scores& s, const Walk& walk) {
        if (kRole == kWeights) softmax.find_line(place_of(walk));
        smem.q_ring.wait_full(at);
        if (kRole == kWeights) {
            softmax.begin_scores(s, smem.rows[at.stage]);
            if (kScoresBeginWithLse) keep_in_first_block(s);
            issue_product_nt<kHead, kBlockM, kScoresBeginWithLse>(s, smem.k, smem.q[at.stage]);
        } else {
            softmax.begin_gradients(s, smem.rows[at.stage]);
            keep_in_first_block(s);
            smem.dout_ring.wait_full(at);
            issue_product_nt<kValue, kBlockM, true>(s, smem.v, smem.dout[at.stage]);
        }
    }

    // Adds the sums over the partner's part of the head dims.
    __device__ void add_partner(Scores& s) { smem.add_partner(s, kRole, partner_at); }

    // Computes P^T and shares it; `p` becomes what dropout keeps of it.
    template <class Walk>
    __device__ void share_weights(Scores& s, Weights& p, const Walk& walk) {
        if (walk.masked()) {
            shape<true>(s, walk);
            softmax.template exponentiate<true>(s, smem.rows[at.stage], walk.tile);
        } else {
            shape<false>(s, walk);
            softmax.template exponentiate<false>(s, smem.rows[at.stage], walk.tile);
        }
        share(smem.p, smem.p_ring, s, p);
        if constexpr (kDropout) softmax.drop(p);
    }

    // Computes dS^T and shares it; with dropout, `p` is P^T.
    template <class Walk>
    __device__ void share_gradients(Scores& dp, const Weights& p, const Walk& walk) {
        if (walk.masked()) {
            differentiate<true>(dp, p, walk);
        } else {
            differentiate<false>(dp, p, walk);
        }
        if constexpr (kKeepsSlopes) softmax.apply_slopes(dp, smem.ds[at.stage], row_of_warp());
        Weights rounded;
        share(smem.ds, smem.ds_ring, dp, rounded);
    }

    // Issues dV += P^T dO.
    __device__ void issue_value_gradients(ValueGradients& dv) {
        smem.p_ring.wait_full(at);
        smem.dout_ring.wait_full(at);
        const auto& dout = smem.dout[at.stage].panels_from<kValueCols>(kValuePart.begin);
        issue_product_nn<kBlockM, kValueCols>(dv, smem.p[at.stage], dout);
    }

    // The same with what dropout keeps of P^T. The second warpgroup reads P^T into `p`, then writes
    // the kept part in its place, which the first does not read.
    __device__ void issue_kept_value_gradients(ValueGradients& dv, Weights& p) {
        if constexpr (kRole == kWeights) {
            smem.dout_ring.wait_full(at);
            const auto& dout = smem.dout[at.stage].panels_from<kValueCols>(kValuePart.begin);
            issue_product_pn<kBlockM, kValueCols>(dv, p, dout);
        } else {
            smem.p_ring.wait_full(at);
            read_rows<kBlockM>(p, smem.p[at.stage], row_of_warp());
            Weights kept;
            copy_operand<kBlockM>(kept, p);
            softmax.drop(kept);
            __syncwarp();
            write_rows<kBlockM>(smem.p[at.stage], kept, row_of_warp());
            ptx::proxy_fence();
            ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + kRole);
            issue_value_gradients(dv);
        }
    }

    // Issues dK += dS^T Q for the tile before.
    __device__ void issue_key_gradients(KeyGradients& dk) {
        const RingPosition<kStages> from = before(at);
        smem.ds_ring.wait_full(from);
        const auto& q = smem.q[from.stage].panels_from<kKeyCols>(kKeyPart.begin);
        issue_product_nn<kBlockM, kKeyCols>(dk, smem.ds[from.stage], q);
    }

    // Issues a panel of this warpgroup's part of dQ^T = K^T dS^T for the tile before.
    __device__ void issue_query_gradients(QueryPart& dq, int panel) {
        issue_product_tn<kBlockM>(dq, reinterpret_cast<KeyRows(&)[1]>(smem.k),
                                  kQueryPart.begin + panel,
                                  reinterpret_cast<ScoreRows(&)[1]>(smem.ds[before(at).stage]), 0);
    }

    // Adds a panel to the sums of dQ of the tile before.
    __device__ void add_query_gradients(QueryPart& dq, int panel) {
        add_panel(tile_before, last_before, sets_sums, panel, dq);
    }
    // Adds the last panel of the tile before that, if it is still missing.
    __device__ void add_late(QueryPart& dq) {
        constexpr int kLast = kQueryPart.count - 1;
        if (kLast > 0 && late_tile != nullptr)
            add_panel(late_tile, last_late, sets_late, kLast, dq);
    }

    // Advances to the next tile.
    template <class Walk>
    __device__ void advance(Walk& walk) {
        const QueryWorkspace workspace(params.call);
        late_tile = tile_before;
        last_late = last_before;
        sets_late = sets_sums;
        tile_before = workspace.sums_of(work.sequence(params.call), walk.head, walk.tile);
        last_before = walk.tiles.last_of(walk.tile);
        if (kWindow) sets_sums = walk.tiles.first_of(walk.tile);
        at.advance();
        walk.advance();
    }

    // Stores the gradients of the keys in this warpgroup's part of the head dims, through the
    // shared memory of the keys.
    __device__ void store(KeyGradients& dk, ValueGradients& dv) {
        const int head_col = first_head_col() + kKeyPart.first_col();
        const int value_col = first_value_col() + kValuePart.first_col();
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
        if (took_out) {
            const Tiles tiles(params.call, work);
            add_nonfinite<kValueCols>(dv, params.call, work.sequence(params.call),
                                      work.heads(params.call.sizes), tiles, softmax, value_col);
        }
        const BackwardParams& call = params.call;
        if constexpr (kDropout) {
#pragma unroll
            for (float& sum : dv) sum *= kept_scale(call.features);
#pragma unroll
            for (float& sum : dk) sum *= kept_scale(call.features);
        }
        if constexpr (kParts > 1) {
            const WgmmaKeySums key_sums = QueryWorkspace(call).key_sums;
            key_sums.write_values<kValueCols>(call, work, 0, value_col, dv);
            key_sums.write_keys<kKeyCols>(call, work, 0, head_col, dk);
        } else {
            auto& values = smem.v.panels_from<kValueCols>(kValuePart.begin);
            auto& keys = smem.k.panels_from<kKeyCols>(kKeyPart.begin);
            store<kValueCols, kValueDim>(params.dv, call.dv, values, value_col, dv, 1);
            store<kKeyCols, kHeadDim>(params.dk, call.dk, keys, head_col, dk, call.softmax_scale);
        }
        if (threadIdx.x % kWarpgroup == 0) {
            ptx::wait_stores_read();
            smem.keys_ring.release(keys_at);
        }
        keys_at.advance();
    }

  private:
    // What sums start from counts once.
    __device__ static void keep_in_first_block(Scores& s) {
        if constexpr (kClusterBlocks > 1) {
#pragma unroll
            for (float& sum : s) sum = rank_in_cluster() == 0 ? sum : 0;
        }
    }

    // Adds a panel to the sums of a tile, once it is this warpgroup's turn.
    __device__ void add_panel(float* tile, bool last, bool sets, int panel, QueryPart& dq) {
        if (kTurns && panel == 0) smem.order[kRole].wait_full(turn);
        const Sums::Part part =
            Sums::panel_of(tile, rank_in_cluster() * kHeadPanels + kQueryPart.begin + panel);
        if (part.has_own_slab()) {
            QueryWorkspace::add_or_round(params.call, work.sequence(params.call), tile, part.sums,
                                         dq, last, sets);
        }
        if (kTurns && panel == kQueryPart.count - 1) {
            arrive_by_warp(smem.order[kRole].added[turn.stage]);
            turn.advance();
        }
    }

    template <class Walk>
    __device__ TilePlace place_of(const Walk& walk) const {
        return {params.call.features, work.batch, walk.head, walk.tile * kBlockM};
    }

    template <class T>
    __device__ auto receive_bias(const TilePlace& place) {
        if constexpr (kBiasBoxes) {
            wait_for(smem.bias_full[at.stage], at.parity, at.stage);
            using Tile = typename BiasInTile<T, kBlockM>::Tile;
            return BiasInTile<T, kBlockM>(bias_in_place_of<Tile>(smem.p[at.stage]));
        } else {
            return softmax.template bias_in_memory<T>(place);
        }
    }

    // Turns products into scores, if scores are more than scaled products. Slopes are kept where dS
    // will be shared.
    template <bool Masked, class Walk>
    __device__ void shape(Scores& s, const Walk& walk) {
        const TilePlace place = place_of(walk);
        if constexpr (kKeepsSlopes) {
            smem.ds_ring.wait_empty(at);
            const auto bias = receive_bias<bias_t>(place);
            softmax.template shape<Masked>(s, bias, smem.ds[at.stage], row_of_warp(), place);
        } else if constexpr (kScoreMod || kBias) {
            softmax.template shape<Masked>(s, receive_bias<bias_t>(place), place);
        }
        // All must have read the bias before one writes P^T in its place.
        if (kBiasBoxes) ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + kRole);
    }

    template <int Dims, int TensorDims, class Rows>
    __device__ void store(const TensorMap& map, const Tensor& tensor, Rows& rows, int first_col,
                          WgmmaSums<Dims>& sums, float scale) {
#pragma unroll
        for (int i = 0; i < Dims / 2; ++i) sums[i] *= scale;
        write_rounded<Dims>(rows, sums);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + kRole);
        send_out<TensorDims, kWarpgroup>(map, tensor, rows, params.call, work, 0, first_col);
    }

    template <bool Masked, class Walk>
    __device__ void differentiate(Scores& dp, const Weights& own_p, const Walk& walk) const {
        const Statistics& rows = smem.rows[at.stage];
        if constexpr (kDropout) {
            softmax.template differentiate<Masked, false>(dp, own_p, rows, walk.tile);
        } else {
            Weights rounded;
            Scores p;
            read_rows<kBlockM>(rounded, smem.p[at.stage], row_of_warp());
            widen_operand<kBlockM>(p, rounded);
            softmax.template differentiate<Masked, false>(dp, p, rows, walk.tile);
        }
        if constexpr (kSlopesOfPlaces) softmax.template apply_slopes<Masked>(dp, place_of(walk));
    }

    // Shares a tile and leaves it `rounded`.
    __device__ void share(ScoreRows (&to)[kStages], Ring<kStages>& ring, const Scores& values,
                          Weights& rounded) {
        round_to_operand<kBlockM>(rounded, values);
        ring.wait_empty(at);
        write_rows<kBlockM>(to[at.stage], rounded, row_of_warp());
        ptx::proxy_fence();
        ptx::barrier_arrive(ring.full[at.stage]);
    }
};
