// What the Hopper forwards share: what they work on at once, and the warpgroups that compute. The
// warps beside them are in wgmma_forward_copies.cuh; how all work beside each other is told in
// fwd_6_wgmma.cu.
//
// What is in shared memory is the kernel's: `Smem` with tiles k, v, q and out, rings k_ring, v_ring
// and q_ring, and the tiles of work that the queries are of; `Params` with tensor maps q, k, v and
// o and the call.
#pragma once

#include "bias_pairs.cuh"
#include "labelled_ring.cuh"
#include "schedule.cuh"
#include "seen_bits.cuh"
#include "seen_tiles.cuh"
#include "wgmma_pages.cuh"
#include "wgmma_softmax.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kStages = STAGES, kQueryStages = QUERY_STAGES, kStoreCols = STORE_COLS;
constexpr int kConsumers = kBlockM / kWgmmaM;
// With one stage of queries two warpgroups would wait for the next ones together; of three, one
// computes meanwhile.
constexpr bool kOutputFirst = kQueryStages == 1 && kConsumers <= 2;
static_assert((kConsumers + 1) * kWarpgroup == THREADS, "one warpgroup copies, the others compute");
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
constexpr int kDepth = round_up(kHeadDim, kWgmmaK);
// Keys that one copy brings: a tile, or as many of it as are in one page.
constexpr int kBoxKeys = BOX_KEYS;
static_assert(kBlockN % kBoxKeys == 0, "a tile must be whole boxes");
static_assert(!kPaged || kPageSize % kBoxKeys == 0, "a page must be whole boxes");

using QueryRows = PanelTile<kWgmmaM, kHeadDim>;
using KeyRows = PanelTile<kBlockN, kHeadDim>;
using ValueRows = PanelTile<kBlockN, kValueDim>;

using Order = TileOrder<kBlockM, SECTION_BYTES>;
using KeyRange = KeyTileRange<kBlockM, kBlockN>;
using KeyPages = TilePages<kBlockN>;
using Scores = WgmmaSums<kBlockN>;
using Weights = WgmmaOperand<kBlockN>;
using Bias = BiasPairs<bias_t, kBlockN / 2>;

__device__ inline KeyRange key_tiles_of(const ForwardParams& call, const WorkTile& work) {
    return KeyRange(work.sequence(call).mask(call.features), work.first_row);
}

// ---- which tiles of keys there are, if a mask_mod hides some ----

// The parts of tiles that it shows, and where kSeenBits is set a bit for each of their scores. In
// the workspace the count of tiles taken comes first, then the parts, then the bits.
constexpr bool kSeenBits = SEEN_BITS;
constexpr int kSeenAlignment = 16;  // in bytes, of each of these
constexpr int kRowWords = kBlockN / kWordKeys, kTileWords = kBlockM * kRowWords;
using Seen = SeenTiles<kBlockM, kBlockN>;
using SeenScores = SeenBits<kBlockN / 2>;
__device__ inline unsigned int* tiles_taken(const ForwardParams& call) {
    return static_cast<unsigned int*>(call.workspace);
}
__device__ inline SeenPart* seen_parts(const ForwardParams& call) {
    constexpr int kWords = kSeenAlignment / sizeof(unsigned int);
    return reinterpret_cast<SeenPart*>(tiles_taken(call) + kWords);
}
__device__ inline unsigned int* seen_bits(const ForwardParams& call) {
    constexpr int kParts = kSeenAlignment / sizeof(SeenPart);
    const long long parts = (Seen::count(call) + kParts - 1) / kParts * kParts;
    return reinterpret_cast<unsigned int*>(seen_parts(call) + parts);
}

using TileRing = LabelledRing<kStages>;

// A warp is done with a stage: it has read it, or its part of a product has.
template <int Stages>
__device__ inline void release_and_advance(Ring<Stages>& ring, RingPosition<Stages>& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
    at.advance();
}

// ---- the consumers: a warpgroup for 64 rows ----

// Barriers of parts of the block; __syncthreads has number 0.
enum NamedBarrier {
    kFirstTurn = 1,
    kFirstStore = kFirstTurn + kConsumers,
    kAllConsumers = kFirstStore + kConsumers
};

// Warpgroups issue their products in turn. While one waits for its turn, or for its products, the
// other's softmax runs.
struct Turns {
    int warpgroup;

    __device__ explicit Turns(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == kConsumers - 1) pass();
    }
    __device__ void wait() const {
        if (kConsumers > 1) ptx::named_barrier_sync<2 * kWarpgroup>(kFirstTurn + warpgroup);
    }
    __device__ void pass() const {
        const int next = warpgroup == kConsumers - 1 ? 0 : warpgroup + 1;
        if (kConsumers > 1) ptx::named_barrier_arrive<2 * kWarpgroup>(kFirstTurn + next);
    }
};

// A warpgroup that computes. Dims are the columns of its sums of O. What each kernel does in its
// own way is in `Self`, which is derived from this one:
//   KeyOrder                           which keys of a tile a thread's scores are of, if others
//                                      than KeysInOrder says
//   kLongTurns                         whether a turn ends with the exponentials' beginning, not
//                                      with the products'
//   kRaisesLate                        whether maxima are raised once weights are too large; else
//                                      it is looked for larger scores before there are weights
//   begin(work)                        takes up a tile of queries
//   scale(), softmax_scale()           what turns products into scores, in log 2 and not
//   output_scale()                     what sums of weighted values are multiplied with
//   issue_output(o, p)                 issues the product that adds a tile's part to the output
//   wait_output<Pending>(o, work, tile)  waits for the part of that tile of keys
//   round(p, s)                        makes an operand of the weights
//   take_out_nonfinite(o, work, tile)  before the part of a tile that a mask cuts through
//   kRoundsFirst                       whether weights are rounded before it is known that maxima
//                                      need not be raised
template <class Self, class Smem, class Params, int Dims>
struct ForwardConsumer {
    using Output = WgmmaSums<Dims>;
    using KeyOrder = KeysInOrder;

    Smem& smem;
    const Params& params;
    const int warpgroup;
    const Turns turns;
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> k_at, v_at;
    float alibi_slope;  // of the head that is worked on, in units of products
    float lowered;      // by how much ALiBi lowers all of this thread's in a tile, likewise
    const unsigned int* row_bits;  // of this thread's first row, which scores are seen

    __device__ ForwardConsumer(Smem& smem, const Params& params, int warpgroup)
        : smem(smem), params(params), warpgroup(warpgroup), turns(warpgroup) {}

    __device__ Self& self() { return static_cast<Self&>(*this); }

    // All tiles of queries that the block takes.
    __device__ void consume() {
        Scores s;
        Weights p;

        WorkTile work = receive();
        if (!work.exists()) return;
        KeyRange keys = key_tiles_of(params.call, work);
        issue_first_scores(s);
        for (;;) {
            self().begin(work);
            if constexpr (kAlibi) take_slope(work);
            Output o = {};
            const RowPair softmax = attend_to_all(o, p, s, work, keys);
            if constexpr (kOutputFirst) {
                // The next queries come while the output is on its way.
                finish_output(o, p, work, keys.begin);
                store(o, softmax, work);
                work = receive();
                if (!work.exists()) return;
                keys = key_tiles_of(params.call, work);
                issue_first_scores(s);
            } else {
                const WorkTile next = receive();
                if (!next.exists()) {
                    finish_output(o, p, work, keys.begin);
                    return store(o, softmax, work);
                }
                // They are here: the first scores of the next tile at once with the last of this
                // one's output.
                turns.wait();
                self().issue_output(o, p);
                issue_scores(s);
                turns.pass();
                self().template wait_output<1>(o, work, keys.begin);
                store(o, softmax, work);
                work = next;
                keys = key_tiles_of(params.call, work);
            }
        }
    }

    // All tiles of keys, the first one's scores being under way. What is left to do is the output
    // of the last.
    __device__ RowPair attend_to_all(Output& o, Weights& p, Scores& s, const WorkTile& work,
                                     KeyRange keys) {
        // It is the same in all lanes, which the compiler cannot see, and would have addresses in
        // the loops below in lanes' registers.
        if (kQueryStages > 1) q_at.stage = __shfl_sync(0xffffffffu, q_at.stage, 0);
        if constexpr (kMaskMod) return attend_to_seen(o, p, s, work);
        int tile = keys.end - 1;
        const auto last = [&] { return tile == keys.begin; };
        RowPair softmax = first_weights(o, p, s, work, tile, last());
        --tile;
        if constexpr (kRangeMask) {  // or it is just the first that may be cut
            for (; tile >= max(keys.whole_end, keys.begin); --tile)
                attend<true>(o, softmax, p, work, tile, last());
        }
        for (; tile >= max(keys.whole_begin, keys.begin); --tile)
            attend<false>(o, softmax, p, work, tile, last());
        if constexpr (kWindow) {
            for (; tile >= keys.begin; --tile) attend<true>(o, softmax, p, work, tile, last());
        }
        q_at.advance();
        return softmax;
    }

    // The same of those tiles that the producer names, since a mask_mod hides others.
    __device__ RowPair attend_to_seen(Output& o, Weights& p, Scores& s, const WorkTile& work) {
        if constexpr (kSeenBits) row_bits = bits_of_row(work);
        TileLabel seen = receive_keys();
        RowPair softmax = first_weights(o, p, s, work, seen.tile, seen.last, seen.cut);
        while (!seen.last) {
            seen = receive_keys();
            attend<true>(o, softmax, p, work, seen.tile, seen.last, seen.cut);
        }
        q_at.advance();
        return softmax;
    }

    // The weights of the first tile of keys that a tile of queries looks at.
    __device__ RowPair first_weights(Output& o, Weights& p, Scores& s, const WorkTile& work,
                                     int tile, bool last, bool cut = true) {
        RowPair softmax;
        float sums[2];
        Bias bias;
        SeenScores seen;
        if constexpr (kBias) load_bias(bias, work, tile);
        if (kSeenBits && cut) seen.load(row_bits + tile * kTileWords);
        wait_scores<0>(s, last);
        shape_scores(s, bias, work, tile);
        if (cut) self().mask_first(s, seen, work, tile);
        softmax.begin(s, tile_scale());
        // Of three warpgroups two work on while one raises its maxima.
        constexpr bool kLooksAhead = kHeadroom > 0 && kConsumers <= 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_of(work, half);
            float& max = softmax.rows[half].max;
            if (kLooksAhead && !last && mask_of(work).keys_end(row) < tile * kBlockN + kFewKeys)
                max += kHeadroom + kAboveFewKeys;
            // Rows past the end see no key, but others of their warp should not wait for them.
            if (row >= work.sequence(params.call).seqlen_q) max = 0;
        }
        softmax.weigh(s, tile_scale(), sums);
        softmax.add(sums);
        self().round(p, s);
        if (cut) self().take_out_nonfinite(o, work, tile);
        return softmax;
    }

    // The scores of a tile of keys at once with the output of the tile before; then the weights of
    // this tile, which is Masked if a mask may cut through it, and does so if it is `cut`.
    template <bool Masked>
    __device__ void attend(Output& o, RowPair& softmax, Weights& p, const WorkTile& work, int tile,
                           bool last, bool cut = Masked) {
        Scores s;
        float sums[2], shrink[2];
        Bias bias;
        SeenScores seen;
        if constexpr (kBias) load_bias(bias, work, tile);
        if (kSeenBits && cut) seen.load(row_bits + tile * kTileWords);
        turns.wait();
        issue_scores(s);
        self().issue_output(o, p);
        if (!Self::kLongTurns) turns.pass();

        wait_scores<1>(s, last);
        shape_scores(s, bias, work, tile);
        constexpr bool kLate = !Masked && Self::kRaisesLate;
        bool raised = false;
        if (Masked && cut) mask_scores(s, seen, work, tile);
        if (!kLate) raised = softmax.raise(s, tile_scale(), shrink);
        if (Self::kLongTurns) turns.pass();
        softmax.weigh(s, tile_scale(), sums);

        if constexpr (Self::kRoundsFirst) {
            // One branch for all that is rare, after all that is not: without one between, the
            // compiler has weights rounded while others are still exponentiated.
            const bool nan = self().template wait_values<0>(o);
            self().round(p, s);
            const bool rare = nan || (kLate && !softmax.fit(sums));
            if (__builtin_expect(__any_sync(0xffffffffu, rare), false)) {
                if (__any_sync(0xffffffffu, nan)) self().add_nan(o, work, tile + 1);
                if (kLate && softmax.any_too_large(sums)) {
                    raise_late(s, softmax, sums, shrink, work, tile);
                    self().round(p, s);
                    raised = true;
                }
            }
        } else {
            self().template wait_output<0>(o, work, tile + 1);
            if (kLate && __builtin_expect(softmax.any_too_large(sums), false)) {
                raise_late(s, softmax, sums, shrink, work, tile);
                raised = true;
            }
        }
        if (__builtin_expect(raised, false)) rescale(o, shrink);
        softmax.add(sums);
        if (!Self::kRoundsFirst) self().round(p, s);
        if (Masked && cut) self().take_out_nonfinite(o, work, tile);
    }

    // Raises the maxima once weights have turned out too large.
    __device__ void raise_late(Scores& s, RowPair& softmax, float (&sums)[2], float (&shrink)[2],
                               const WorkTile& work, int tile) {
        if (softmax.shrink_weights(s, sums, shrink)) return;
        compute_products(s, work, tile);
        shape_scores(s, Bias(), work, tile);
        shrink[0] = shrink[1] = 1;
        softmax.raise(s, tile_scale(), shrink);
        softmax.weigh(s, tile_scale(), sums);
    }

    // Waits for the queries of the next tile of which any row sees a key. Those of the others have
    // output 0.
    __device__ WorkTile receive() {
        for (;;) {
            smem.q_ring[warpgroup].wait_full(q_at);
            const WorkTile work = smem.work[warpgroup][q_at.stage];
            __syncwarp();
            // By a vote, after which the compiler knows that all leave the loop together.
            const bool found = !work.exists() || !key_tiles_of(params.call, work).none();
            if (__all_sync(0xffffffffu, found)) return work;
            release_and_advance(smem.q_ring[warpgroup], q_at);
            store(Output{}, RowPair{}, work);
        }
    }

    // Waits for the next tile of keys, and for its name.
    __device__ TileLabel receive_keys() {
        smem.k_ring.wait_full(k_at);
        return smem.k_ring.label_at(k_at);
    }

    // Issues the product for the scores of one tile of keys.
    __device__ void issue_scores(Scores& s) {
        smem.k_ring.wait_full(k_at);
        issue_product_nt<kDepth, kBlockN>(s, smem.q[warpgroup][q_at.stage], smem.k[k_at.stage]);
    }

    __device__ void issue_first_scores(Scores& s) {
        turns.wait();
        issue_scores(s);
        turns.pass();
    }

    // The queries are done with once the last tile's scores are there. `q_at` stays until all of
    // the tiles are: were it to change under a condition, the compiler would take it for different
    // in each lane.
    template <int Pending>
    __device__ void wait_scores(Scores& s, bool last) {
        wait_product<Pending>(s);
        release_and_advance(smem.k_ring, k_at);
        if (last && threadIdx.x % 32 == 0) smem.q_ring[warpgroup].release(q_at);
        if constexpr (kSoftcap) bound(s, self().softmax_scale(), params.call.features.softcap);
    }

    // Computes the products of a tile of keys once more, from what is in memory: slowly, for what
    // hardly ever happens.
    __device__ void compute_products(Scores& s, const WorkTile& work, int tile) {
        const Sequence sequence = work.sequence(params.call);
        const auto q = sequence.queries<const scalar_t>(params.call.q, work.head);
        const auto k = sequence.keys<const scalar_t>(params.call.k, work.kv_head);
        const int first_row = row_of(work, 0), end = sequence.seqlen_q - 1;
        const int first_key = first_key_of_thread(tile);
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
            unsigned int row = min(first_row + i / 2 % 2 * 8, end);
            ptx::hold(row);  // or those of all products would be worked out before
            const scalar_t* const a = q.row(row);
            unsigned int key = first_key + Self::KeyOrder::after_first(i);
            ptx::hold(key);
            const scalar_t* const b = k.row(key);
            s[i] = 0;
#pragma unroll 1
            for (int dim = 0; dim < kHeadDim; ++dim) s[i] += to_acc(a[dim]) * to_acc(b[dim]);
        }
    }

    __device__ void take_slope(const WorkTile& work) {
        const float slope = alibi_slope_of(params.call.features, work.batch, work.head);
        alibi_slope = slope * unit_of(self().scale());
    }
    // The product whose score is 1, not in units of log 2.
    __device__ static float unit_of(Scale scale) {
        return float(kLog2E) * ptx::reciprocal_fast(scale.factor);
    }

    __device__ void load_bias(Bias& bias, const WorkTile& work, int tile) const {
        bias.load(params.call.features, mask_of(work), work.batch, work.head, row_of(work, 0),
                  first_key_of_thread(tile));
    }

    // Which scores of this thread's first row are seen, from the first tile of keys on.
    __device__ const unsigned int* bits_of_row(const WorkTile& work) const {
        const ForwardParams& call = params.call;
        const Seen of_head(seen_parts(call), call, work.sequence(call), work.head);
        const long long tile = of_head.number(seen_parts(call), work.first_row, 0);
        const int row = row_of(work, 0) - work.first_row;
        return seen_bits(call) + tile * kTileWords + row * kRowWords;
    }

    // Adds to products what makes more of them, by the caller's function, too.
    __device__ void shape_scores(Scores& s, const Bias& bias, const WorkTile& work, int tile) {
        if constexpr (!kProductUnits && !kSoftcap) {
#pragma unroll
            for (float& score : s) score *= self().softmax_scale();
        }
        if constexpr (kBias) bias.add_to(s, unit_of(self().scale()));
        if constexpr (kAlibi) {
            const int diagonal = mask_of(work).diagonal(row_of(work, 0));
            lowered = add_alibi(s, alibi_slope, diagonal - first_key_of_thread(tile));
        }
        if constexpr (kScoreMod) modify(s, work, tile);
    }

    // Applies the caller's function.
    __device__ void modify(Scores& s, const WorkTile& work, int tile) {
        const Features& features = params.call.features;
        const int row = row_of(work, 0), key = first_key_of_thread(tile);
        if constexpr (kScoreModAdds) {
            const float unit = unit_of(self().scale());
            const auto add = [&](float& score, SplitIndex q_idx, SplitIndex kv_idx) {
                score += added_score(features, unit, work.batch, work.head, q_idx, kv_idx);
            };
            modify_all(s, mask_of(work), row, key, add);
        } else {
            if constexpr (kAlibi) {  // the function is given scores as they are
#pragma unroll
                for (float& score : s) score -= lowered;
                lowered = 0;
            }
            const auto replace = [&](float& score, SplitIndex q_idx, SplitIndex kv_idx) {
                score = modified_score(features, score, work.batch, work.head, q_idx, kv_idx);
            };
            modify_all(s, mask_of(work), row, key, replace);
        }
    }

    // What turns those of the tile that is worked on into scores.
    __device__ Scale tile_scale() {
        Scale scale = self().scale();
        if constexpr (kAlibi) scale.lowered = lowered * scale.factor;
        return scale;
    }

    __device__ void mask_scores(Scores& s, const SeenScores& seen, const WorkTile& work, int tile) {
        const float masked = self().scale().masked();
        if constexpr (kSeenBits) return seen.hide(s, masked);
        apply_mask<typename Self::KeyOrder>(s, mask_of(work), row_of(work, 0), tile * kBlockN,
                                            masked);
        if constexpr (kMaskMod) {
            hide(s, params.call.features, mask_of(work), work.batch, work.head, row_of(work, 0),
                 tile * kBlockN, masked);
        }
    }

    // The same of the first tile.
    __device__ void mask_first(Scores& s, const SeenScores& seen, const WorkTile& work, int tile) {
        mask_scores(s, seen, work, tile);
    }

    __device__ void finish_output(Output& o, const Weights& p, const WorkTile& work, int tile) {
        turns.wait();
        self().issue_output(o, p);
        turns.pass();
        self().template wait_output<0>(o, work, tile);
    }

    // The row of Q and O that a thread's half (0: row g, 1: row g + 8) of its fragments belongs to.
    __device__ int row_of(const WorkTile& work, int half) const {
        unsigned int thread = threadIdx.x;
        ptx::hold(thread);  // or each sum would be kept in a register from tile to tile
        return work.first_row + thread / 32 * 16 - kWarpgroup / 2 + half * 8 + thread % 32 / 4;
    }

    // The first of the keys of a tile that a thread has scores of.
    __device__ static int first_key_of_thread(int tile) {
        return tile * kBlockN + Self::KeyOrder::first();
    }

    __device__ Mask mask_of(const WorkTile& work) const {
        return work.sequence(params.call).mask(params.call.features);
    }
    __device__ bool sees(const Mask& mask, const WorkTile& work, int row, int key) const {
        return mask.in_range(row, key) &&
               mod_sees(params.call.features, work.batch, work.head, row, key);
    }

    // Divides the output by the sums of the weights, and sends it out.
    __device__ void store(const Output& sums, RowPair softmax, const WorkTile& work) {
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& row = softmax.rows[half];
            row.total<4>();
            scale[half] = self().output_scale();
            if constexpr (kSink) scale[half] *= row.add(sink_log2(work.head));
            scale[half] *= row.sum == 0 ? 0 : ptx::reciprocal_fast(row.sum);
        }
        using Element = typename Smem::StoredRows::Element;
#pragma unroll
        for (int col = 0; col < Dims; col += kStoreCols) {
            constexpr int kCols = min_of(kStoreCols, Dims);
            WgmmaSums<kCols> part = {};
#pragma unroll
            for (int i = 0; i < kCols / 2 && col / 2 + i < Dims / 2; ++i) {
                part[i] = sums[col / 2 + i] * scale[i / 2 % 2];
            }
            WgmmaOperand<kCols, Element> rounded;
            round_to_operand<kCols, Element>(rounded, part);
            send_out<kCols>(rounded, work, col);
        }
        store_lse(softmax, work);  // last: the fence before a copy waits for what was written
    }

    // The head's sink is one more score of each of its rows.
    __device__ float sink_log2(int head) const {
        return static_cast<const float*>(params.call.features.sink)[head] * float(kLog2E);
    }

    // Sends out some columns of the output through the warpgroup's part of shared memory, once
    // those before have left it.
    template <int Cols>
    __device__ void send_out(const WgmmaOperand<Cols, typename Smem::StoredRows::Element>& values,
                             const WorkTile& work, int first_col) {
        const bool leader = threadIdx.x % kWarpgroup == 0;
        auto& rows = smem.out[warpgroup];
        if (leader) ptx::wait_stores_read();
        ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup);
        write_rows<Cols>(rows, values, threadIdx.x % kWarpgroup / 32 * 16);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup);
        const Sequence sequence = work.sequence(params.call);
        const int row = work.first_row + warpgroup * kWgmmaM;
        if (kPacked && row + kWgmmaM > sequence.seqlen_q) {
            // The copy engine would write beyond the sequence.
            using Element = typename Smem::StoredRows::Element;
            write_first_rows<kValueDim, kWarpgroup>(
                sequence.queries<Element>(params.call.o, work.head), rows, sequence.seqlen_q - row,
                row, first_col, threadIdx.x % kWarpgroup);
        } else if (leader) {
            store_tile(params.o, rows, kPacked ? 0 : work.batch, work.head, sequence.first_q + row,
                       first_col);
        }
    }

    __device__ void store_lse(const RowPair& softmax, const WorkTile& work) const {
        float* lse = static_cast<float*>(params.call.lse);
        if (!lse || threadIdx.x % 4 != 0) return;
        const Sequence sequence = work.sequence(params.call);
        lse += sequence.first_row(work.head, params.call.sizes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_of(work, half);
            if (row < sequence.seqlen_q) lse[row] = softmax.rows[half].lse();
        }
    }
};
