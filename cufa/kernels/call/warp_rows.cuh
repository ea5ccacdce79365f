// Work on whole rows before and after the backward's main kernel: one warp for each row of each
// query head.
#pragma once

#include "call/columns.cuh"
#include "call/grid.cuh"
#include "call/memory.cuh"
#include "call/numbers.cuh"
#include "call/tensor.cuh"

// One row of a query head, by its number among all rows. Packed sequences have batch 0 and row
// numbers that run through all sequences, as in the tensors.
struct WarpRow {
    int batch, head, row, lane = threadIdx.x % 32;

    __device__ WarpRow(const Sizes& sizes, long long index)
        : batch(index / sizes.seqlen_q / sizes.heads),
          head(index / sizes.seqlen_q % sizes.heads),
          row(index % sizes.seqlen_q) {}

    // Packed arrays may have rows before the first sequence and after the last one.
    __device__ bool is_of_a_sequence(const BackwardParams& params) const {
        if constexpr (!kPacked) return true;
        const int* cu_seqlens = params.features.cu_seqlens_q;
        return row >= cu_seqlens[0] && row < cu_seqlens[params.sizes.batch];
    }

    // The dot product of this row in two tensors, in every lane.
    template <int Dims>
    __device__ acc_t dot(const Tensor& a, const Tensor& b) const {
        constexpr int kChunk = kChunkOfRow<scalar_t, Dims>;
        using Chunk = Pack<scalar_t, kChunk>;
        const scalar_t* a_row = matrix_of<const scalar_t>(a, batch, head).row(row);
        const scalar_t* b_row = matrix_of<const scalar_t>(b, batch, head).row(row);
        acc_t sum = 0;
        for (int col = lane * kChunk; col < Dims; col += 32 * kChunk) {
            const Chunk x = *reinterpret_cast<const Chunk*>(a_row + col);
            const Chunk y = *reinterpret_cast<const Chunk*>(b_row + col);
#pragma unroll
            for (int e = 0; e < kChunk; ++e) sum += to_acc(x[e]) * to_acc(y[e]);
        }
        return lanes_sum<32>(sum);
    }
};

// What all scores of a row need: its LSE in log 2, and D = rowsum(dO o O) - dLSE. An LSE of -inf
// becomes inf here: such a row has no weights, and 2^(-inf - -inf) would be NaN instead of 0.
struct alignas(2 * sizeof(acc_t)) RowStats {
    acc_t lse_log2, d;

    __device__ static RowStats of(acc_t lse, acc_t d) {
        return {(lse == negative_infinity() ? -lse : lse) * acc_t(kLog2E), d};
    }
};

// Finds the statistics of a row in an array laid out as the LSE.
struct StatsInOrder {
    const BackwardParams& params;
    const RowStats* stats;

    __device__ RowStats operator()(const Sequence& sequence, int head, int row) const {
        return stats[sequence.first_row(head, params.sizes) + row];
    }
};

// Writes the statistics of every row, each by the warp with its number.
template <int Threads>
__device__ inline void write_row_stats(const BackwardParams& params, RowStats* stats) {
    const long long index = warp_of_grid<Threads>();
    if (index >= rows_of_heads(params.sizes)) return;
    const WarpRow at(params.sizes, index);
    const acc_t lse = static_cast<const acc_t*>(params.lse)[index];
    acc_t d = at.dot<kValueDim>(params.o, params.dout);
    if (params.dlse) d -= static_cast<const acc_t*>(params.dlse)[index];
    if (at.lane == 0) stats[index] = RowStats::of(lse, d);
}
