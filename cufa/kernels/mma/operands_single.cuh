// float32 operands. Tensor cores take them as tf32: the upper 19 bits, 10 of them mantissa. If that
// is not enough, an element is the sum of two tf32. The product of two such sums omits only the
// product of the two small parts (Ootomo and Yokota 2022, "Recovering single precision accuracy
// from Tensor Cores while surpassing the FP32 theoretical peak performance").
#pragma once

#include "mma/operands_wide.cuh"

// The nearest tf32, or a neighbour that is hardly further off. Tensor cores truncate to tf32. So
// this first adds 0.35 to 0.7 of the last place, which does not change a number that is already a
// tf32. NaN and infinity stay as they are.
__device__ inline float toward_nearest_tf32(float x) {
    constexpr float kHalfAPlace = 0x1.6ap-12f;
    return x + x * kHalfAPlace;
}

template <int N>
struct SingleOperand {
    static constexpr int kParts = kTf32 ? 1 : 2;
    unsigned int part[kParts][N];

    SingleOperand() = default;
    __device__ explicit SingleOperand(const float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float nearest = toward_nearest_tf32(x[i]);
            part[0][i] = __float_as_uint(nearest);
            if constexpr (!kTf32) {
                part[0][i] = finite_tf32(nearest);
                part[1][i] = __float_as_uint(x[i] - __uint_as_float(part[0][i]));
            }
        }
    }

  private:
    // Infinity becomes the largest tf32, with its sign, and NaN some tf32; the small part then
    // holds the NaN or infinity. In the large part, infinity times a small part that is 0 would be
    // NaN.
    __device__ static unsigned int finite_tf32(float x) {
        constexpr unsigned int kLargest = 0x7f7fe000;
        const float size = fminf(fabsf(x), __uint_as_float(kLargest));
        return ptx::tf32_of(size, x);
    }
};

template <>
struct OperandsOf<float32> : WideOperands<float32, SingleOperand> {
    template <class Tile>
    struct LeftNT {
        TilePlace<Tile> place;

        __device__ LeftNT(const Tile& a, int row)
            : place(a, row + lane() % 16, lane() / 16 * Tile::kMatrixCols) {}
        __device__ Left at(int row, int col) const {
            const auto x = load(place.at(row, col)), y = load(place.at(row, col + 8));
            return Left({x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3]});
        }
    };
    template <class Tile>
    struct RightNT {
        TilePlace<Tile> place;

        __device__ RightNT(const Tile& b, int row)
            : place(b, row + lane() % 8, lane() / 8 * Tile::kMatrixCols) {}
        __device__ RightPair at(int row, int col) const {
            return {column(row, col), column(row + kMmaN, col)};
        }

        __device__ SingleOperand<4> column(int row, int col) const {
            const auto x = load(place.at(row, col));
            return SingleOperand<4>({x[0], x[1], x[2], x[3]});
        }
    };
    // Eight columns.
    template <class Tile>
    class RightHalfNT {
      public:
        __device__ RightHalfNT(const Tile& b, int row) : rows(b, row) {}
        __device__ void load(int col) { right = rows.column(0, col); }
        __device__ void multiply_add(float (&sums)[4], const Left& a, int) const {
            add(sums, a, right);
        }

      private:
        RightNT<Tile> rows;
        SingleOperand<4> right;
    };

    __device__ static void multiply_add(float (&left)[4], float (&right)[4], const Left& a,
                                        const RightPair& b) {
        add(left, a, b.of[0]);
        add(right, a, b.of[1]);
    }

  private:
    __device__ static int lane() { return threadIdx.x % 32; }

    __device__ static Pack<float, 4> load(const float* row) {
        unsigned int words[4];
        ptx::ldmatrix_x4(words, row);
        return {__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]),
                __uint_as_float(words[3])};
    }

    __device__ static void add(float (&d)[4], const Left& a, const SingleOperand<4>& b) {
        if constexpr (kTf32) {
            add_parts(d, a.part[0], b.part[0]);
        } else {
            // Tensor cores truncate the sums that they add to, so they only add short ones.
            float sum[4] = {};
            add_parts(sum, a.part[1], b.part[0]);
            add_parts(sum, a.part[0], b.part[1]);
            add_parts(sum, a.part[0], b.part[0]);
#pragma unroll
            for (int e = 0; e < 4; ++e) d[e] += sum[e];
        }
    }

    __device__ static void add_parts(float (&d)[4], const unsigned int (&a)[8],
                                     const unsigned int (&b)[4]) {
        ptx::mma_m16n8k8_tf32(d, a, b);
        ptx::mma_m16n8k8_tf32(d, a + 4, b + 2);
    }
};
