// The rows that a block of fwd_8_split_kv works on, the queries of all heads that share a KV head,
// and what a call asks of their scores.
#pragma once

#include "call/descales.cuh"
#include "mma/fwd_8_block.cuh"
#include "scores/score_rules.cuh"

// What a block works on: rows of a KV head from first_row on, a query's heads being neighbours.
struct Work {
    Sequence sequence;
    int kv_head, group, first_row;

    __device__ int rows() const { return min(kBlockM, sequence.seqlen_q * group - first_row); }
    __device__ int query(int row) const { return (first_row + row) / group; }
    __device__ int head(int row) const { return kv_head * group + (first_row + row) % group; }
    __device__ HeadScales scales(const ForwardParams& params) const {
        return {params, sequence.batch, kv_head};
    }
};

// Which of its tiles of keys, numbered from the sequence's first.
struct TileRange {
    int begin, end;
};

// What a lane has rows of in each half of its fragments `m`: the queries, and the rules of the
// heads.
struct LaneRows {
    int query[2];
    ScoreRules rules[2];

    __device__ LaneRows(const ForwardParams& params, const Work& work, int m)
        : query{work.query(row_of(m, 0)), work.query(row_of(m, 1))},
          rules{{params, work.sequence, work.head(row_of(m, 0))},
                {params, work.sequence, work.head(row_of(m, 1))}} {
        if constexpr (kDescaled) {
            for (ScoreRules& of_half : rules) of_half.scale = work.scales(params).scores;
        }
    }
    // Takes what rows of Q were divided by, if they were.
    __device__ void take_units(const Smem& smem, int m) {
        for (int half = 0; half < 2; ++half) rules[half].scale *= smem.unit(row_of(m, half));
    }
};
// Those of a warp: of its first 16-row tile and of its last, which may be the same.
struct WarpRows {
    static_assert(kTiles <= 2, "a warp has one 16-row tile or two");
    LaneRows first, last;

    __device__ WarpRows(const ForwardParams& params, const Work& work)
        : first(params, work, 0), last(params, work, kTiles - 1) {}
    __device__ void take_units(const Smem& smem) {
        first.take_units(smem, 0);
        last.take_units(smem, kTiles - 1);
    }
    __device__ const LaneRows& operator[](int m) const { return m == 0 ? first : last; }
};

// Makes scores of products; those of keys that a row does not see become -inf.
__device__ inline void apply(Scores& s, const WarpRows& rows, int first_key, bool masked) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const ScoreRules& rules = rows[m].rules[half];
            const int query = rows[m].query[half];
#pragma unroll
            for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int key = fragment_col(first_key, n) + e;
                    acc_t& score = s[m][n][2 * half + e];
                    const bool seen = !masked || rules.sees(query, key);
                    score = seen ? rules.score(score, query, key) : negative_infinity();
                }
        }
}
