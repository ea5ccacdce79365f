// Stores the output of the Hopper forwards from a warpgroup's registers.
#pragma once

#include "hopper/forward/wgmma_forward_block.cuh"
#include "scores/head_numbers.cuh"

// Ends the softmax of a row of a head with its sink, and returns the factor of its sum of weighted
// values; `output_scale` is that of the head's.
__device__ inline float end_row(OnlineSoftmax& row, float output_scale, const Params& params,
                                const WorkTile& work) {
    float scale = output_scale;
    if constexpr (kSink) scale *= row.add(sink_log2_of(params.call.features, work.head));
    return scale * (row.sum == 0 ? 0 : ptx::reciprocal_fast(row.sum));
}

// By one warpgroup of those that share rows.
__device__ inline void store_lse(const RowPair& softmax, const Params& params, const WorkTile& work,
                                 int warpgroup) {
    float* lse = static_cast<float*>(params.call.lse);
    if (!lse || threadIdx.x % 4 != 0 || warpgroup % kColumnWarpgroups != 0) return;
    const Sequence sequence = work.sequence(params.call);
    const Sizes& sizes = params.call.sizes;
    // The LSE is in the order of heads, then queries.
    const int step = kQueriesAsHeads ? sizes.heads : 1;
    lse += kQueriesAsHeads ? sequence.first_row(0, sizes) + work.head
                           : sequence.first_row(work.head, sizes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = row_of(work, half);
        if (row < sequence.seqlen_q) lse[row * step] = softmax.rows[half].lse();
    }
}

// A warpgroup's rows of O, and their LSE. Dims are the columns of its sums.
template <class Smem, int Dims>
struct OutputRows {
    Smem& smem;
    const Params& params;
    const int warpgroup;

    // Divides the output by the sums of the weights, and stores it.
    __device__ void store(const WgmmaSums<Dims>& sums, RowPair softmax, float output_scale,
                          const WorkTile& work) const {
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& row = softmax.rows[half];
            row.total<4>();
            scale[half] = end_row(row, output_scale, params, work);
        }
        using Element = typename Smem::StoredRows::Element;
#pragma unroll
        for (int col = 0; col < Dims; col += kStoreCols) {
            constexpr int kCols = min_of(kStoreCols, Dims);
            WgmmaSums<kCols> part = {};
#pragma unroll
            for (int i = 0; i < kCols / 2 && col / 2 + i < Dims / 2; ++i) {
                part[i] = sums[col / 2 + i] * scale[i / 2 % 2];
            }
            WgmmaOperand<kCols, Element> rounded;
            round_to_operand<kCols, Element>(rounded, part);
            send_out<kCols>(rounded, work, col);
        }
        // Last, because the fence before a copy waits for earlier writes.
        store_lse(softmax, params, work, warpgroup);
    }

  private:
    // Stores some columns of the output through the warpgroup's part of shared memory, once the
    // columns before have left it.
    template <int Cols>
    __device__ void send_out(const WgmmaOperand<Cols, typename Smem::StoredRows::Element>& values,
                             const WorkTile& work, int first_col) const {
        const bool leader = threadIdx.x % kWarpgroup == 0;
        auto& rows = smem.out[warpgroup];
        const int col = first_col + warpgroup % kColumnWarpgroups * kOwnCols;
        if (leader) ptx::wait_stores_read();
        ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup);
        write_rows<Cols>(rows, values, row_of_warp());
        ptx::proxy_fence();
        ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup);
        const Sequence sequence = work.sequence(params.call);
        const int row = work.first_row + warpgroup / kColumnWarpgroups * kWgmmaM;
        const int before = first_col_of<kValueDim>(params.call.v, work.kv_head);
        if (before < 0 || (kPacked && row + kWgmmaM > sequence.seqlen_q)) {
            // TMA cannot store a box that begins before the first column, and would write beyond
            // the sequence.
            using Element = typename Smem::StoredRows::Element;
            write_first_rows<kValueDim, kWarpgroup>(
                sequence.queries<Element>(params.call.o, work.head), rows,
                min(kWgmmaM, sequence.seqlen_q - row), row, before + col, threadIdx.x % kWarpgroup);
        } else if (leader) {
            store_tile(params.o, rows, kPacked ? 0 : work.batch, work.head, sequence.first_q + row,
                       col);
        }
    }
};
