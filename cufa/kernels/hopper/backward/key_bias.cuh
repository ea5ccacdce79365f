// The bias of a tile of scores for a warpgroup of the Hopper backward with S^T of 64 keys. It is
// transposed as it is read, from a tile that TMA copied or from global memory.
#pragma once

#include "hopper/bias_boxes.cuh"

// The bias of a thread's scores for 16 queries, in wgmma's layout.
using SixteenBiases = WgmmaSums<kWgmmaK>;

// From a tile of BlockM queries that TMA copied.
template <class T, int BlockM>
class BiasInTile {
  public:
    using Tile = PanelTile<BlockM, kWgmmaM, T>;

    __device__ explicit BiasInTile(Tile& tile) : tile(tile) {}

    // Reads the bias of 16 queries from `row` on.
    __device__ void read(SixteenBiases& values, int row) const {
        const int lane = threadIdx.x % 32;
        const int key = row_of_warp() + lane / 8 % 2 * kChunkCols;
        WgmmaOperand<kWgmmaK, T> words;
        ptx::ldmatrix_x4_trans(words[0], boxed_bias(tile, row + lane / 16 * 8 + lane % 8, key));
        widen_operand<kWgmmaK, T>(values, words);
    }

  private:
    Tile& tile;
};

// From global memory, for a thread's two keys; past the end, the last key.
template <class T>
struct BiasInMemory {
    Matrix<const T> matrix;
    int first_row, last_row;
    int key[2];

    __device__ void read(SixteenBiases& values, int row) const {
        row += first_row + col_of_thread();
#pragma unroll
        for (int i = 0; i < kWgmmaK / 2; ++i) {
            const int inside = min(row + i / 4 * 8 + i % 2, last_row);
            const T* const of_row = kBiasRowsDiffer ? matrix.row(inside) : matrix.data;
            values[i] = to_acc(of_row[key[i % 4 / 2]]);
        }
    }
};
template <>
struct BiasInMemory<void> {
    __device__ void read(SixteenBiases&, int) const {}
};
