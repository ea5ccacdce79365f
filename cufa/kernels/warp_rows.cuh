// Work on whole rows before and after the backward's main kernel: a warp for each row of each query
// head.
#pragma once

#include "memory.cuh"
#include "online_softmax.cuh"
#include "tensor.cuh"

template <int Threads>
struct WarpRow {
    int batch, head, row, lane = threadIdx.x % 32;

    // The row of this warp if heads have `rows` rows each; past the last one `batch` is out of
    // range.
    __device__ WarpRow(const Sizes& sizes, int rows) {
        const long long index =
            static_cast<long long>(blockIdx.x) * (Threads / 32) + threadIdx.x / 32;
        row = index % rows;
        head = index / rows % sizes.heads;
        batch = index / rows / sizes.heads;
    }

    // D = rowsum(dO o O), in every lane.
    template <int Dims>
    __device__ acc_t dot(const Tensor& o, const Tensor& dout) const {
        constexpr int kChunk = min_of(kAlignBytes / sizeof(scalar_t), Dims & -Dims);
        using Chunk = Pack<scalar_t, kChunk>;
        const scalar_t* o_row = matrix_of<const scalar_t>(o, batch, head).row(row);
        const scalar_t* dout_row = matrix_of<const scalar_t>(dout, batch, head).row(row);
        acc_t sum = 0;
        for (int col = lane * kChunk; col < Dims; col += 32 * kChunk) {
            const Chunk a = *reinterpret_cast<const Chunk*>(o_row + col);
            const Chunk b = *reinterpret_cast<const Chunk*>(dout_row + col);
#pragma unroll
            for (int e = 0; e < kChunk; ++e) sum += to_acc(a[e]) * to_acc(b[e]);
        }
        return lanes_sum<32>(sum);
    }
};
