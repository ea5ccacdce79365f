// What a warpgroup of fwd_9_float32 does with its queries and a tile of keys: the verbs of the main
// loop.
#pragma once

#include "hopper/float32/fwd_9_block.cuh"
#include "hopper/float32/half_products.cuh"
#include "hopper/product_turns.cuh"
#include "scores/kept_scores.cuh"
#include "scores/mask_sixteens.cuh"

using Turns = ProductTurns<kConsumers, 1>;  // barrier 0 is the block's

// The exponent of the largest weight of a row.
constexpr int kTopWeight = 7;
// The unit of a product with halves of values, apart from the values' exponents.
constexpr float kPartUnit = 1.f / (1 << kTopExponent);

using Scores = WgmmaSums<kBlockN>;
using Output = WgmmaSums<kDims>;
// Whether the output is added to panel by panel: of many dims, a thread has no registers for all.
// With one part for each operand, tiles have more keys, and fewer dims are already too many.
constexpr bool kByPanels = kValueDim > (kTf32 ? 64 : 128);
// The columns of O that one product of a tile is added to, and those of a tile's last product.
constexpr int kPartDims = kByPanels ? kPanelCols : kDims;
constexpr int kLastPartDims = (kDims - 1) % kPartDims + 1;
using LastPart = WgmmaSums<kLastPartDims>;
using Weights = WgmmaOperand<kBlockN>;

// Which of a thread's scores have keys that their rows see, where the caller's mask or function
// hides some: one bit each.
class SeenScores {
  public:
    SeenScores() = default;
    __device__ void find(const ScoreRules& rules, int row, int first_key) {
        const bool in_sixteens = kMaskAlone && lies_in_sixteens(rules, first_key, kBlockN);
        in_sixteens ? read(rules, row, first_key) : ask(rules, row, first_key);
    }
    __device__ bool at(int i) const { return of_row[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1; }

  private:
    static_assert(!kKeyMask || kBlockN / 4 <= 32, "a word has bits for 128 keys");
    unsigned int of_row[2];  // eight rows apart

    __device__ void read(const ScoreRules& rules, int row, int first_key) {
        MaskOfQuery<kBlockN> masks[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) masks[half].load(rules, row + 8 * half, first_key);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            masks[half].look(of_row[half], rules.mask, row + 8 * half, first_key);
    }
    __device__ void ask(const ScoreRules& rules, int row, int first_key) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            of_row[half] = 0;
#pragma unroll
            for (int eight = 0; eight < kBlockN / 8; ++eight) {
                const int key = first_key + eight * 8 + col_of_thread();
                of_row[half] |= rules.sees_two(row + 8 * half, key) << 2 * eight;
            }
        }
    }
};

// A consumer, with 64 queries.
struct Consumer {
    Smem& smem;
    const ForwardParams& call;
    const QueryTile& work;
    const int warpgroup;
    const ScoreRules rules;
    const Turns turns;
    const int first_row;  // of the thread's two rows, eight apart, in the block's tile

    OnlineSoftmax softmax[2];
    Output o = {};
    RingPosition<kStages> k_at;
    RingPosition<kValueStages> v_at;

    __device__ Consumer(Smem& smem, const ForwardParams& call, const QueryTile& work, int warpgroup)
        : smem(smem),
          call(call),
          work(work),
          warpgroup(warpgroup),
          rules(call, work.sequence, work.head),
          turns(warpgroup),
          first_row(warpgroup * kWgmmaM + row_of_thread()) {}

    __device__ int row_of(int half) const { return work.first_row + first_row + half * 8; }
    // The key, or the column of a row, to which sums[4 * eight + e] belongs.
    __device__ static int col_of(int eight, int e) { return eight * 8 + col_of_thread() + e % 2; }

    // Computes the weights of the scores that are under way.
    __device__ void make_weights(Weights (&p)[kHalves], Scores& s, int first_key, bool masked) {
        SeenScores seen;
        KeptScores<kBlockN / 2, false> kept;
        if (kKeyMask && !kHidesKeys && masked) seen.find(rules, row_of(0), first_key);
        if constexpr (kDropout)
            kept.draw(rules.features, rules.matrix, row_of(0), first_key + col_of(0, 0));
        wait_product<0>(s);
        make_scores(s, first_key);
        if (masked) mask_scores(s, seen, first_key);
        raise_maxima(s);
        weigh(s);
        if constexpr (kDropout) drop(s, kept);
        add_others(s, first_key);
        release(smem.k_ring, k_at);
        k_at.advance();
        halve<kBlockN>(p, s, 1);
    }

    __device__ const KeyUnits& keys() const { return smem.units[k_at.stage]; }

    // Issues S = Q K^T.
    __device__ void issue_scores(Scores& s) {
        smem.k_ring.wait_full(k_at);
        issue_halves<kDepth, kBlockN>(s, DepthInColumns(smem.q.rows[warpgroup]),
                                      DepthInColumns(smem.k[k_at.stage]));
    }

    // Turns products into scores in log 2, to each of which the exponent of its value is added.
    __device__ void make_scores(Scores& s, int first_key) const {
        const int last_key = work.sequence.seqlen_k - 1;
        const acc_t scale = kShapedScores ? 1 : rules.scale * acc_t(kLog2E);
        const float units[2] = {smem.q.unit[first_row] * scale, smem.q.unit[first_row + 8] * scale};
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
            const int half = i / 2 % 2, col = col_of(i / 4, i);
            const float unit = units[half] * keys().unit[col];
            if constexpr (kShapedScores) {
                s[i] = rules.score(s[i] * unit, row_of(half), min(first_key + col, last_key)) +
                       keys().value_exponent[col];
            } else {
                s[i] = s[i] * unit + keys().value_exponent[col];
            }
        }
    }
    __device__ void mask_scores(Scores& s, const SeenScores& seen, int first_key) const {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
            const int key = first_key + col_of(i / 4, i);
            if (!sees(seen, i, key)) s[i] = negative_infinity();
        }
    }

    __device__ bool sees(const SeenScores& seen, int i, int key) const {
        if constexpr (kKeyMask && !kHidesKeys) return seen.at(i);
        const bool shown = !kHidesKeys || keys().shows(col_of(i / 4, i));
        return shown && rules.mask.in_range(row_of(i / 2 % 2), key);
    }

    // Weights reach 2^kTopWeight, so that the small parts of small weights keep their bits, too.
    __device__ void raise_maxima(const Scores& s) {
        float shrink[2];
        bool raised = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = negative_infinity();
#pragma unroll
            for (int i = 2 * half; i < kBlockN / 2; i += 4)
                largest = fmaxf(largest, fmaxf(s[i], s[i + 1]));
            largest = lanes_max<4>(largest) - kTopWeight;
            raised |= largest > softmax[half].max;
            shrink[half] = softmax[half].raise_max(largest);
        }
        if (!__any_sync(0xffffffffu, raised)) return;
#pragma unroll
        for (int i = 0; i < kDims / 2; ++i) o[i] *= shrink[i / 2 % 2];
    }

    // Turns scores into weights for values in their own units. The sums are those of weights for
    // the values themselves.
    __device__ void weigh(Scores& s) {
        const float shifts[2] = {softmax[0].shift(), softmax[1].shift()};
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
            s[i] = exp2_of(s[i] - shifts[i / 2 % 2]);
            softmax[i / 2 % 2].sum += s[i] * fabsf(keys().value_reciprocal[col_of(i / 4, i)]);
        }
    }

    // Sets weights that dropout drops to 0; the sums include them.
    __device__ static void drop(Scores& s, const KeptScores<kBlockN / 2, false>& kept) {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i)
            if (!kept.has(i)) s[i] = 0;
    }

    // Adds to O the values that halves cannot hold. NaN and infinity are added to the rows that see
    // them, whatever their weight.
    __device__ void add_others(const Scores& s, int first_key) {
        bool others = false;
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i += 4)
            others |= !keys().has_value(col_of(i / 4, 0)) | !keys().has_value(col_of(i / 4, 1));
        if (!__any_sync(0xffffffffu, others)) return;

        const auto values = work.sequence.keys<const float>(call.v, work.kv_head);
#pragma unroll 1
        for (int key = 0; key < kBlockN; ++key) {
            if (keys().has_value(key)) continue;
            const float* const value = values.row(first_key + key);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float weight = weight_of(s, half, key);
                if (!rules.sees(row_of(half), first_key + key)) continue;
#pragma unroll
                for (int i = 2 * half; i < kDims / 2; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int col = col_of(i / 4, e);
                        if (col >= kValueDim) continue;
                        const float x = value[col];
                        o[i + e] += is_finite(x) ? weight * x : x;
                    }
            }
        }
    }
    // The weight of one key, which one of the four threads that share a row has.
    __device__ static float weight_of(const Scores& s, int half, int key) {
        float weight = 0;
#pragma unroll
        for (int i = 2 * half; i < kBlockN / 2; i += 4) {
            if (i / 4 == key / 8) weight = key % 2 == 0 ? s[i] : s[i + 1];
        }
        return __shfl_sync(0xffffffffu, weight, key % 8 / 2, 4);
    }

    // Issues the products that a tile adds to the output, and adds those but the last. A template,
    // so that only the branch is compiled that a LastPart fits.
    template <int Count>
    __device__ void issue_output(float (&last)[Count], const Weights (&p)[kHalves]) {
        smem.v_ring.wait_full(v_at);
        if constexpr (Count == kPartDims / 2) {
            add_parts_before_last(last, p);  // with sums of their own, ptxas would spill registers
        } else {
            WgmmaSums<kPartDims> part;
            add_parts_before_last(part, p);
        }
        issue_part<kLastPartDims>(last, p, kDims - kLastPartDims);
    }

    // Waits for the last product and adds it.
    template <int Pending>
    __device__ void add_output(LastPart& last) {
        add_part<Pending>(last, kDims - kLastPartDims);
        release(smem.v_ring, v_at);
        v_at.advance();
    }

    __device__ void add_parts_before_last(WgmmaSums<kPartDims>& part, const Weights (&p)[kHalves]) {
#pragma unroll
        for (int col = 0; col < kDims - kLastPartDims; col += kPartDims) {
            issue_part<kPartDims>(part, p, col);
            add_part<0>(part, col);
        }
    }
    // Issues the product of the columns from `col` on.
    template <int Cols>
    __device__ void issue_part(WgmmaSums<Cols>& part, const Weights (&p)[kHalves], int col) {
        issue_halves<kBlockN, Cols>(part, InRegisters<kBlockN>{p},
                                    DepthInRows(smem.v[v_at.stage], col / kPanelCols));
    }
    // Waits for that product and adds it.
    template <int Pending, int Count>
    __device__ void add_part(float (&part)[Count], int col) {
        wait_product<Pending>(part);
#pragma unroll
        for (int i = 0; i < Count; ++i) o[col / 2 + i] += part[i] * kPartUnit;
    }

    __device__ void store() {
        const auto out = work.sequence.queries<float>(call.o, work.head);
        float* const lse = static_cast<float*>(call.lse);
        const long long lse_row = work.sequence.first_row(work.head, call.sizes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float factor = end_row<4>(softmax[half], rules);
            const int row = row_of(half);
            if (row >= work.sequence.seqlen_q) continue;
            if (lse && threadIdx.x % 4 == 0) lse[lse_row + row] = lse_of(softmax[half]);
#pragma unroll
            for (int i = 2 * half; i < kDims / 2; i += 4)
                write_pair(out.row(row) + col_of(i / 4, 0), kValueDim - col_of(i / 4, 0),
                           {o[i] * factor, o[i + 1] * factor});
        }
    }
    // Sums may be large. The logarithm of the mantissa alone is more precise.
    __device__ static float lse_of(const OnlineSoftmax& row) {
        const int exponent = min(exponent_of<-126>(row.sum), 126);  // its power of two is a float
        const OnlineSoftmax near_one{row.max + exponent, row.sum * power_of_two(-exponent)};
        return near_one.lse();
    }
    // Writes the first `count` of two numbers.
    __device__ static void write_pair(float* to, int count, const Pack<float, 2>& pair) {
        if constexpr (kValueDim % 2 == 0 && kAlignBytes % sizeof(pair) == 0) {
            if (count > 0) *reinterpret_cast<Pack<float, 2>*>(to) = pair;
        } else {
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (e < count) to[e] = pair[e];
        }
    }
};
