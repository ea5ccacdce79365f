// The consumers of fwd_10_wgmma_wide: two warpgroups with the same 64 rows, each with half of the
// columns of O. They compute the weights of tiles of keys in turn, and hand them to each other.
#pragma once

#include "hopper/forward/key_parts.cuh"
#include "hopper/forward/merged_parts.cuh"
#include "hopper/forward/wgmma_forward_output.cuh"
#include "hopper/forward/wgmma_forward_scores.cuh"

// What the two hand each other besides the weights of a tile: the maxima of rows under which these
// were computed and, at the end, each thread's sums of the weights that it has computed.
struct Handed {
    float maxima[kWgmmaM];
    float sums[kColumnWarpgroups][2][kWarpgroup];
};

// Whether a warpgroup issues the product for its next scores before it has the other's weights.
// Then the tensor cores are busy while the other computes these. But two stages of keys that are
// also values have no room for the next keys then.
constexpr bool kScoresFirst = !kValuesInKeys || kStages > 2;

// Whether the output has a way out of its own. Else it is through the place of the queries, and the
// next queries come only once it is stored.
constexpr bool kOutputApart = OUTPUT_APART;
// Whether the next queries may come before the output is stored. Parts that are merged later leave
// through no shared memory.
constexpr bool kReleasesEarly = kOutputApart || kMergesLater;

// A consumer. What each kernel does in its own way, besides what ForwardScores asks for, is in
// `Self`, which derives from this struct:
//   begin(work)                        begins a tile of queries
//   unscale(s)                         undoes what was done to queries, in their products
//   output_scale()                     the factor of sums of weighted values
//   take_out_nonfinite(o, work, tile)  called before the part of a tile that a mask cuts through
template <class Self, class Smem>
struct WideConsumer : ForwardScores<Self, Smem> {
    using Base = ForwardScores<Self, Smem>;
    using Base::draw_kept;
    using Base::load_bias;
    using Base::mask_scores;
    using Base::params;
    using Base::self;
    using Base::shape_scores;
    using Base::smem;
    using Base::take_slope;
    using Base::tile_scale;
    using Base::warpgroup;
    using Output = WgmmaSums<kOwnCols>;

    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> k_at, v_at;

    __device__ WideConsumer(Smem& smem, const Params& params, int warpgroup)
        : Base(smem, params, warpgroup) {}

    // Processes all tiles of queries that the block takes.
    __device__ void consume() {
        for (;;) {
            smem.q_ring[0].wait_full(q_at);
            const WorkTile work = smem.work.of_stage[0][q_at.stage];
            if (!__any_sync(0xffffffffu, work.exists())) break;
            Output o = {};
            RowPair softmax;
            const KeyRange keys = key_tiles_of(params.call, work);
            self().begin(work);
            if constexpr (kAlibi) take_slope(work);
            attend_to_all(o, softmax, work, keys);
            const bool stores_apart = kOutputApart || (kMergesLater && holds_part(work));
            if (stores_apart) release(smem.q_ring[0], q_at);
            share_sums(softmax);
            if (joins_parts(o, softmax, work)) store(o, softmax, work);
            if (!stores_apart) {
                if (threadIdx.x % kWarpgroup == 0) ptx::wait_stores_read();
                release(smem.q_ring[0], q_at);
            }
            q_at.advance();
        }
        ptx::wait_stores_read();
    }

    // Computes the weights of every other tile of keys, and the output of all. `v_at` goes over all
    // tiles, `k_at` over this warpgroup's own.
    __device__ void attend_to_all(Output& o, RowPair& softmax, const WorkTile& work,
                                  const KeyRange& keys) {
        const auto cut = [&](int tile) { return !keys.is_whole(tile); };
        int tile = keys.end - 1 - warpgroup;  // one's own
        if (warpgroup == 1 && !keys.none()) k_at.advance();
        // The second warpgroup begins with the output of the first's first tile, unless it issues
        // scores of its own before.
        const bool only_others = tile + 1 == keys.begin;
        if (warpgroup == 1 && (kScoresFirst ? only_others : tile + 1 >= keys.begin))
            finish_others(o, softmax, work, tile + 1, cut(tile + 1));
        if (tile >= keys.begin) {
            Weights p;
            first_weights(o, p, softmax, work, tile, cut(tile), cut(tile + 1));
            for (; tile - 2 >= keys.begin; tile -= 2) {
                add_own(o, p, work, tile, cut(tile));
                attend(o, p, softmax, work, tile - 2, cut(tile - 2), cut(tile - 1));
            }
            add_own(o, p, work, tile, cut(tile));
            wait_output<0>(o);
            --tile;
            if (tile >= keys.begin) finish_others(o, softmax, work, tile, cut(tile));
        }
        k_at = v_at;
    }

    // The weights of a warpgroup's first tile. If kScoresFirst, the second warpgroup adds the
    // output of the tile before meanwhile.
    __device__ void first_weights(Output& o, Weights& p, RowPair& softmax, const WorkTile& work,
                                  int tile, bool cut, bool other_cut) {
        Scores s;
        float shrink[2];
        issue_scores(s);
        if (kScoresFirst && warpgroup == 1) finish_others(o, softmax, work, tile + 1, other_cut);
        wait_scores<0>(s);
        const bool raised = weigh(p, softmax, s, shrink, work, tile, cut);
        hand_over(p, softmax);
        if (raised) rescale(o, shrink);
    }

    // Computes the weights of the next tile of this warpgroup, while the output of the tile before,
    // of which the other warpgroup has the weights, is added.
    __device__ void attend(Output& o, Weights& p, RowPair& softmax, const WorkTile& work, int tile,
                           bool cut, bool other_cut) {
        Scores s;
        float shrink[2];
        // Scores are as many products as keys have parts, issued after that for the output.
        if constexpr (kScoresFirst) {
            issue_scores(s);
            wait_output<kColumnParts>(o);
            add_others(o, softmax, work, tile + 1, other_cut);
            wait_scores<1>(s);
        } else {
            wait_output<0>(o);
            add_others(o, softmax, work, tile + 1, other_cut);
            issue_scores(s);
            wait_output<kColumnParts>(o);
            wait_scores<0>(s);
        }
        const bool raised = weigh(p, softmax, s, shrink, work, tile, cut);
        if constexpr (kScoresFirst) wait_output<0>(o);
        hand_over(p, softmax);
        if (__builtin_expect(raised, false)) rescale(o, shrink);
    }

    // Turns products into weights. Returns whether maxima were raised; O must then be multiplied by
    // `shrink`.
    __device__ bool weigh(Weights& p, RowPair& softmax, Scores& s, float (&shrink)[2],
                          const WorkTile& work, int tile, bool cut) {
        float sums[2];
        Bias bias;
        if constexpr (kBias) load_bias(bias, work, tile);
        shape_scores(s, bias, work, tile);
        if (cut) mask_scores(s, SeenScores(), work, tile);
        const bool raised = softmax.raise(s, tile_scale(), shrink);
        softmax.weigh(s, tile_scale(), sums);
        softmax.add(sums);
        round_to_operand<kBlockN>(p, s);
        if constexpr (kDropout) {
            Kept kept;
            draw_kept(kept, work, tile);
            kept.drop(p);
        }
        return raised;
    }

    // Issues the product that adds the output of a tile whose weights this warpgroup has.
    __device__ void add_own(Output& o, const Weights& p, const WorkTile& work, int tile, bool cut) {
        if (cut) self().take_out_nonfinite(o, work, tile);
        own_ring(smem, warpgroup).wait_full(v_at);
        issue_product_pn<kBlockN, kOwnCols>(o, p, own_values());
    }

    // Issues the product that adds a tile's part of the output, by the weights of the other
    // warpgroup.
    __device__ void add_others(Output& o, RowPair& softmax, const WorkTile& work, int tile,
                               bool cut) {
        ptx::named_barrier_sync<2 * kWarpgroup>(kFirstTurn + 1 - warpgroup);
        float shrink[2];
        bool raised = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& row = softmax.rows[half];
            const float max = smem.handed.maxima[row_of_thread() + 8 * half];
            raised |= max > row.max;
            shrink[half] = row.raise_max(max);
        }
        if (__builtin_expect(__any_sync(0xffffffffu, raised), false)) rescale(o, shrink);
        if (cut) self().take_out_nonfinite(o, work, tile);
        own_ring(smem, warpgroup).wait_full(v_at);
        issue_product_nn<kBlockN, kOwnCols>(o, smem.weights, own_values());
    }

    __device__ void finish_others(Output& o, RowPair& softmax, const WorkTile& work, int tile,
                                  bool cut) {
        add_others(o, softmax, work, tile, cut);
        wait_output<0>(o);
    }

    // Hands weights to the other warpgroup, which has handed over those before and needs them no
    // more.
    __device__ void hand_over(const Weights& p, const RowPair& softmax) {
        // The products of all warps with those before are done.
        ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup);
        write_rows<kBlockN>(smem.weights, p, row_of_warp());
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (threadIdx.x % 4 == 0)
                smem.handed.maxima[row_of_thread() + 8 * half] = softmax.rows[half].max;
        }
        ptx::proxy_fence();
        ptx::named_barrier_arrive<2 * kWarpgroup>(kFirstTurn + warpgroup);
    }

    // Adds the other warpgroup's sums of weights. All products with the queries are done then.
    __device__ void share_sums(RowPair& softmax) {
        const int thread = threadIdx.x % kWarpgroup;
        auto& sums = smem.handed.sums;
        // Both have read the sums of the queries before. Else their ring ensures it.
        if (kReleasesEarly) ptx::named_barrier_sync<2 * kWarpgroup>(kAllConsumers);
#pragma unroll
        for (int half = 0; half < 2; ++half) sums[warpgroup][half][thread] = softmax.rows[half].sum;
        ptx::named_barrier_sync<2 * kWarpgroup>(kAllConsumers);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            softmax.rows[half].sum += sums[1 - warpgroup][half][thread];
    }

    __device__ void issue_scores(Scores& s) {
        if constexpr (kInParts) {
            if constexpr (kKeysAlone > 0) issue_part<kKeysAlone, false>(s, kColumnWarpgroups);
            issue_part<kOwnCols, (kKeysAlone > 0)>(s, warpgroup);
            issue_part<kOwnCols, true>(s, 1 - warpgroup);
        } else {
            smem.k_ring.wait_full(k_at);
            issue_product_nt<kDepth, kBlockN>(s, smem.q[0][q_at.stage], smem.k[k_at.stage]);
        }
    }

    // Issues the product of some columns, which s is or, if Add, to which it is added.
    template <int Cols, bool Add>
    __device__ void issue_part(Scores& s, int part) {
        smem.k_ring.parts[part].wait_full(k_at);
        issue_product_nt<Cols, kBlockN, Add>(s, columns_of_part<Cols>(smem.q[0][q_at.stage], part),
                                             columns_of_part<Cols>(smem.k[k_at.stage], part));
    }

    template <int Pending>
    __device__ void wait_scores(Scores& s) {
        wait_product<Pending>(s);
        if (threadIdx.x % 32 == 0) release_keys();
        for (int i = 0; i < kColumnWarpgroups; ++i) k_at.advance();  // to the next of one's own
        self().unscale(s);
        if constexpr (kSoftcap) bound(s, self().softmax_scale(), params.call.features);
    }

    // Releases the columns that are needed only for scores.
    __device__ void release_keys() {
        if constexpr (!kValuesInKeys) {
            smem.k_ring.release(k_at);
        } else if constexpr (kKeysAlone > 0) {
            smem.k_ring.parts[kColumnWarpgroups].release(k_at);
        }
    }

    template <int Pending>
    __device__ void wait_output(Output& o) {
        wait_product<Pending>(o);
        release_and_advance(own_ring(smem, warpgroup), v_at);
    }

    __device__ auto& own_values() { return own_columns(value_tiles(smem)[v_at.stage], warpgroup); }

    // Writes a part of a tile, if it has several. The last part, unless parts are merged later, or
    // the only one continues with the result of all.
    __device__ bool joins_parts(Output& o, RowPair& softmax, const WorkTile& work) {
        if constexpr (kPartsKeys) {
            if (!holds_part(work)) return true;
            if (!kMergesLater)
                return KeyParts<kOwnCols>(params.call).join(o, softmax, work, warpgroup);
            parts_to_merge<kOwnCols>(params.call)[work.result()].write(o, softmax, warpgroup);
            return false;
        }
        return true;
    }

    __device__ void store(const Output& o, const RowPair& softmax, const WorkTile& work) {
        const OutputRows<Smem, kOwnCols> rows{smem, params, warpgroup};
        rows.store(o, softmax, self().output_scale(), work);
    }
};
