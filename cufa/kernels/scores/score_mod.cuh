// What a call's own functions do to scores. This version is for calls without functions. For
// others, cufa/score_mod.py writes a header of this name, which the compiler gets instead.
#pragma once

#include "scores/traced.cuh"

// The arrays that the functions read.
struct ModArrays {};

// The new score, not in log 2.
__device__ inline acc_t modified_score(const ModArrays&, acc_t score, int, int, SplitIndex,
                                       SplitIndex) {
    return score;
}

// Whether the result is the score plus a term that depends only on places, without constants that
// might overflow in another unit; and that term times a factor.
constexpr bool kScoreModAdds = true;
__device__ inline acc_t added_score(const ModArrays&, acc_t, int, int, SplitIndex, SplitIndex) {
    return 0;
}

// Whether arrays are read at places that depend on the query or the key.
constexpr bool kScoreModLooksUp = false;

// Whether the derivative by the score is ever anything but 1, and whether it depends on the score;
// and the derivative.
constexpr bool kScoreModSlopes = false;
constexpr bool kSlopeAsksScore = false;
__device__ inline acc_t modified_slope(const ModArrays&, acc_t, int, int, SplitIndex, SplitIndex) {
    return 1;
}

// Whether mask_mod may depend on the head or the sequence; and whether a query sees a key.
constexpr bool kMaskModOfHead = false, kMaskModOfBatch = false;
__device__ inline bool mod_sees(const ModArrays&, int, int, SplitIndex, SplitIndex) {
    return true;
}

// Whether the gradients of the arrays are wanted; how many elements a score reads; whether the
// index of element i depends on the query or the key, or on nothing but their distance; the number
// of sums; the derivatives of the new score by these elements; and the gradient of an element from
// its sum.
constexpr bool kArrayGradients = false;
constexpr int kElements = 0;
__device__ constexpr bool changes_with_query(int) {
    return false;
}
__device__ constexpr bool changes_with_key(int) {
    return false;
}
__device__ constexpr bool is_of_distance(int) {
    return false;
}
__device__ inline int array_sums(const ModArrays&) {
    return 0;
}
__device__ inline void element_slopes(const ModArrays&, acc_t, int, int, SplitIndex, SplitIndex,
                                      ElementSlope*) {}
__device__ inline void write_array_gradients(const ModArrays&, const acc_t*, int) {}
