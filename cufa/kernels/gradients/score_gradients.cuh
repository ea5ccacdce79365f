// The gradients of one score, and what a call asks of the backward beyond config.cuh.
#pragma once

#include "call/warp_rows.cuh"
#include "scores/score_rules.cuh"

#ifndef DETERMINISTIC
#error "the host must define DETERMINISTIC"
#endif

constexpr bool kDeterministic = DETERMINISTIC;  // the same bits in every run: sums have an order

struct ScoreGradient {
    acc_t p = 0;         // the probability after dropout: dV is the sum of p dO
    acc_t modified = 0;  // the gradient of the score after the caller's function
    acc_t score = 0;     // dS: the gradient of the score before the function, and so of the bias
    acc_t product = 0;   // the gradient of the product times the scale, for dQ and dK
};

// From the products Q K^T and dO V^T of a row and a key that it sees. `kept` says whether dropout
// keeps their probability; `exp2` computes powers of 2. RowInside and KeyInside are as in
// ScoreRules.
template <bool RowInside = false, bool KeyInside = RowInside, class Exp2>
__device__ inline ScoreGradient score_gradient(const Exp2& exp2, const ScoreRules& rules,
                                               acc_t product, acc_t dp, SplitIndex row,
                                               SplitIndex key, RowStats stats, bool kept) {
    const acc_t p =
        exp2.power(rules.score<RowInside, KeyInside>(product, row, key) - stats.lse_log2);
    const acc_t scale = !kDropout ? acc_t(1) : kept ? kept_scale(rules.features) : acc_t(0);
    ScoreGradient gradient;
    gradient.p = p * scale;
    gradient.modified = gradient.score = p * (dp * scale - stats.d);
    if constexpr (kScoreMod)
        gradient.score *= rules.modified_slope_at<RowInside, KeyInside>(product, row, key);
    gradient.product = gradient.score * rules.slope(product);
    return gradient;
}
