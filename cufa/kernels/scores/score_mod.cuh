// What a call's own functions make of scores: nothing here, where there are none. For a call that
// has some, cufa/score_mod.py writes a header of this name, which the compiler is given instead.
#pragma once

#include "scores/traced.cuh"

// The arrays that the functions read.
struct ModArrays {};

// The new score, in its own units.
__device__ inline acc_t modified_score(const ModArrays&, acc_t score, int, int, SplitIndex,
                                       SplitIndex) {
    return score;
}

// Whether it is the score and what depends on places alone, and that times a factor.
constexpr bool kScoreModAdds = true;
__device__ inline acc_t added_score(const ModArrays&, acc_t, int, int, SplitIndex, SplitIndex) {
    return 0;
}

// Whether arrays are read at places that change with the query or the key.
constexpr bool kScoreModLooksUp = false;

// By how much it changes with the score, and whether that is ever anything but 1.
constexpr bool kScoreModSlopes = false;
__device__ inline acc_t modified_slope(const ModArrays&, acc_t, int, int, SplitIndex, SplitIndex) {
    return 1;
}

// Whether a query sees a key, and whether that may be different in each head and in each sequence.
constexpr bool kMaskModOfHead = false, kMaskModOfBatch = false;
__device__ inline bool mod_sees(const ModArrays&, int, int, SplitIndex, SplitIndex) {
    return true;
}

// Whether the arrays' gradients are wanted, how many of their elements a score reads, and whether
// which one it is changes with the query, or with the key. How many elements they have, by how much
// the new score changes with those that it reads, and the gradient of one from its sum.
constexpr bool kArrayGradients = false;
constexpr int kElements = 0;
__device__ constexpr bool changes_with_query(int) {
    return false;
}
__device__ constexpr bool changes_with_key(int) {
    return false;
}
__device__ inline int array_sums(const ModArrays&) {
    return 0;
}
__device__ inline void element_slopes(const ModArrays&, acc_t, int, int, SplitIndex, SplitIndex,
                                      ElementSlope*) {}
__device__ inline void write_array_gradients(const ModArrays&, const acc_t*, int) {}
