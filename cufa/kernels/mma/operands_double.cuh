// Operands of float64, and sums in float64.
#pragma once

#include "mma/operands_wide.cuh"

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
        TilePlace<Tile> place;

        __device__ LeftNT(const Tile& a, int row) : place(a, row + g(), spread()) {}
        __device__ Left at(int row, int col) const {
            double x[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = *place.at(row + i % 2 * 8, col + i / 2 * 2);
            return Left(x);
        }
    };
    template <class Tile>
    struct RightNT {
        TilePlace<Tile> place;

        __device__ RightNT(const Tile& b, int row) : place(b, row + g(), spread()) {}
        __device__ RightPair at(int row, int col) const {
            return {column(row, col), column(row + kMmaN, col)};
        }
        __device__ DoubleOperand<4> column(int row, int col) const {
            return DoubleOperand<4>({*place.at(row, col), *place.at(row, col + 2),
                                     *place.at(row, col + 4), *place.at(row, col + 6)});
        }
    };
    // Eight columns.
    template <class Tile>
    class RightHalfNT {
      public:
        __device__ RightHalfNT(const Tile& b, int row) : rows(b, row) {}
        __device__ void load(int col) { right = rows.column(0, col); }
        __device__ void multiply_add(double (&sums)[4], const Left& a, int) const {
            ptx::mma_m16n8k16_f64(sums, a.x, right.x);
        }

      private:
        RightNT<Tile> rows;
        DoubleOperand<4> right;
    };

    __device__ static void multiply_add(double (&left)[4], double (&right)[4], const Left& a,
                                        const RightPair& b) {
        ptx::mma_m16n8k16_f64(left, a.x, b.of[0].x);
        ptx::mma_m16n8k16_f64(right, a.x, b.of[1].x);
    }

  private:
    // Where depth t of an mma lies in a row: of 16 columns, columns 0, 1, 8 and 9. Depths t + 4, t
    // + 8 and t + 12 are 2, 4 and 6 columns further. So what four lanes of a row read at once, in
    // four rows that are an odd number of 16-byte units apart, is in different banks.
    __device__ static int spread() { return t() % 2 + t() / 2 * 8; }
};
