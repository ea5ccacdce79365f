// A warp's part of the output of fwd_5_mma, and the online softmax of its scores.
#pragma once

#include "mma/fwd_5_scale.cuh"
#include "mma/mma_softmax.cuh"

// A maximum is raised only when scores exceed it by more than this, in log 2. Until then weights
// reach up to 2^8, which float32 sums and 16-bit weights hold as precisely as weights up to 1.
constexpr acc_t kSlack = 8;

// A warp's rows of the output tile.
struct Output {
    OnlineSoftmax softmax[kTiles][2];
    Accumulators<kTiles, kDims> o;

    // The values that products start from.
    __device__ void begin(Scores& s) const {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    s[m][n][e] = kFolded ? -softmax[m][e / 2].shift() : acc_t(0);
    }

    // Processes one tile of scores and turns it into P.
    __device__ void exponentiate(Scores& s, acc_t scale_log2,
                                 const Exp2Table<acc_t, kRootBits>& exp2) {
        bool raised = false;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                raised |= may_pass(s[m], half, scale_log2, limit(softmax[m][half]));
        if (__any_sync(0xffffffffu, raised)) {
            acc_t largest[kTiles][2];
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    largest[m][half] = largest_of(s[m], half) * scale_log2;
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                if constexpr (kFolded) {
                    raise_folded(m, s[m], largest[m]);
                } else {
                    raise_maxima(softmax[m], o[m], largest[m]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const acc_t shift = kFolded ? acc_t(0) : softmax[m][half].shift();
                acc_t sum = 0;
#pragma unroll
                for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        s[m][n][e] = exp2.power(s[m][n][e] * scale_log2 - shift);
                        sum += s[m][n][e];
                    }
                softmax[m][half].sum += sum;
            }
    }

  private:
    // The score above which the maximum is raised.
    __device__ static acc_t limit(const OnlineSoftmax& row) {
        if constexpr (!kFolded) return row.max + kSlack;
        return row.max == negative_infinity() ? row.max : kSlack;
    }

    // Raises maxima where scores, and `largest`, are relative to the old maxima.
    __device__ void raise_folded(int m, Fragment (&s)[kBlockN / kMmaN], acc_t (&largest)[2]) {
        const acc_t before[] = {softmax[m][0].shift(), softmax[m][1].shift()};
#pragma unroll
        for (int half = 0; half < 2; ++half) largest[half] += before[half];
        raise_maxima(softmax[m], o[m], largest);
#pragma unroll
        for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] -= softmax[m][e / 2].shift() - before[e / 2];
    }
};
