// What the tiled kernels do to a tile of scores between its two products.
#pragma once

#include "cuda_cores/products.cuh"
#include "scores/score_rules.cuh"

// Scales the scores and, in a Masked tile, sets those of unseen keys to -inf. This replaces the
// score, so a NaN in an unseen key has no effect.
template <bool Masked, int TM, int TN, class Layout>
__device__ inline void scale_and_mask(ScoreTile<TM, TN>& scores, acc_t scale, const Layout& layout,
                                      Mask mask, int first_row, int first_key) {
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int keys_seen = mask.keys_end(first_row + layout.row(i)) - first_key;
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const bool seen = !Masked || layout.key(j) < keys_seen;
            scores[i][j] = seen ? scores[i][j] * scale : negative_infinity();
        }
    }
}

// Turns products into scores by the call's rules. In a Masked tile, scores of unseen keys become
// -inf.
template <bool Masked, int TM, int TN, class Layout>
__device__ inline void apply(const ScoreRules& rules, ScoreTile<TM, TN>& scores,
                             const Layout& layout, int first_row, int first_key) {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int row = first_row + layout.row(i), key = first_key + layout.key(j);
            const bool seen = !Masked || rules.sees(row, key);
            scores[i][j] = seen ? rules.score(scores[i][j], row, key) : negative_infinity();
        }
}

// Sets the weights of keys that a row does not see, by seen(row, key) in the tile, to -0.
template <int TM, int TN, class Layout, class Seen>
__device__ inline void mark_unseen(ScoreTile<TM, TN>& p, const Layout& layout, const Seen& seen) {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            if (!seen(layout.row(i), layout.key(j))) p[i][j] = unseen_weight();
        }
}

// Drops probabilities at random.
template <int TM, int TN, class Layout>
__device__ inline void drop(const ScoreRules& rules, ScoreTile<TM, TN>& p, const Layout& layout,
                            int first_row, int first_key) {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int row = first_row + layout.row(i), key = first_key + layout.key(j);
            if (!rules.keeps(row, key)) p[i][j] = 0;
        }
}

template <int TM, int TN, class Tile, class Layout>
__device__ inline void store_scores(Tile& tile, const ScoreTile<TM, TN>& scores,
                                    const Layout& layout) {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) tile.at(layout.row(i), layout.key(j)) = scores[i][j];
}

template <int TN>
__device__ inline acc_t max_of(const acc_t (&scores)[TN]) {
    acc_t largest = scores[0];
#pragma unroll
    for (int j = 1; j < TN; ++j) largest = scores[j] > largest ? scores[j] : largest;
    return largest;
}
