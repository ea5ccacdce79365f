// float32 and float64 operands: one element per register.
//
// Of a left operand, an mma of depth 8 takes (row g, depth t), (g + 8, t), (g, t + 4) and (g + 8, t
// + 4) from a lane, and of a right one (depth t, column g) and (t + 4, g). The order along the
// depth of a product is arbitrary. Here depths t and t + 4 are elements 2t and 2t + 1, since a lane
// has these in an accumulator. Rows that are read at once are then two apart, and in different
// banks.
#pragma once

#include "mma/operands.cuh"
#include "ptx/ptx_sm80.cuh"

// Operand<N> holds N elements in the form that tensor cores take, for two consecutive mma of depth
// 8.
template <class T, template <int> class Operand>
struct WideOperands {
    using Left = Operand<8>;
    struct RightPair {
        Operand<4> of[2];
    };
    using Pair = Pack<T, 2>;

    __device__ static Pair pair(T low, T high) { return {low, high}; }

    template <class Tile>
    struct LeftNN {
        TilePlace<Tile> place;

        __device__ LeftNN(const Tile& a, int row) : place(a, row + g(), 2 * t()) {}
        __device__ Left at(int row, int col) const {
            const Pair upper[] = {pair_at(row, col), pair_at(row, col + 8)};
            const Pair lower[] = {pair_at(row + 8, col), pair_at(row + 8, col + 8)};
            return Left({upper[0][0], lower[0][0], upper[0][1], lower[0][1],  //
                         upper[1][0], lower[1][0], upper[1][1], lower[1][1]});
        }

      private:
        __device__ Pair pair_at(int row, int col) const {
            return *reinterpret_cast<const Pair*>(place.at(row, col));
        }
    };
    template <class Tile>
    struct LeftTN {
        TilePlace<Tile> place;

        __device__ LeftTN(const Tile& a, int row) : place(a, 2 * t(), row + g()) {}
        __device__ Left at(int row, int col) const {
            T x[8];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                x[i] = *place.at(col + i / 4 * 8 + i / 2 % 2, row + i % 2 * 8);
            return Left(x);
        }
    };
    template <int Fragments>
    __device__ static Left left_pn(const FragmentOf<T> (&p)[Fragments], int col) {
        const FragmentOf<T>& first = p[col / kMmaN];
        const FragmentOf<T>& second = p[col / kMmaN + 1];
        return Left({first[0], first[2], first[1], first[3],  //
                     second[0], second[2], second[1], second[3]});
    }

    template <class Tile>
    struct RightNN {
        TilePlace<Tile> place;

        __device__ RightNN(const Tile& v, int col) : place(v, 2 * t(), col + g()) {}
        __device__ RightPair at(int row, int col) const {
            return {column(row, col), column(row, col + kMmaN)};
        }

      private:
        __device__ Operand<4> column(int row, int col) const {
            return Operand<4>({*place.at(row, col), *place.at(row + 1, col),
                               *place.at(row + 8, col), *place.at(row + 9, col)});
        }
    };

  protected:
    __device__ static int g() { return threadIdx.x % 32 / 4; }
    __device__ static int t() { return threadIdx.x % 4; }
};
