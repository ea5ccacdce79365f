// How tiles reach a block of bwd_3_mma: what it copies of a head, and the order in which it walks
// over tiles.
#pragma once

#include "mma/bwd_3_block.cuh"

// As copy_tile, but a thread recomputes its rows and columns for each copy, so that they take no
// registers in between.
template <int Cols, class Tile>
__device__ inline void copy_tile_anew(Tile& tile, Matrix<const scalar_t> source, int first_row,
                                      int end_row) {
    copy_tile<kThreads, Cols>(tile, source, first_row, end_row, ptx::anew(threadIdx.x));
}

// A query head of a sequence, as the loop over tiles of queries uses it.
struct QueryHead {
    const BackwardParams& params;
    ScoreRules rules;
    Matrix<const scalar_t> q, dout;
    const RowStats* stats;
    DqSums dq;
    acc_t* arrays;
    SeenOfKeys seen;

    __device__ QueryHead(const BackwardParams& params, const Sequence& sequence, int head)
        : params(params),
          rules(params, sequence, head),
          q(sequence.queries<const scalar_t>(params.q, head)),
          dout(sequence.queries<const scalar_t>(params.dout, head)),
          stats(Workspace(params).stats + sequence.first_row(head, params.sizes)),
          dq(Workspace(params).dq, params.sizes, sequence, head),
          arrays(Workspace(params).arrays),
          seen(Workspace(params).seen, params, sequence, head) {}

    __device__ void start_copy(KeySmem& smem, int stage, int first_row) const {
        copy_queries(smem, stage, first_row);
        copy_gradients(smem, stage, first_row);
    }
    // Copies tile number `number`, once all warps are done with the tile before in its stage.
    __device__ void hand_on(KeySmem& smem, int number, int first_row) const {
        const int stage = number % kStages;
        smem.queries[stage].wait_free(number / kStages);
        start_copy(smem, stage, first_row);
        smem.queries[stage].announce_copies();
    }
    __device__ void copy_queries(KeySmem& smem, int stage, int first_row) const {
        copy_tile_anew<kHeadDim>(smem.q[stage], q, first_row, rules.mask.seqlen_q);
    }
    // dO, and the statistics, which are not needed once P and dS are there.
    __device__ void copy_gradients(KeySmem& smem, int stage, int first_row) const {
        const int seqlen_q = rules.mask.seqlen_q;
        copy_tile_anew<kValueDim>(smem.dout[stage], dout, first_row, seqlen_q);
#pragma unroll
        for (int rows = 0; rows < kBlockM; rows += kThreads) {
            const int i = rows + threadIdx.x, row = first_row + i;
            if (i < kBlockM)
                ptx::copy_async<sizeof(RowStats)>(&smem.rows[stage][i], stats + row,
                                                  row < seqlen_q);
        }
    }
};

// Walks over tiles of kBlockM rows from `begin` to `end`; with a mask, those that next_seen finds.
// One tile is copied while `attend` processes the tile before. With EarlyCopies, `attend` starts
// the next copy itself.
template <bool EarlyCopies, class NextSeen, class StartCopy, class Attend>
__device__ inline void walk(int begin, int end, const NextSeen& next_seen,
                            const StartCopy& start_copy, const Attend& attend) {
    int stage = 0, step = kBlockM;
    if constexpr (kKeyMask) begin = next_seen(begin);
    for (int row = begin; row < end; row += step) {
        if constexpr (kKeyMask) step = next_seen(row + kBlockM) - row;
        if (row == begin || (kStages == 1 && !EarlyCopies)) {
            __syncthreads();  // every warp is done with the tile before
            start_copy(stage, row);
        }
        ptx::wait_copies();
        __syncthreads();  // the tile is there, and every warp is done with the stage before and
                          // with dS
        if (kStages > 1 && row + step < end) start_copy((stage + 1) % kStages, row + step);
        attend(stage, row, step);
        stage = (stage + 1) % kStages;
    }
}

// The same with handovers: two tiles are there or under way, and `attend` starts the copy of the
// one after the next. `number` counts the tiles of all heads.
template <class NextSeen, class HandOn, class Attend>
__device__ inline void walk_in_turn(int begin, int end, int& number, const NextSeen& next_seen,
                                    const HandOn& hand_on, const Attend& attend) {
    const auto seen_from = [&](int row) { return kKeyMask ? next_seen(row) : row; };
    int row = seen_from(begin), next = seen_from(row + kBlockM);
    if (row < end) hand_on(number, row);
    if (next < end) hand_on(number + 1, next);
    while (row < end) {
        const int next_but_one = seen_from(next + kBlockM);
        attend(number++, row, next_but_one - row);
        row = next;
        next = next_but_one;
    }
}
