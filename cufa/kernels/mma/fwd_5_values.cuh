// What values add to the output of fwd_5_mma: the product P V and, where a mask cuts through a
// tile, separately, values that are NaN or infinite.
#pragma once

#include "mma/fwd_5_output.cuh"
#include "mma/fwd_5_scores.cuh"

// Where a mask cuts through a tile, a value that is NaN or infinite must reach the rows that see
// its key, and no other; but 0 * NaN is NaN. Such values are added here to the outputs of the rows
// that see them, whatever their weight, and are zero in the product.
__device__ inline void take_out_nonfinite(Output& out, Smem& smem, const ScoreRules& rules,
                                          int first_row, int first_key) {
    if (!__syncthreads_or(finds_nonfinite<kThreads>(smem.v))) return;

    for (int key = 0; key < kBlockN; ++key)
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!rules.sees(first_row + row_of(m, half), first_key + key)) continue;
#pragma unroll
                for (int n = 0; n < kDims / kMmaN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const scalar_t value = *smem.v.at(key, fragment_col(warp_col(), n) + e);
                        if (!is_finite(value)) out.o[m][n][2 * half + e] += to_acc(value);
                    }
            }
    __syncthreads();
    constexpr int kCols = kDims * kSplit;
    for (int i = threadIdx.x; i < kBlockN * kCols; i += kThreads) {
        scalar_t& value = *smem.v.at(i / kCols, i % kCols);
        if (!is_finite(value)) value = scalar_t{};
    }
    __syncthreads();
}

// The same with handovers, where threads zeroed such values before they announced their part of V.
// They are added at the end, for all keys: in a whole tile they were also in the product, but
// adding them twice changes nothing.
__device__ inline void add_nonfinite(Output& out, const KeyMatrix<const scalar_t>& v,
                                     const ScoreRules& rules, int first_row) {
    const KeyTiles<kBlockN> tiles(rules.mask, first_row, kBlockM);
#pragma unroll 1
    for (int key = tiles.begin; key < tiles.end; ++key)
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!rules.sees(first_row + row_of(m, half), key)) continue;
#pragma unroll
                for (int n = 0; n < kDims / kMmaN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int col = fragment_col(warp_col(), n) + e;
                        if (col >= kValueDim) continue;
                        const scalar_t value = v.row(key)[col];
                        if (!is_finite(value)) out.o[m][n][2 * half + e] += to_acc(value);
                    }
            }
}

// Turns what is left of scores into weights, and adds the weighted values.
__device__ inline void weigh_values(Output& out, Scores& p, Smem& smem, const ScoreRules& rules,
                                    int first_row, int first_key, int keys_end, bool masked) {
    if constexpr (kDropout) drop(rules, p, first_row, first_key);
    // Where all rows see the same keys, the values of others are zero.
    constexpr bool kTakesOut = kCutTiles && !kRowsAlike;
    if constexpr (kTakesOut && sizeof(scalar_t) == 2) {
        // Rounded, P takes half the registers; the search for NaN needs some.
        const LeftStrip<kTiles, kBlockN> rounded(p);
        if (masked) take_out_nonfinite(out, smem, rules, first_row, first_key);
        rounded.template add_product_with<kDims>(out.o, smem.v, warp_col());
    } else {
        if (kTakesOut && masked) take_out_nonfinite(out, smem, rules, first_row, first_key);
        // Keys past the end are skipped. This also keeps ptxas from splitting the operands of all
        // steps ahead.
        const int keys = kLongSteps ? keys_end - first_key : kBlockN;
        add_product_pn<kTiles, kBlockN, kDims>(out.o, p, smem.v, warp_col(), keys);
    }
}
