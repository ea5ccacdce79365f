// The output of a warp of fwd_8_split_kv for its rows: their softmax, and sums of values.
#pragma once

#include "mma/fwd_8_rows.cuh"
#include "mma/mma_nonfinite.cuh"
#include "mma/mma_softmax.cuh"

// A lane's columns of a row's sums come in adjacent runs; where a run begins.
constexpr int kRunCols = Operands::kRunCols, kRuns = kOwnCols / (4 * kRunCols);
__device__ inline int run_col(int run) {
    return column_warp() * kOwnCols + (run * 4 + threadIdx.x % 4) * kRunCols;
}

// The output of a warp for its rows, from the keys that it has processed.
struct Output {
    OnlineSoftmax softmax[kTiles][2];
    Accumulators<kTiles, kOwnCols> o;

    // Processes one tile of scores and turns it into P.
    __device__ void exponentiate(Scores& s) {
        acc_t largest[kTiles][2];
        bool raised = false;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                largest[m][half] = largest_of(s[m], half);
                raised |= largest[m][half] > softmax[m][half].max;
            }
        if (__any_sync(0xffffffffu, raised)) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m) raise_maxima(softmax[m], o[m], largest[m]);
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        s[m][n][e] = softmax[m][half].weight(s[m][n][e]);
                    }
    }

    // Stores the results where partial rows are merged.
    __device__ void store(PartialRow* parts) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                PartialRow& part = parts[row_of(m, half)];
                softmax[m][half].total<4>();
                if (threadIdx.x % 4 == 0 && column_warp() == 0) part.softmax = softmax[m][half];
#pragma unroll
                for (int run = 0; run < kRuns; ++run) {
                    Pack<acc_t, kRunCols> sums;
#pragma unroll
                    for (int i = 0; i < kRunCols; ++i)
                        sums[i] = Operands::in_run(o[m], half, run, i);
                    *reinterpret_cast<Pack<acc_t, kRunCols>*>(part.sums + run_col(run)) = sums;
                }
            }
    }
};

// Where a mask cuts through a tile, a value that is NaN or infinite must reach the rows that see
// its key, and no other; but 0 * NaN is NaN. Such values are added here to the outputs of the rows
// that see them, whatever their weight, and are zero in the product.
__device__ inline void take_out_nonfinite(Output& out, Stage& stage, const WarpRows& rows,
                                          int first_key) {
    // Each warp inspects all values, so that all warps of a team take the same branch.
    const unsigned int lane = threadIdx.x % 32;
    if (!__any_sync(0xffffffffu, finds_nonfinite<32>(stage.v(), lane))) return;

#pragma unroll 1
    for (int key = 0; key < kBlockN; ++key)
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!rows[m].rules[half].sees(rows[m].query[half], first_key + key)) continue;
#pragma unroll
                for (int run = 0; run < kRuns; ++run)
#pragma unroll
                    for (int i = 0; i < kRunCols; ++i) {
                        const key_t value = *stage.v().at(key, run_col(run) + i);
                        if (!is_finite(value))
                            Operands::in_run(out.o[m], half, run, i) += to_acc(value);
                    }
            }
    sync_team();  // every warp has seen them
    constexpr int kChunkCols = KeyRows::kMatrixCols, kRowChunks = kPartCols / kChunkCols;
    for (int i = team_thread(); i < kBlockN * kRowChunks; i += kTeamThreads)
#pragma unroll
        for (int e = 0; e < kChunkCols; ++e) {
            key_t& value = *stage.v().at(i / kRowChunks, i % kRowChunks * kChunkCols + e);
            if (!is_finite(value)) value = key_t{};
        }
    sync_team();
}
