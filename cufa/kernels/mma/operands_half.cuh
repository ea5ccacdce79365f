// 16-bit operands: two elements per register, loaded by ldmatrix, with float32 sums.
#pragma once

#include "mma/operands.cuh"
#include "ptx/ptx_sm80.cuh"

template <class T>
struct HalfOperands {
    struct Left {
        unsigned int words[4];
    };
    struct RightPair {
        unsigned int words[4];
    };
    using Pair = unsigned int;

    // Two floats rounded, `low` first in memory.
    __device__ static Pair pair(float low, float high) {
        if constexpr (is_bfloat16<T>) {
            return ptx::pack_bf16(low, high);
        } else {
            return ptx::pack_f16(low, high);
        }
    }

    template <class Tile>
    struct LeftNT {
        TilePlace<Tile> place;

        __device__ LeftNT(const Tile& a, int row)
            : place(a, row + lane() % 16, lane() / 16 * Tile::kMatrixCols) {}
        __device__ Left at(int row, int col) const { return load<Left>(place.at(row, col)); }
    };
    template <class Tile>
    using LeftNN = LeftNT<Tile>;
    template <class Tile>
    struct LeftTN {
        TilePlace<Tile> place;

        __device__ LeftTN(const Tile& a, int row)
            : place(a, lane() % 8 + lane() / 16 * 8, row + lane() / 8 % 2 * Tile::kMatrixCols) {}
        __device__ Left at(int row, int col) const {
            return load_transposed<Left>(place.at(col, row));
        }
    };
    // A lane's part of an accumulator is its part of a left operand, in the same order.
    template <int Fragments>
    __device__ static Left left_pn(const FragmentOf<T> (&p)[Fragments], int col) {
        const FragmentOf<T>& left = p[col / kMmaN];
        const FragmentOf<T>& right = p[col / kMmaN + 1];
        return {pair(left[0], left[1]), pair(left[2], left[3]), pair(right[0], right[1]),
                pair(right[2], right[3])};
    }

    // Row g (half 0) or g + 8 of the left or the right of its two accumulators.
    __device__ static Pair pair_of(const Left& pn, bool right, int half) {
        return pn.words[2 * right + half];
    }

    template <class Tile>
    struct RightNT {
        TilePlace<Tile> place;

        __device__ RightNT(const Tile& b, int row)
            : place(b, row + lane() % 8 + lane() / 16 * 8, lane() / 8 % 2 * Tile::kMatrixCols) {}
        __device__ RightPair at(int row, int col) const {
            return load<RightPair>(place.at(row, col));
        }
    };
    // Eight columns, two steps deep: what one load brings.
    template <class Tile>
    class RightHalfNT {
      public:
        __device__ RightHalfNT(const Tile& b, int row)
            : place(b, row + lane() % 8, lane() / 8 * Tile::kMatrixCols) {}

        // Steps follow each other, from an even one on.
        __device__ void load(int col) {
            static_assert(Tile::kCols % (2 * kMmaK) == 0, "steps come in twos");
            if (!is_second(col)) words = HalfOperands::load<RightPair>(place.at(0, col));
        }
        __device__ void multiply_add(FragmentOf<T>& sums, const Left& a, int col) const {
            const bool second = is_second(col);
            mma(sums, a.words, second ? words.words[2] : words.words[0],
                second ? words.words[3] : words.words[1]);
        }

      private:
        TilePlace<Tile> place;
        RightPair words;

        __device__ static bool is_second(int col) { return col / kMmaK % 2 == 1; }
    };
    template <class Tile>
    struct RightNN {
        TilePlace<Tile> place;

        __device__ RightNN(const Tile& v, int col)
            : place(v, lane() % 16, col + lane() / 16 * Tile::kMatrixCols) {}
        __device__ RightPair at(int row, int col) const {
            return load_transposed<RightPair>(place.at(row, col));
        }
    };

    __device__ static void multiply_add(FragmentOf<T>& left, FragmentOf<T>& right, const Left& a,
                                        const RightPair& b) {
        mma(left, a.words, b.words[0], b.words[1]);
        mma(right, a.words, b.words[2], b.words[3]);
    }

    // The adjacent columns of a lane in a row of sums; four lanes together have four times as many.
    // in_run is column i of a lane's run.
    static constexpr int kRunCols = 2;
    template <int Fragments>
    __device__ static float& in_run(FragmentOf<T> (&row)[Fragments], int half, int run, int i) {
        return row[run][2 * half + i];
    }

  private:
    __device__ static int lane() { return threadIdx.x % 32; }

    template <class Operand>
    __device__ static Operand load(const void* row) {
        Operand operand;
        ptx::ldmatrix_x4(operand.words, row);
        return operand;
    }
    template <class Operand>
    __device__ static Operand load_transposed(const void* row) {
        Operand operand;
        ptx::ldmatrix_x4_trans(operand.words, row);
        return operand;
    }

    __device__ static void mma(float (&d)[4], const unsigned int (&a)[4], unsigned int b0,
                               unsigned int b1) {
        if constexpr (is_bfloat16<T>) {
            ptx::mma_m16n8k16_bf16(d, a, b0, b1);
        } else {
            ptx::mma_m16n8k16_f16(d, a, b0, b1);
        }
    }
};

template <>
struct OperandsOf<float16> : HalfOperands<float16> {};
template <>
struct OperandsOf<bfloat16> : HalfOperands<bfloat16> {};
