// 8-bit operands for 16-bit products: e4m3 fits into float16 exactly, and is converted between
// shared memory and the product. The left operand of Q K^T may be float16 already. Sums are
// float32.
//
// A step is 32 deep, as much as one load of bytes brings: two mma of 16. ldmatrix treats two
// neighbours as one 16-bit element. So a lane has four columns, 4t to 4t + 3, where one mma wants
// 2t, 2t + 1, 2t + 8 and 2t + 9. In Q K^T both operands have this order, which does not change the
// sum. float16 rows are stored to match: of each 16 columns, pairs 0, 2, 4 and 6 come before pairs
// 1, 3, 5 and 7. In P V these are columns of the output: an mma has every second one.
#pragma once

#include "mma/operands_half.cuh"
#include "ptx/ptx_sm89.cuh"

template <>
struct OperandsOf<float8_e4m3fn> : HalfOperands<float16> {
    using Half = HalfOperands<float16>;
    using Sums = FragmentOf<float8_e4m3fn>;

    // 16 rows, for both mma.
    struct Left {
        Half::Left steps[2];
    };
    // 16 columns, for both mma.
    struct RightPair {
        Half::RightPair steps[2];
    };

    template <class Tile>
    struct LeftNT {
        Half::LeftNT<Tile> words;

        __device__ LeftNT(const Tile& a, int row) : words(a, row) {}
        __device__ Left at(int row, int col) const {
            if constexpr (sizeof(typename Tile::Element) == 2)
                return {{words.at(row, col), words.at(row, col + kMmaK / 2)}};
            const Half::Left bytes = words.at(row, col);
            Left left;
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    unsigned int pairs[2];
                    ptx::half_from_e4m3(pairs, bytes.words[2 * step + half]);
                    left.steps[step].words[half] = pairs[0];
                    left.steps[step].words[2 + half] = pairs[1];
                }
            return left;
        }
    };
    template <int Fragments>
    __device__ static Left left_pn(const Sums (&p)[Fragments], int col) {
        return {{Half::left_pn(p, col), Half::left_pn(p, col + kMmaK / 2)}};
    }

    template <class Tile>
    struct RightNT {
        Half::RightNT<Tile> words;

        __device__ RightNT(const Tile& b, int row) : words(b, row) {}
        __device__ RightPair at(int row, int col) const {
            const Half::RightPair bytes = words.at(row, col);
            RightPair right;
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    unsigned int pairs[2];
                    ptx::half_from_e4m3(pairs, bytes.words[2 * n + step]);
                    right.steps[step].words[2 * n] = pairs[0];
                    right.steps[step].words[2 * n + 1] = pairs[1];
                }
            return right;
        }
    };
    // A word has two columns of two rows; a product wants two rows of one column in a word.
    template <class Tile>
    struct RightNN {
        TilePlace<Tile> place;

        __device__ RightNN(const Tile& v, int col) : place(v, threadIdx.x % 32, col) {}
        __device__ RightPair at(int row, int col) const {
            constexpr unsigned int kByColumns = 0x3120;
            unsigned int words[4];
            ptx::ldmatrix_x4_trans(words, place.at(row, col));
            RightPair right;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned int pairs[2];
                ptx::half_from_e4m3(pairs, __byte_perm(words[i], 0, kByColumns));
#pragma unroll
                for (int n = 0; n < 2; ++n) right.steps[i / 2].words[2 * n + i % 2] = pairs[n];
            }
            return right;
        }
    };

    __device__ static void multiply_add(Sums& left, Sums& right, const Left& a,
                                        const RightPair& b) {
#pragma unroll
        for (int step = 0; step < 2; ++step)
            Half::multiply_add(left, right, a.steps[step], b.steps[step]);
    }

    // In P V, each of two accumulators has every second column.
    static constexpr int kRunCols = 4;
    template <int Fragments>
    __device__ static float& in_run(Sums (&row)[Fragments], int half, int run, int i) {
        return row[2 * run + i % 2][2 * half + i / 2];
    }
};
