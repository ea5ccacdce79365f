// The rows of a block of fwd_8_split_kv, which are the queries of all heads that share a KV head.
#pragma once

#include "call/descales.cuh"
#include "mma/fwd_8_block.cuh"
#include "scores/score_rules.cuh"

// A block's work: rows of a KV head from first_row on. The heads of a query are adjacent rows.
struct Work {
    Sequence sequence;
    int kv_head, group, first_row;

    // What depends on it is found out once more, not kept in registers from one time to the next.
    __device__ void find_anew() {
        kv_head = ptx::anew(kv_head);
        first_row = ptx::anew(first_row);
        sequence.batch = ptx::anew(sequence.batch);
        sequence.seqlen_k = ptx::anew(sequence.seqlen_k);
    }
    __device__ int rows() const { return min(kBlockM, sequence.seqlen_q * group - first_row); }
    __device__ int query(int row) const { return (first_row + row) / group; }
    __device__ int head(int row) const { return kv_head * group + (first_row + row) % group; }
    __device__ HeadScales scales(const ForwardParams& params) const {
        return {params, sequence.batch, kv_head};
    }
};

// Some of its tiles of keys, numbered from the sequence's first.
struct TileRange {
    int begin, end;
};

// The queries of a lane's rows in each half of its fragments `m`, and the rules of their heads.
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
    // Multiplies the scale by what rows of Q were divided by.
    __device__ void take_units(const Smem& smem, int m) {
        for (int half = 0; half < 2; ++half) rules[half].scale *= smem.unit(row_of(m, half));
    }
};
// The rows of a warp's first 16-row tile and of its last, which may be the same.
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
