// The consumers of the Hopper forwards, each with 64 rows. The other warps are in
// wgmma_forward_copies.cuh; fwd_6_wgmma.cu says how all of them work together.
#pragma once

#include "hopper/forward/key_parts.cuh"
#include "hopper/forward/wgmma_forward_output.cuh"
#include "hopper/forward/wgmma_forward_scores.cuh"
#include "hopper/product_turns.cuh"

using Current = CurrentTile<kSharesTiles>;
using Turns = ProductTurns<kConsumers, kFirstTurn>;

// What options need to know of a tile of keys.
struct TileOptions {
    Bias bias;
    SeenScores seen;  // of a mask, if a tile is cut
    Kept kept;        // by dropout
};

// A consumer. Dims are the columns of its sums of O. What each kernel does in its own way, besides
// what ForwardScores asks for, is in `Self`, which derives from this struct:
//   kLongTurns                         whether a turn ends when the exponentials begin; if not,
//                                      when the products have begun
//   kRaisesLate                        whether maxima are raised once weights are too large; if
//                                      not, larger scores are looked for before there are weights
//   kLoopsApart                        whether tiles that a mask may cut have loops of their own.
//                                      They must if kRaisesLate: a row may see no key of them, and
//                                      then has no maximum
//   kRoundsFirst                       whether weights are rounded before it is known that maxima
//                                      need not be raised
//   kHalvesFirst                       whether a warpgroup omits the upper half of a first tile of
//                                      keys from its softmax if it sees none of it, and does not
//                                      mask the lower half if it sees all of it
//   begin(work)                        begins a tile of queries
//   output_scale()                     the factor of sums of weighted values
//   issue_output(o, p)                 issues the product that adds a tile's part to the output
//   wait_output<Pending>(o, work, tile)  waits for that tile's part
//   wait_values<Pending>(o)            the same if kRoundsFirst, but does not add NaN among the
//                                      values: returns whether there is some,
//   add_nan(o, work, tile)             which this adds
//   round(p, s)                        makes an operand of the weights
//   take_out_nonfinite(o, work, tile)  called before the part of a tile that a mask cuts through
template <class Self, class Smem, int Dims>
struct ForwardConsumer : ForwardScores<Self, Smem> {
    using Base = ForwardScores<Self, Smem>;
    using Base::bits_of_row;
    using Base::compute_products;
    using Base::draw_kept;
    using Base::load_bias;
    using Base::mask_of;
    using Base::mask_scores;
    using Base::params;
    using Base::row_bits;
    using Base::self;
    using Base::shape_scores;
    using Base::smem;
    using Base::take_slope;
    using Base::tile_scale;
    using Base::warpgroup;
    using Output = WgmmaSums<Dims>;

    const Turns turns;
    Current current;
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> k_at, v_at;

    __device__ ForwardConsumer(Smem& smem, const Params& params, int warpgroup)
        : Base(smem, params, warpgroup), turns(warpgroup), current(smem.work, warpgroup) {}

    // Processes all tiles of queries that the block takes.
    __device__ void consume() {
        Scores s;
        Weights p;

        const WorkTile& work = current.tile;
        if (!begin_tile(receive())) return;
        KeyRange keys = key_tiles_of(params.call, work);
        issue_first_scores(s);
        for (;;) {
            self().begin(work);
            if constexpr (kAlibi) take_slope(work);
            Output o = {};
            RowPair softmax = attend_to_all(o, p, s, work, keys);
            const bool is_part = kPartsKeys && holds_part(work);
            if (kOutputFirst || is_part) {
                // The next queries are copied while the output is stored.
                finish_output(o, p, work, keys.begin);
                if (!is_part || joins_parts(o, softmax, work)) store(o, softmax, work);
                if (!begin_tile(receive())) return;
                keys = key_tiles_of(params.call, work);
                issue_first_scores(s);
            } else {
                Current::Received next = receive();
                if (!next.exists()) {
                    finish_output(o, p, work, keys.begin);
                    return store(o, softmax, work);
                }
                // The next queries are here: their first scores are issued together with the last
                // output of this tile.
                turns.wait();
                self().issue_output(o, p);
                issue_scores(s);
                turns.pass();
                self().template wait_output<1>(o, work, keys.begin);
                store(o, softmax, work);
                begin_tile(next);
                keys = key_tiles_of(params.call, work);
            }
        }
    }

    // Processes all tiles of keys; the scores of the first are under way. The output of the last is
    // left to the caller.
    __device__ RowPair attend_to_all(Output& o, Weights& p, Scores& s, const WorkTile& work,
                                     KeyRange keys) {
        // Or addresses in the loops below would be in registers of each lane.
        if (kQueryStages > 1) q_at.stage = uniform(q_at.stage);
        if constexpr (kKeyMask) return attend_to_seen(o, p, s, work);
        int tile = keys.end - 1;
        const auto last = [&] { return tile == keys.begin; };
        RowPair softmax = first_weights(o, p, s, work, tile, last());
        --tile;
        if constexpr (Self::kLoopsApart) {
            if constexpr (kRangeMask) {  // or only the first tile may be cut
                for (; tile >= max(keys.whole_end, keys.begin); --tile)
                    attend<true>(o, softmax, p, work, tile, last());
            }
            for (; tile >= max(keys.whole_begin, keys.begin); --tile)
                attend<false>(o, softmax, p, work, tile, last());
            if constexpr (kWindow) {
                for (; tile >= keys.begin; --tile) attend<true>(o, softmax, p, work, tile, last());
            }
        } else {
            for (; tile >= keys.begin; --tile)
                attend<kRangeMask>(o, softmax, p, work, tile, last(), !keys.is_whole(tile));
        }
        q_at.advance();
        return softmax;
    }

    // The same for the tiles that the producer names, since a mask or a mask_mod hides others.
    __device__ RowPair attend_to_seen(Output& o, Weights& p, Scores& s, const WorkTile& work) {
        if constexpr (kSeenBits) row_bits = bits_of_row(work);
        TileLabel seen = receive_keys();
        RowPair softmax = first_weights(o, p, s, work, seen.tile(), seen.last(), seen.cut());
        while (!seen.last()) {
            seen = receive_keys();
            if (Self::kLoopsApart && !seen.cut()) {
                attend<false>(o, softmax, p, work, seen.tile(), seen.last());
            } else {
                attend<true>(o, softmax, p, work, seen.tile(), seen.last(), seen.cut());
            }
        }
        q_at.advance();
        return softmax;
    }

    // The weights of a tile of queries for its first tile of keys.
    __device__ RowPair first_weights(Output& o, Weights& p, Scores& s, const WorkTile& work,
                                     int tile, bool last, bool cut = true) {
        RowPair softmax;
        float sums[2];
        TileOptions options;
        look_up(options, work, tile, cut);
        if constexpr (kDropout) draw_kept(options.kept, work, tile);
        wait_scores<0>(s, last);
        shape_scores(s, options.bias, work, tile);
        if constexpr (Self::kHalvesFirst) {
            weigh_first_by_halves(softmax, s, sums, work, tile, last);
        } else {
            if (cut) self().mask_first(s, options.seen, work, tile);
            weigh_first<WholeTile>(softmax, s, sums, work, tile, last);
        }
        softmax.add(sums);
        self().round(p, s);
        if constexpr (kDropout) options.kept.drop(p);
        if (cut) self().take_out_nonfinite(o, work, tile);
        return softmax;
    }

    // Sets the maxima by the Part of a first tile of products, and computes the weights under them.
    template <class Part>
    __device__ void weigh_first(RowPair& softmax, Scores& s, float (&sums)[2], const WorkTile& work,
                                int tile, bool last) {
        softmax.template begin<Part>(s, tile_scale());
        // Of three warpgroups, two keep working while one raises its maxima.
        constexpr bool kLooksAhead = kHeadroom > 0 && kConsumers <= 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_of(work, half);
            float& max = softmax.rows[half].max;
            if (kLooksAhead && !last && mask_of(work).keys_end(row) < tile * kBlockN + kFewKeys)
                max += kHeadroom + kAboveFewKeys;
            // Rows past the end see no key, but the other rows of the warp should not wait for
            // them.
            if (row >= work.sequence(params.call).seqlen_q) max = 0;
        }
        softmax.template weigh<Part>(s, tile_scale(), sums);
    }

    // The same with only the half of the tile that the warpgroup sees, if it is one; also masks.
    __device__ void weigh_first_by_halves(RowPair& softmax, Scores& s, float (&sums)[2],
                                          const WorkTile& work, int tile, bool last) {
        constexpr int kHalf = kBlockN / 2;
        using Lower = TilePart<typename Self::KeyOrder, 0, kHalf>;
        using Upper = TilePart<typename Self::KeyOrder, kHalf, kBlockN>;
        const Mask mask = mask_of(work);
        const int first_row = work.first_row + warpgroup * kWgmmaM;
        const int last_row = first_row + kWgmmaM - 1, middle = tile * kBlockN + kHalf;
        // Votes tell the compiler that all lanes take the same branch.
        const bool lower_cut = __any_sync(0xffffffffu, mask.keys_end(first_row) < middle);
        const bool upper_seen = __any_sync(0xffffffffu, mask.diagonal(last_row) >= middle);
        if (lower_cut) this->template mask_part<Lower>(s, work, tile);
        if (!upper_seen) {
            weigh_first<Lower>(softmax, s, sums, work, tile, last);
        } else {
            this->template mask_part<Upper>(s, work, tile);
            weigh_first<WholeTile>(softmax, s, sums, work, tile, last);
        }
    }

    // Computes the scores of a tile of keys together with the output of the tile before, then the
    // weights of this tile. It is Masked if a mask may cut through it, and `cut` if one does.
    template <bool Masked>
    __device__ void attend(Output& o, RowPair& softmax, Weights& p, const WorkTile& work, int tile,
                           bool last, bool cut = Masked) {
        Scores s;
        float sums[2], shrink[2];
        TileOptions options;
        look_up(options, work, tile, cut);
        begin_products(s, o, p);
        make_scores<Masked>(s, o, options, work, tile, last, cut);
        bool raised = weigh_tile<Masked>(s, softmax, sums, shrink);
        raised |= finish_tile_before<Masked>(o, softmax, p, s, sums, shrink, work, tile);
        if (__builtin_expect(raised, false)) rescale(o, shrink);
        softmax.add(sums);
        make_operand(p, s, options);
        if (Masked && cut) self().take_out_nonfinite(o, work, tile);
    }

    // Begins to read what options need to know of a tile.
    __device__ void look_up(TileOptions& options, const WorkTile& work, int tile, bool cut) {
        if constexpr (kBias) load_bias(options.bias, work, tile);
        if (kSeenBits && cut) options.seen.load(row_bits + tile * kTileWords);
    }

    // Issues the scores of a tile and the output of the tile before, once it is the warpgroup's
    // turn.
    __device__ void begin_products(Scores& s, Output& o, const Weights& p) {
        turns.wait();
        issue_scores(s);
        self().issue_output(o, p);
        if (!Self::kLongTurns) turns.pass();
    }

    // Whether a warpgroup waits for both products at once. Of three, two keep the tensor cores busy
    // meanwhile. With two stages the producer needs the place of this tile's values soon; but the
    // compiler would put exponentials before a wait of its own for the output.
    __device__ static constexpr bool waits_once() {
        return !Self::kRoundsFirst && kConsumers > 2 && kStages == 2;
    }

    // Waits for the products and turns them into scores. Meanwhile, draws which weights are kept.
    template <bool Masked>
    __device__ void make_scores(Scores& s, Output& o, TileOptions& options, const WorkTile& work,
                                int tile, bool last, bool cut) {
        if constexpr (kDropout) draw_kept(options.kept, work, tile);
        wait_scores<waits_once() ? 0 : 1>(s, last);
        if constexpr (waits_once()) self().template wait_output<0>(o, work, tile + 1);
        shape_scores(s, options.bias, work, tile);
        if (Masked && cut) mask_scores(s, options.seen, work, tile);
    }

    // Whether maxima are raised only once weights are too large.
    template <bool Masked>
    static constexpr bool kLate = !Masked && Self::kRaisesLate;

    // Turns scores into weights, and adds these up. Returns whether it raised maxima before that:
    // then what was added up so far is to `shrink`.
    template <bool Masked>
    __device__ bool weigh_tile(Scores& s, RowPair& softmax, float (&sums)[2], float (&shrink)[2]) {
        bool raised = false;
        if (!kLate<Masked>) raised = softmax.raise(s, tile_scale(), shrink);
        if (Self::kLongTurns) turns.pass();
        softmax.weigh(s, tile_scale(), sums);
        return raised;
    }

    // Waits for the output of the tile before; kLate, looks for weights that are too large.
    // Returns whether it raised maxima.
    template <bool Masked>
    __device__ bool finish_tile_before(Output& o, RowPair& softmax, Weights& p, Scores& s,
                                       float (&sums)[2], float (&shrink)[2], const WorkTile& work,
                                       int tile) {
        if constexpr (Self::kRoundsFirst)
            return round_first<kLate<Masked>>(o, softmax, p, s, sums, shrink, work, tile);
        if constexpr (!waits_once()) self().template wait_output<0>(o, work, tile + 1);
        if (kLate<Masked> && __builtin_expect(softmax.any_too_large(sums), false)) {
            raise_late(s, softmax, sums, shrink, work, tile);
            return true;
        }
        return false;
    }

    // Makes an operand of weights, unless they are rounded already, and drops some.
    __device__ void make_operand(Weights& p, const Scores& s, const TileOptions& options) {
        if (!Self::kRoundsFirst) self().round(p, s);
        if constexpr (kDropout) options.kept.drop(p);
    }

    // Rounds weights, and waits for the output of the tile before. Returns whether it then raised
    // maxima; Late, it may have to. One branch for all rare cases, after everything else: without a
    // branch in between, the compiler rounds some weights while others are still being
    // exponentiated.
    template <bool Late>
    __device__ bool round_first(Output& o, RowPair& softmax, Weights& p, Scores& s,
                                float (&sums)[2], float (&shrink)[2], const WorkTile& work,
                                int tile) {
        const bool nan = self().template wait_values<0>(o);
        self().round(p, s);
        const bool rare = nan || (Late && !softmax.fit(sums));
        if (__builtin_expect(!__any_sync(0xffffffffu, rare), true)) return false;
        if (__any_sync(0xffffffffu, nan)) self().add_nan(o, work, tile + 1);
        if (!Late || !softmax.any_too_large(sums)) return false;
        raise_late(s, softmax, sums, shrink, work, tile);
        self().round(p, s);
        return true;
    }

    // Raises the maxima after weights have turned out too large.
    __device__ void raise_late(Scores& s, RowPair& softmax, float (&sums)[2], float (&shrink)[2],
                               const WorkTile& work, int tile) {
        if (softmax.shrink_weights(s, sums, shrink)) return;
        compute_products(s, work, tile);
        shape_scores(s, Bias(), work, tile);
        shrink[0] = shrink[1] = 1;
        softmax.raise(s, tile_scale(), shrink);
        softmax.weigh(s, tile_scale(), sums);
    }

    // Waits for the next tile of queries that sees any key. It is there until its queries are
    // released. Tiles that see none have output 0.
    __device__ Current::Received receive() {
        for (;;) {
            smem.q_ring[warpgroup].wait_full(q_at);
            const WorkTile& there = smem.work.of_stage[warpgroup][q_at.stage];
            const WorkTile next = there;
            __syncwarp();  // all lanes have read it
            // A vote tells the compiler that all lanes leave the loop together.
            const bool found = !next.exists() || !key_tiles_of(params.call, next).none();
            if (__all_sync(0xffffffffu, found)) return Current::held(there, next);
            release_and_advance(smem.q_ring[warpgroup], q_at);
            store(Output{}, RowPair{}, next);
        }
    }

    // Makes a tile the current one. Returns whether there is one.
    __device__ bool begin_tile(const WorkTile& next) {
        const bool exists = next.exists();
        current.become(next);
        return exists;
    }

    // Waits for the next tile of keys and its label.
    __device__ TileLabel receive_keys() {
        smem.k_ring.wait_full(k_at);
        return smem.k_ring.label_at(k_at);
    }

    // Issues the product for the scores of a tile of keys.
    __device__ void issue_scores(Scores& s) {
        smem.k_ring.wait_full(k_at);
        issue_product_nt<kDepth, kBlockN>(s, smem.q[warpgroup][q_at.stage], smem.k[k_at.stage]);
    }

    __device__ void issue_first_scores(Scores& s) {
        turns.wait();
        issue_scores(s);
        turns.pass();
    }

    // The queries are released once the last tile's scores are there. `q_at` advances only after
    // all tiles: if it changed under a condition, the compiler would assume that it differs between
    // lanes.
    template <int Pending>
    __device__ void wait_scores(Scores& s, bool last) {
        wait_product<Pending>(s);
        release_and_advance(smem.k_ring, k_at);
        if (last && threadIdx.x % 32 == 0) smem.q_ring[warpgroup].release(q_at);
        if constexpr (kSoftcap) bound(s, self().softmax_scale(), params.call.features);
    }

    __device__ void finish_output(Output& o, const Weights& p, const WorkTile& work, int tile) {
        turns.wait();
        self().issue_output(o, p);
        turns.pass();
        self().template wait_output<0>(o, work, tile);
    }

    // Writes a part of a tile. The last part continues with the merged result of all.
    __device__ bool joins_parts(Output& o, RowPair& softmax, const WorkTile& work) {
        if constexpr (kPartsKeys)
            return KeyParts<Dims>(params.call).join(o, softmax, work, warpgroup);
        return true;
    }

    __device__ void store(const Output& o, const RowPair& softmax, const WorkTile& work) {
        const OutputRows<Smem, Dims> rows{smem, params, warpgroup};
        rows.store(o, softmax, self().output_scale(), work);
    }
};
