// The running maximum and sum of a softmax that reads its row piece by piece.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), Algorithm 3; as used
// by FlashAttention-2 (Dao, 2023), Algorithm 1 lines 9 to 13. Scores are in log 2: with log2(e)
// folded into the scale, exp2 needs no extra multiplication.
#pragma once

#include "call/numbers.cuh"

struct OnlineSoftmax {
    acc_t max = negative_infinity();  // of the scores seen so far
    acc_t sum = 0;  // of 2^(score - max) over them; per thread until total() is called

    // Adds a piece whose largest score is piece_max. Returns the factor by which sums under the old
    // maximum must shrink.
    __device__ acc_t raise_max(acc_t piece_max) {
        const acc_t old_max = max;
        max = piece_max > max ? piece_max : max;
        const acc_t shrink = exp2_of(old_max - shift());
        sum *= shrink;
        return shrink;
    }

    // What to subtract from a score. As long as all scores are -inf there is no maximum, and -inf -
    // -inf would be NaN. With 0 instead, 2^-inf is 0 as it should be.
    __device__ acc_t shift() const { return max == negative_infinity() ? acc_t(0) : max; }

    __device__ acc_t weight(acc_t score) {
        const acc_t p = exp2_of(score - shift());
        sum += p;
        return p;
    }

    // Adds one more score, and returns what raise_max returns.
    __device__ acc_t add(acc_t score) {
        const acc_t shrink = raise_max(score);
        weight(score);
        return shrink;
    }

    // Ends the row: afterwards `sum` covers all Lanes threads that share it.
    template <int Lanes>
    __device__ void total() {
        sum = lanes_sum<Lanes>(sum);
    }

    // For a row that saw no key: output 0, LSE -inf.
    __device__ acc_t normalizer() const { return sum == 0 ? acc_t(0) : 1 / sum; }
    __device__ acc_t lse() const {
        return sum == 0 ? negative_infinity() : (max + log2_of(sum)) * acc_t(kLn2);
    }
};
