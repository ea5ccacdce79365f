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

// Sets the padding columns of all tiles to zero. Here and below, a template compiles only what
// there is.
template <class Smem>
__device__ inline void clear_padding_of(Smem& smem) {
    clear_padding<kThreads, kHeadDim>(smem.k);
    clear_padding<kThreads, kValueDim>(smem.v);
    for (int stage = 0; stage < kStages; ++stage) {
        clear_padding<kThreads, kHeadDim>(smem.q[stage]);
        clear_padding<kThreads, kValueDim>(smem.dout[stage]);
        if constexpr (kWholeHeads) clear_padding<kThreads, kValueDim>(smem.out[stage]);
    }
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
    bool sums_dq;  // its block has not all keys that its queries may see

    __device__ QueryHead(const BackwardParams& params, const Sequence& sequence, int head)
        : params(params),
          rules(params, sequence, head),
          q(sequence.queries<const scalar_t>(params.q, head)),
          dout(sequence.queries<const scalar_t>(params.dout, head)),
          stats(Workspace(params).stats + sequence.first_row(head, params.sizes)),
          dq(Workspace(params).dq, params.sizes, sequence, head),
          arrays(Workspace(params).arrays),
          seen(Workspace(params).seen, params, sequence, head),
          sums_dq(kSumsQueries && (!kWholeHeads || end_of_keys(params, sequence) > kBlockN)) {}

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
        if constexpr (kWholeHeads) {
            copy_output(smem, stage, first_row);
        } else {
#pragma unroll
            for (int rows = 0; rows < kBlockM; rows += kThreads) {
                const int i = rows + threadIdx.x, row = first_row + i;
                if (i < kBlockM)
                    ptx::copy_async<sizeof(RowStats)>(&smem.rows[stage][i], stats + row,
                                                      row < seqlen_q);
            }
        }
    }

  private:
    // What a block finds the statistics from: O, and in their place the LSE and dLSE.
    template <class Smem>
    __device__ void copy_output(Smem& smem, int stage, int first_row) const {
        const Sequence sequence(params, rules.batch);
        const auto out = sequence.queries<const scalar_t>(params.o, rules.head);
        copy_tile_anew<kValueDim>(smem.out[stage], out, first_row, sequence.seqlen_q);
        const long long first = sequence.first_row(rules.head, params.sizes) + first_row;
        const acc_t* const lse = static_cast<const acc_t*>(params.lse) + first;
        const acc_t* const dlse = static_cast<const acc_t*>(params.dlse) + first;
#pragma unroll
        for (int rows = 0; rows < kBlockM; rows += kThreads) {
            const int i = rows + threadIdx.x;
            const bool exists = first_row + i < sequence.seqlen_q;
            if (i >= kBlockM) continue;
            RowStats& to = smem.rows[stage][i];
            ptx::copy_async<sizeof(acc_t)>(&to.lse_log2, lse + i, exists);
            ptx::copy_async<sizeof(acc_t)>(&to.d, dlse + i, exists && params.dlse);
        }
    }
};

// Replaces the LSE and dLSE of a tile's rows by their statistics. Lanes side by side share a row.
template <class Smem>
__device__ inline void find_row_stats(Smem& smem, int stage) {
    const auto& dout = smem.dout[stage];
    constexpr int kChunk = MmaTile<kBlockM, kValue>::kMatrixCols;
    constexpr int kLanes = min_of(32, floor_power_of_two(kValue / kChunk));
    using Chunk = Pack<scalar_t, kChunk>;
#pragma unroll
    for (int rows = 0; rows < kBlockM; rows += kThreads / kLanes) {
        const int row = rows + threadIdx.x / kLanes;
        acc_t d = 0;
        for (int col = threadIdx.x % kLanes * kChunk; row < kBlockM && col < kValue;
             col += kLanes * kChunk) {
            const Chunk x = *reinterpret_cast<const Chunk*>(dout.at(row, col));
            const Chunk y = *reinterpret_cast<const Chunk*>(smem.out[stage].at(row, col));
#pragma unroll
            for (int e = 0; e < kChunk; ++e) d += to_acc(x[e]) * to_acc(y[e]);
        }
        d = lanes_sum<kLanes>(d);
        if (row >= kBlockM || threadIdx.x % kLanes > 0) continue;
        RowStats& stats = smem.rows[stage][row];
        stats = RowStats::of(stats.lse_log2, d - stats.d);
    }
}

// Walks over tiles of kBlockM rows from `begin` to `end`; with a mask, those that next_seen finds.
// One tile is copied while `attend` processes the tile before. With EarlyCopies, `attend` starts
// the next copy itself.
template <bool EarlyCopies, class NextSeen, class StartCopy, class Attend>
__device__ inline void walk(int begin, int end, const NextSeen& next_seen,
                            const StartCopy& start_copy, const Attend& attend) {
    int stage = 0, step = kBlockM;
    if constexpr (kSkipsTiles) begin = next_seen(begin);
    for (int row = begin; row < end; row += step) {
        if constexpr (kSkipsTiles) step = next_seen(row + kBlockM) - row;
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
    const auto seen_from = [&](int row) { return kSkipsTiles ? next_seen(row) : row; };
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
