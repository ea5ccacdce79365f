// How the Hopper forwards turn a tile's products into scores, in a warpgroup's registers.
#pragma once

#include "hopper/forward/wgmma_forward_block.cuh"
#include "scores/head_numbers.cuh"

// A warpgroup's tile of queries, and what becomes of its products with keys. What each kernel does
// in its own way is in `Self`, which derives from this struct:
//   KeyOrder                    the keys of a thread's scores, if not in the order of KeysInOrder
//   kRecomputesAtOnce           how many products are recomputed at once: fewer are more code, and
//                               more need more registers
//   scale(), softmax_scale()    turns products into scores, in log 2 and not
//   mask_first(s, seen, work, tile)  masks the first tile, if differently from the others
template <class Self, class Smem>
struct ForwardScores {
    using KeyOrder = KeysInOrder;

    Smem& smem;
    const Params& params;
    const int warpgroup;
    float alibi_slope;  // of the current head, in units of products
    float lowered;      // how much ALiBi lowers all of this thread's scores of a tile
    RingPosition<1> bias_at;
    const unsigned int* row_bits;  // which scores of this thread's first row are seen

    __device__ ForwardScores(Smem& smem, const Params& params, int warpgroup)
        : smem(smem), params(params), warpgroup(warpgroup) {}

    __device__ Self& self() { return static_cast<Self&>(*this); }

    // Recomputes the products of a tile of keys from memory: slowly, for a case that hardly ever
    // occurs.
    __device__ void compute_products(Scores& s, const WorkTile& work, int tile) {
        // Pairs of keys, of the first row and then of the second.
        constexpr int kAtOnce = Self::kRecomputesAtOnce;
        constexpr int kRows = kAtOnce < 4 ? 1 : 2, kKeys = kAtOnce / kRows;
        static_assert(kAtOnce == 1 || kAtOnce == 2 || kAtOnce % 4 == 0,
                      "pairs, of one row or both");
        const Sequence sequence = work.sequence(params.call);
        const auto q = sequence.queries<const scalar_t>(params.call.q, work.head);
        const auto k = sequence.keys<const key_t>(params.call.k, work.kv_head);
        const int first_row = row_of(work, 0), end = sequence.seqlen_q - 1;
        const int first_key = first_key_of_thread(tile);
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i += kAtOnce) {
            const scalar_t* a[kRows];
            const key_t* b[kKeys];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                unsigned int row = min(first_row + (i / 2 + r) % 2 * 8, end);
                ptx::hold(row);  // or the rows of all products would be computed in advance
                a[r] = q.row(row);
            }
#pragma unroll
            for (int n = 0; n < kKeys; ++n) {
                unsigned int key = first_key + Self::KeyOrder::after_first(i + n / 2 * 4 + n % 2);
                ptx::hold(key);
                b[n] = k.row(key);
            }
#pragma unroll
            for (int e = 0; e < kAtOnce; ++e) s[i + e] = 0;
#pragma unroll 1
            for (int dim = 0; dim < kHeadDim; ++dim) {
#pragma unroll
                for (int e = 0; e < kAtOnce; ++e)
                    s[i + e] += to_acc(a[e / 2 % kRows][dim]) * to_acc(b[e / 4 * 2 + e % 2][dim]);
            }
        }
    }

    __device__ void take_slope(const WorkTile& work) {
        const float slope = alibi_slope_of(params.call.features, work.batch, work.head);
        alibi_slope = slope * unit_of(self().scale());
    }
    // What has the score 1, not in log 2.
    __device__ static float unit_of(Scale scale) {
        return float(kLog2E) * ptx::reciprocal_fast(scale.factor);
    }

    __device__ void load_bias(Bias& bias, const WorkTile& work, int tile) const {
        bias.load(params.call.features, mask_of(work), work.batch, work.head, row_of(work, 0),
                  first_key_of_thread(tile));
    }

    __device__ void draw_kept(Kept& kept, const WorkTile& work, int tile) const {
        const unsigned int matrix = matrix_number(params.call.sizes, work.batch, work.head);
        kept.draw(params.call.features, matrix, row_of(work, 0), first_key_of_thread(tile));
    }

    // The bits of this thread's first row, from the first tile of keys on.
    __device__ const unsigned int* bits_of_row(const WorkTile& work) const {
        const ForwardParams& call = params.call;
        const Seen of_head(seen_parts(call), call, work.sequence(call), work.head);
        const long long tile = of_head.number(seen_parts(call), work.first_row, 0);
        const int row = kKeyBits ? 0 : row_of(work, 0) - work.first_row;
        return seen_bits(call) + tile * kTileWords + row * kRowWords;
    }

    // Adds to products what turns them into scores, including the caller's function.
    __device__ void shape_scores(Scores& s, const Bias& bias, const WorkTile& work, int tile) {
        if constexpr (!kKeepsUnits && !kSoftcap) {
#pragma unroll
            for (float& score : s) score *= self().softmax_scale();
        }
        if constexpr (kBias) bias.add_to(s, unit_of(self().scale()), smem, warpgroup, bias_at);
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
            if constexpr (kAlibi) {  // the function takes actual scores
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

    // The scale of the current tile's scores.
    __device__ Scale tile_scale() {
        Scale scale = self().scale();
        if constexpr (kAlibi) scale.lowered = lowered * scale.factor;
        return scale;
    }

    __device__ void mask_scores(Scores& s, const SeenScores& seen, const WorkTile& work, int tile) {
        const float masked = self().scale().masked();
        if constexpr (kSeenBits) seen.hide(s, masked);
        // Bits of scores have the range of each row, too; those of keys end where the keys do.
        if constexpr (kSeenBits && (!kKeyBits || kRowsAlike)) return;
        apply_mask<typename Self::KeyOrder>(s, mask_of(work), row_of(work, 0), tile * kBlockN,
                                            masked);
        if constexpr (kMaskMod) {
            hide(s, params.call.features, mask_of(work), work.batch, work.head, row_of(work, 0),
                 tile * kBlockN, masked);
        }
    }

    // The same for the Part of a tile, under nothing but a causal mask.
    template <class Part>
    __device__ void mask_part(Scores& s, const WorkTile& work, int tile) {
        apply_mask<typename Self::KeyOrder, Part>(s, mask_of(work), row_of(work, 0), tile * kBlockN,
                                                  self().scale().masked());
    }

    // The same for the first tile.
    __device__ void mask_first(Scores& s, const SeenScores& seen, const WorkTile& work, int tile) {
        mask_scores(s, seen, work, tile);
    }

    // The first key of a thread's scores in a tile.
    __device__ static int first_key_of_thread(int tile) {
        return tile * kBlockN + Self::KeyOrder::first();
    }

    __device__ Mask mask_of(const WorkTile& work) const {
        return work.sequence(params.call).mask(params.call.features);
    }
    __device__ bool sees(const Mask& mask, const WorkTile& work, int row, int key) const {
        const Features& features = params.call.features;
        if (!mask.in_range(row, key)) return false;
        if (kMaskBits != 0 && !KeyMask(features, work.batch, work.head).shows(row, key))
            return false;
        return mod_sees(features, work.batch, work.head, row, key);
    }
};
