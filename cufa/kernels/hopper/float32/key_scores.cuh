// What a warpgroup of a float32 backward does with its scores of a tile of queries and 64 keys:
// from S^T and dP^T, in units of halves, to operands for the gradients.
#pragma once

#include "hopper/float32/backward_tiles.cuh"
#include "hopper/float32/half_products.cuh"
#include "scores/kept_scores.cuh"
#include "scores/mask_sixteens.cuh"

// The exponent by which probabilities, at most 1, are scaled for their halves.
constexpr int kTopWeight = 14;
// Smaller exponents of score gradients are raised to the least.
constexpr int kLeastGradientExponent = -96, kMostGradientExponent = 126;

// Which of a thread's scores have rows that see its keys, where the caller's mask or function hides
// some: one bit each.
template <int Queries>
class SeenScores {
  public:
    SeenScores() = default;
    // The warp's keys begin at `warp_key`; the thread's keys are `key` and key + 8.
    __device__ void find(const ScoreRules& rules, int first_row, int warp_key, int key) {
        if constexpr (kMaskAlone) {
            if (lies_in_sixteens(rules, warp_key, 16)) {
                MaskOfKeys<Queries> mask;
                mask.load(rules, first_row, warp_key);
                return mask.look(words, rules.mask, first_row, warp_key);
            }
        }
        for (unsigned int& word : words) word = 0;
#pragma unroll
        for (int i = 0; i < Queries / 2; ++i) {
            const int row = first_row + i / 4 * 8 + col_of_thread() + i % 2;
            const bool sees = rules.sees(row, key + i / 2 % 2 * 8);
            words[i / 32] |= static_cast<unsigned int>(sees) << i % 32;
        }
    }
    __device__ bool at(int i) const { return words[i / 32] >> i % 32 & 1; }

  private:
    unsigned int words[ceil_div(Queries, 64)];
};

// Of some of a tile's queries, from FirstQuery on.
template <int Queries, int FirstQuery = 0>
struct KeyScores {
    using Scores = WgmmaSums<Queries>;
    using Weights = WgmmaOperand<Queries>;

    const BackwardParams& call;
    const KeyTile& work;
    const int warp_row;   // the first of the warp's 16 rows of 64
    const int first_row;  // of the thread's two, eight rows apart

    SeenScores<Queries> seen;            // of a tile, if it is masked
    KeptScores<Queries / 2, true> kept;  // of a tile

    __device__ KeyScores(const BackwardParams& call, const KeyTile& work)
        : call(call), work(work), warp_row(row_of_warp()), first_row(row_of_thread()) {}

    // The column of a row, or the query from the first one on, to which sums[4 * eight + e]
    // belongs.
    __device__ static int col_of(int eight, int e) { return eight * 8 + col_of_thread() + e % 2; }

    // Notes which rows see the warp's keys.
    __device__ void note_seeing(SeeingRows (&seeing)[kBlockN]) const {
        if (!kKeyMask && threadIdx.x % 32 < 16) {
            const int row = warp_row + threadIdx.x % 32;
            seeing[row] = SeeingRows(work.sequence.mask(call.features), work.first_key + row);
        }
        __syncwarp();
    }

    // While products run, finds out what a mask shows and what dropout keeps of a tile.
    template <class Walk>
    __device__ void look_up(const Walk& walk) {
        if constexpr (kKeyMask) {
            if (walk.masked(0))
                seen.find(rules_of(walk), walk.first_row() + FirstQuery, work.first_key + warp_row,
                          key_of(0));
        }
        if constexpr (kDropout) {
            const unsigned int matrix = matrix_number(call.sizes, work.sequence.batch, walk.head());
            const int query = walk.first_row() + FirstQuery + col_of_thread();
            kept.draw(call.features, matrix, key_of(0), query);
        }
    }

    // P^T = 2^(S^T - LSE) and dS^T = P^T o (dP^T - D), in units of elements; P^T scaled by its
    // exponent.
    template <class Walk>
    __device__ void differentiate(Scores& s, Scores& dp, const Statistics& rows,
                                  const KeyUnits& units, const SeeingRows (&seeing)[kBlockN],
                                  const Walk& walk) const {
        const ScoreRules rules = rules_of(walk);
        const float unit = units.k.size * rows.q.size;
        const float scale = kShapedScores ? unit : unit * (call.softmax_scale * float(kLog2E));
        const float dp_unit = units.v.size * rows.dout.size * kept_scale(call.features);
        hold_all(dp);
#pragma unroll
        for (int i = 0; i < Queries / 2; ++i) {
            const int col = FirstQuery + col_of(i / 4, i);
            const float lse = rows.lse_log2[col] - kTopWeight, d = rows.d[col];
            float score = s[i] * scale, slope = 1;
            if constexpr (kShapedScores) {
                const float product = score;
                const int row = rows.first_row + col;
                const int key = min(key_of(i / 2 % 2), work.sequence.seqlen_k - 1);
                score = rules.score(product, row, key);
                slope = rules.slope(product);
                if constexpr (kScoreMod) slope *= rules.modified_slope_at(product, row, key);
            }
            s[i] = exp2_of(score - lse);
            const bool stays = !kDropout || kept.has(i);
            dp[i] = s[i] * ((stays ? dp[i] * dp_unit : 0) - d) * slope;
        }
        if (walk.masked(rows.first_row)) hide(s, dp, rows.first_row + FirstQuery, seeing);
    }

    // Makes operands of P^T, as dropout leaves it, and of dS^T. Returns the exponent of the unit of
    // dS, which is the same for all Warps that call this with one `barrier`.
    template <int Warps>
    __device__ int make_operands(Weights (&p)[kHalves], Weights (&ds)[kHalves],
                                 const Scores& weights, const Scores& gradients,
                                 float (&of_warps)[Warps], int barrier) {
        halve<Queries, true>(p, weights, 1);  // with the LSE of other roundings P may be over 4
        if constexpr (kDropout) {
#pragma unroll
            for (Weights& part : p) kept.drop(part);
        }
        float largest = 0;
#pragma unroll
        for (const float gradient : gradients) largest = fmaxf(largest, fabsf(gradient));
        largest = largest_of(of_warps, largest, barrier);
        const int exponent = exponent_of<kLeastGradientExponent>(largest);
        const int unit_of_halves = min(exponent, kMostGradientExponent) - kTopExponent;
        halve<Queries>(ds, gradients, power_of_two(-unit_of_halves));
        return unit_of_halves - kTopWeight;
    }

  private:
    __device__ int key_of(int half) const { return work.first_key + first_row + half * 8; }
    template <class Walk>
    __device__ ScoreRules rules_of(const Walk& walk) const {
        return {call, work.sequence, walk.head()};
    }

    // Sets P and dS to zero for rows that do not see a key.
    __device__ void hide(Scores& p, Scores& ds, int first_query,
                         const SeeingRows (&seeing)[kBlockN]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            SeeingRows rows;
            if constexpr (!kKeyMask) rows = seeing[first_row + half * 8];
#pragma unroll
            for (int i = 0; i < Queries / 2; ++i) {
                if (i / 2 % 2 != half) continue;
                const bool sees = kKeyMask ? seen.at(i) : rows.have(first_query + col_of(i / 4, i));
                if (!sees) p[i] = ds[i] = 0;
            }
        }
    }
    template <int Warps>
    __device__ static float largest_of(float (&of_warps)[Warps], float largest, int barrier) {
        largest = lanes_max<32>(largest);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x % (Warps * 32) / 32] = largest;
        ptx::named_barrier_sync<Warps * 32>(barrier);
#pragma unroll
        for (const float other : of_warps) largest = fmaxf(largest, other);
        return largest;
    }
};
