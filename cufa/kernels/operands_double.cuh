// Operands of float64, and sums in float64.
#pragma once

#include "operands_wide.cuh"

template <int N>
struct DoubleOperand {
    double x[N];

    DoubleOperand() = default;
    __device__ explicit DoubleOperand(const double (&values)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = values[i];
    }
};

template <>
struct OperandsOf<float64> : WideOperands<float64, DoubleOperand> {
    template <class Tile>
    struct LeftNT {
        const double* place;

        __device__ LeftNT(const Tile& a, int row) : place(a.at(row + g(), spread())) {}
        __device__ Left at(int row, int col) const {
            const double* const upper = place + row * Tile::kPitch + spread(col);
            const double* const lower = upper + 8 * Tile::kPitch;
            return Left({upper[0], lower[0], upper[2], lower[2]});
        }
    };
    template <class Tile>
    struct RightNT {
        const double* place;

        __device__ RightNT(const Tile& b, int row) : place(b.at(row + g(), spread())) {}
        __device__ RightPair at(int row, int col) const {
            const double* const left = place + row * Tile::kPitch + spread(col);
            const double* const right = left + kMmaN * Tile::kPitch;
            return {DoubleOperand<2>({left[0], left[2]}), DoubleOperand<2>({right[0], right[2]})};
        }
    };

    __device__ static void multiply_add(FragmentOf<float64>& left, FragmentOf<float64>& right,
                                        const Left& a, const RightPair& b) {
        ptx::mma_m16n8k8_f64(left, a.x, b.of[0].x);
        ptx::mma_m16n8k8_f64(right, a.x, b.of[1].x);
    }

  private:
    // Where depths t and t + 4 of the 8 from `col` on lie in a row: 2 apart. Of 16 columns the
    // first 8 are 0, 1, 8, 9 and 2, 3, 10, 11, the others those that are left; four lanes of one
    // row and four rows, an odd number of 16-byte units apart, then meet all banks.
    __device__ static int spread() { return t() % 2 + t() / 2 * 8; }
    __device__ static constexpr int spread(int col) { return col / 16 * 16 + col % 16 / 2; }
};
