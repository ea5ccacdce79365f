// The sums of dQ in the workspace, to which warps add their fragments.
#pragma once

#include "mma/mma_products.cuh"

// The sums of one head of a sequence: whole tiles of BlockM queries by Cols columns. They have the
// layout of the warps: 16x8 fragments of 4 x 32 values, so that an addition by a warp is 128
// contiguous bytes.
template <int BlockM, int Cols>
class QuerySums {
  public:
    // `all` points to the sums of all heads.
    __device__ QuerySums(acc_t* all, const Sizes& sizes, const Sequence& sequence, int head) {
        const long long tile =
            static_cast<long long>(head) * row_tiles<BlockM>(sizes.batch, sizes.seqlen_q) +
            first_row_tile<BlockM>(sequence.batch, sequence.first_q, sizes.seqlen_q);
        sums = all + tile * (BlockM * Cols);
    }

    // The number of rows of the sums of all heads.
    __device__ static long long rows(const Sizes& sizes) {
        return static_cast<long long>(sizes.heads) *
               row_tiles<BlockM>(sizes.batch, sizes.seqlen_q) * BlockM;
    }

    // A warp sets as many sums as a row has to zero; which ones does not matter.
    __device__ static void clear_row(acc_t* all, long long row) {
        using Vector = Pack<acc_t, kVec>;
        auto* to = reinterpret_cast<Vector*>(all + row * Cols);
        for (int i = threadIdx.x % 32; i < Cols / kVec; i += 32) to[i] = {};
    }

    // A block sets the sums of so many rows, in whole tiles, to zero.
    template <int Threads>
    __device__ void clear(int rows) const {
        using Vector = Pack<acc_t, kVec>;
        const long long count = static_cast<long long>(round_up(rows, BlockM)) * (Cols / kVec);
        auto* to = reinterpret_cast<Vector*>(sums);
        for (long long i = threadIdx.x; i < count; i += Threads) to[i] = {};
    }

    // Adds a warp's Tiles 16-row tiles to the sums from (row, col) on.
    template <int Tiles, int TileCols>
    __device__ void add(const Accumulators<Tiles, TileCols>& dq, int row, int col) const {
        // Computes all addresses from one. For 16-bit types this takes fewer registers; float32
        // would spill more on some GPUs, and float64 would take longer.
        constexpr bool kOneAddress = sizeof(scalar_t) == 2;
        acc_t* const first = fragment(row, col);
#pragma unroll
        for (int m = 0; m < Tiles; ++m)
#pragma unroll
            for (int n = 0; n < TileCols / kMmaN; ++n) {
                acc_t* const to = kOneAddress ? first + m * kMmaM * Cols + n * kFragment
                                              : fragment(row + m * kMmaM, col + n * kMmaN);
#pragma unroll
                for (int e = 0; e < 4; ++e) atomicAdd(to + e * 32 + threadIdx.x % 32, dq[m][n][e]);
            }
    }

    // Writes the 16 rows from first_row on to the same rows of dQ, scaled and rounded, by one warp.
    // A lane takes eight columns of a row: in a fragment, the pairs of four lanes.
    template <int Dims>
    __device__ void round_rows(Matrix<scalar_t> dq, int first_row, int end_row, acc_t scale) const {
        constexpr int kFragments = ceil_div(Dims, kMmaN);
        const int lane = threadIdx.x % 32, g = lane % 8;
#pragma unroll 4
        for (int i = lane / 8; i < 2 * kFragments; i += 4) {
            const int half = i / kFragments, col = i % kFragments * kMmaN;
            const acc_t* const from = fragment(first_row, col) + half * 2 * 32 + g * 4;
            acc_t pairs[2][4];  // the even columns, then the odd ones
#pragma unroll
            for (int e = 0; e < 8; e += kVec) {
                using Part = Pack<acc_t, kVec>;
                const Part part = *reinterpret_cast<const Part*>(from + e / 4 * 32 + e % 4);
#pragma unroll
                for (int v = 0; v < kVec; ++v) pairs[e / 4][e % 4 + v] = part[v];
            }
            const int row = first_row + half * 8 + g;
            if (row >= end_row) continue;
            Pack<scalar_t, kMmaN> values;
#pragma unroll
            for (int e = 0; e < kMmaN; ++e) {
                values[e] = from_acc<scalar_t>(pairs[e % 2][e / 2] * scale);
            }
            write_columns<Dims>(dq.row(row), values, col);
        }
    }

  private:
    static constexpr int kFragment = kMmaM * kMmaN;
    acc_t* sums;

    // The fragment of 16 rows and 8 columns that begins at (row, col).
    __device__ acc_t* fragment(int row, int col) const {
        return sums + static_cast<long long>(row) * Cols + col / kMmaN * kFragment;
    }
};
