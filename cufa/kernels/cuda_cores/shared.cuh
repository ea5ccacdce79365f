// Matrices in shared memory, with rows padded against bank conflicts, and the copy that fills them.
#pragma once

#include "call/columns.cuh"
#include "call/config.cuh"
#include "call/memory.cuh"
#include "call/tensor.cuh"

using Vec = Pack<acc_t, kVec>;

// A Rows x Cols matrix. The pitch is an odd number of 16-byte units, so that threads that read the
// same columns of neighbouring rows hit different banks. Columns from Cols to the next whole unit
// exist and are zero.
template <int Rows, int Cols>
struct SharedMatrix {
    static constexpr int kRows = Rows;
    static constexpr int kCols = round_up(Cols, kVec);
    static constexpr int kPitch = (kCols / kVec | 1) * kVec;

    acc_t data[Rows * kPitch];

    __device__ acc_t& at(int row, int col) { return data[row * kPitch + col]; }
    __device__ const acc_t& at(int row, int col) const { return data[row * kPitch + col]; }
    __device__ Vec& vec(int row, int col) { return reinterpret_cast<Vec&>(at(row, col)); }
    __device__ const Vec& vec(int row, int col) const {
        return reinterpret_cast<const Vec&>(at(row, col));
    }
};

// Loads rows [first_row, first_row + Rows) of a global or paged matrix of Cols columns, converted
// to acc_t, and of these as many from first_col on as the tile has. Rows outside [0, end_row) and
// padding columns become zero. The whole block takes part.
template <int Threads, int Cols, class Tile, class Source>
__device__ inline void load_tile(Tile& tile, const Source& source, int first_row, int end_row,
                                 int first_col = 0, unsigned int thread = threadIdx.x) {
    // No chunk may straddle the last column.
    constexpr int kChunk = kChunkOfRow<scalar_t, Cols>;
    constexpr int kRowChunks = Tile::kCols / kChunk;
    static_assert(Tile::kCols % kChunk == 0, "a row of the tile must hold whole chunks");
    using Chunk = Pack<scalar_t, kChunk>;

    for (int i = thread; i < Tile::kRows * kRowChunks; i += Threads) {
        const int row = i / kRowChunks, col = i % kRowChunks * kChunk;
        Chunk chunk = {};
        if (first_row + row < end_row && first_col + col < Cols) {
            const scalar_t* const from = source.row(first_row + row) + first_col;
            chunk = *reinterpret_cast<const Chunk*>(from + col);
        }
        if constexpr (kChunk % kVec == 0) {
#pragma unroll
            for (int c = 0; c < kChunk; c += kVec) {
                Vec values;
#pragma unroll
                for (int e = 0; e < kVec; ++e) values[e] = to_acc(chunk[c + e]);
                tile.vec(row, col + c) = values;
            }
        } else {
#pragma unroll
            for (int e = 0; e < kChunk; ++e) tile.at(row, col + e) = to_acc(chunk[e]);
        }
    }
}
