// The products of a warp on tensor cores (mma.sync), whose operands are tiles in shared memory or
// registers, and the way of their sums out of registers.
#pragma once

#include "mma/mma_tile.cuh"

// Steps of a product that are unrolled where this is optional: all for 8 and 16 bits, few where one
// step has many instructions and needs as many registers.
constexpr int kStepsAtOnce = sizeof(scalar_t) <= 2 ? 16 : kTf32 ? 4 : 1;
// The same where both operands come from shared memory by rows.
constexpr int kRowStepsAtOnce = sizeof(scalar_t) == 8 ? 2 : kStepsAtOnce;

// s += a b^T, as in S = Q K^T: a warp multiplies Tiles 16-row tiles of `a` from first_row on by
// Cols rows of `b` from b_first_row on, in columns [begin, end) of both.
template <int Tiles, int Cols, int StepsAtOnce = kStepsAtOnce, class A, class B>
__device__ inline void add_product_nt(Accumulators<Tiles, Cols>& s, const A& a, int first_row,
                                      const B& b, int b_first_row = 0, int begin = 0,
                                      int end = A::kCols) {
    constexpr int kPairCols = Cols / (2 * kMmaN) * (2 * kMmaN);
    const Operands::LeftNT<A> a_part(a, first_row);
    const Operands::RightNT<B> b_part(b, b_first_row);
    Operands::RightHalfNT<B> b_half(b, b_first_row + kPairCols);
#pragma unroll(StepsAtOnce)
    for (int k = begin; k < end; k += kMmaK) {
        Operands::Left left[Tiles];
#pragma unroll
        for (int m = 0; m < Tiles; ++m) left[m] = a_part.at(m * kMmaM, k);
#pragma unroll
        for (int n = 0; n < kPairCols; n += 2 * kMmaN) {
            const Operands::RightPair right = b_part.at(n, k);
#pragma unroll
            for (int m = 0; m < Tiles; ++m) {
                Fragment* const sums = &s[m][n / kMmaN];
                Operands::multiply_add(sums[0], sums[1], left[m], right);
            }
        }
        if constexpr (kPairCols < Cols) {
            b_half.load(k);
#pragma unroll
            for (int m = 0; m < Tiles; ++m)
                b_half.multiply_add(s[m][kPairCols / kMmaN], left[m], k);
        }
    }
}

// o += a v for kMmaK columns of `a`, which are in registers, and the rows of v from `row` on.
template <int Tiles, int Cols, class V>
__device__ inline void add_columns(Accumulators<Tiles, Cols>& o,
                                   const Operands::Left (&left)[Tiles],
                                   const Operands::RightNN<V>& v_part, int row) {
#pragma unroll
    for (int n = 0; n < Cols; n += 2 * kMmaN) {
        const Operands::RightPair right = v_part.at(row, n);
#pragma unroll
        for (int m = 0; m < Tiles; ++m) {
            Fragment* const sums = &o[m][n / kMmaN];
            Operands::multiply_add(sums[0], sums[1], left[m], right);
        }
    }
}

// o += p v, as in O += P V, where p is an accumulator, for Cols columns of v from first_col on.
// Steps that begin beyond `depth` are skipped.
template <int Tiles, int Depth, int Cols, class V>
__device__ inline void add_product_pn(Accumulators<Tiles, Cols>& o,
                                      const Accumulators<Tiles, Depth>& p, const V& v,
                                      int first_col = 0, int depth = Depth) {
    const Operands::RightNN<V> v_part(v, first_col);
#pragma unroll
    for (int k = 0; k < Depth; k += kMmaK) {
        if (k >= depth) continue;
        Operands::Left left[Tiles];
#pragma unroll
        for (int m = 0; m < Tiles; ++m) left[m] = Operands::left_pn(p[m], k);
        add_columns<Tiles, Cols>(o, left, v_part, k);
    }
}

// o += a v, as in dK += dS^T Q: Tiles 16-row tiles of `a` from first_row on, by Cols columns of v
// from first_col on.
template <int Tiles, int Cols, class A, class V>
__device__ inline void add_product_nn(Accumulators<Tiles, Cols>& o, const A& a, int first_row,
                                      const V& v, int first_col) {
    const Operands::LeftNN<A> a_part(a, first_row);
    const Operands::RightNN<V> v_part(v, first_col);
#pragma unroll(kRowStepsAtOnce)
    for (int k = 0; k < V::kRows; k += kMmaK) {
        Operands::Left left[Tiles];
#pragma unroll
        for (int m = 0; m < Tiles; ++m) left[m] = a_part.at(m * kMmaM, k);
        add_columns<Tiles, Cols>(o, left, v_part, k);
    }
}

// o += a^T v, as in dQ = dS K from dS^T: Tiles 16-row tiles of a^T from first_row on.
template <int Tiles, int Cols, int StepsAtOnce = kStepsAtOnce, class A, class V>
__device__ inline void add_product_tn(Accumulators<Tiles, Cols>& o, const A& a, int first_row,
                                      const V& v, int first_col) {
    const Operands::LeftTN<A> a_part(a, first_row);
    const Operands::RightNN<V> v_part(v, first_col);
#pragma unroll(StepsAtOnce)
    for (int k = 0; k < V::kRows; k += kMmaK) {
        Operands::Left left[Tiles];
#pragma unroll
        for (int m = 0; m < Tiles; ++m) left[m] = a_part.at(m * kMmaM, k);
        add_columns<Tiles, Cols>(o, left, v_part, k);
    }
}

// A whole left operand in registers, if its depth is whole steps: Tiles 16-row tiles of a^T from
// first_row on, or rounded accumulators.
template <int Tiles, int Depth>
class LeftStrip {
  public:
    __device__ explicit LeftStrip(const Accumulators<Tiles, Depth>& p) {
#pragma unroll
        for (int k = 0; k < Depth / kMmaK; ++k)
#pragma unroll
            for (int m = 0; m < Tiles; ++m) left[k][m] = Operands::left_pn(p[m], k * kMmaK);
    }
    template <class A>
    __device__ LeftStrip(const A& a, int first_row) {
        static_assert(A::kRows == Depth, "all rows are loaded");
        const Operands::LeftTN<A> a_part(a, first_row);
#pragma unroll
        for (int k = 0; k < Depth / kMmaK; ++k)
#pragma unroll
            for (int m = 0; m < Tiles; ++m) left[k][m] = a_part.at(m * kMmaM, k * kMmaK);
    }

    // Adds the operand times Cols columns of v, from first_col on, to o.
    template <int Cols, class V>
    __device__ void add_product_with(Accumulators<Tiles, Cols>& o, const V& v,
                                     int first_col) const {
        const Operands::RightNN<V> v_part(v, first_col);
#pragma unroll
        for (int k = 0; k < Depth / kMmaK; ++k)
            add_columns<Tiles, Cols>(o, left[k], v_part, k * kMmaK);
    }

    // A half of fragment (m, n) of the accumulators, rounded.
    template <class Half = Operands>
    __device__ typename Half::Pair pair(int m, int n, int half) const {
        return Half::pair_of(left[n / 2][m], n % 2, half);
    }

  private:
    Operands::Left left[ceil_div(Depth, kMmaK)][Tiles];
};

template <int Tiles, int Depth, int Cols, class V>
__device__ inline void add_product_pn(Accumulators<Tiles, Cols>& o,
                                      const LeftStrip<Tiles, Depth>& p, const V& v) {
    p.template add_product_with<Cols>(o, v, 0);
}

// A lane's half of fragment (m, n) of accumulators, rounded.
template <int Tiles, int Cols>
__device__ inline Operands::Pair rounded_pair(const Accumulators<Tiles, Cols>& values, int m, int n,
                                              int half) {
    return Operands::pair(values[m][n][2 * half], values[m][n][2 * half + 1]);
}
template <int Tiles, int Cols>
__device__ inline Operands::Pair rounded_pair(const LeftStrip<Tiles, Cols>& values, int m, int n,
                                              int half) {
    return values.pair(m, n, half);
}

// Writes accumulators, rounded, into a tile from (first_row, first_col) on. Only float64 keeps the
// addresses from tile to tile: there, recomputing them would spill more.
template <int Tiles, int Cols, class Values, class Tile>
__device__ inline void store_tile(Tile& tile, const Values& values, int first_row, int first_col) {
    const int own_row = fragment_row(first_row, 0, 0), own_col = fragment_col(first_col, 0);
    const TilePlace<Tile, scalar_t> place(tile, own_row, own_col);
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
#pragma unroll
        for (int n = 0; n < Cols / kMmaN; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int rows = m * kMmaM + half * 8, cols = n * kMmaN;
                scalar_t* const to = sizeof(scalar_t) == 8 ? tile.at(own_row + rows, own_col + cols)
                                                           : place.at(rows, cols);
                *reinterpret_cast<Operands::Pair*>(to) =
                    rounded_pair<Tiles, Cols>(values, m, n, half);
            }
}

// Writes a lane's part of one row of accumulators (half 0: row g, 1: row g + 8), scaled and
// rounded.
template <int Dims, int Fragments>
__device__ inline void store_row(scalar_t* row, const Fragment (&values)[Fragments], int half,
                                 acc_t scale, int first_col = 0) {
#pragma unroll
    for (int n = 0; n < Fragments; ++n) {
        const int col = fragment_col(first_col, n);
        const acc_t low = values[n][2 * half] * scale, high = values[n][2 * half + 1] * scale;
        if constexpr (Dims % 2 == 0 && kAlignBytes >= 2 * sizeof(scalar_t)) {
            if (col < Dims) {
                *reinterpret_cast<Operands::Pair*>(row + col) = Operands::pair(low, high);
            }
        } else {
            if (col < Dims) row[col] = from_acc<scalar_t>(low);
            if (col + 1 < Dims) row[col + 1] = from_acc<scalar_t>(high);
        }
    }
}

// The same, not rounded, to a row of Dims columns in whole eights.
template <int Dims, int Fragments>
__device__ inline void store_sums(acc_t* row, const Fragment (&values)[Fragments], int half,
                                  int first_col) {
#pragma unroll
    for (int n = 0; n < Fragments; ++n) {
        const int col = first_col + n * kMmaN;
        if (col >= Dims) continue;
        *reinterpret_cast<Pack<acc_t, 2>*>(row + col + threadIdx.x % 4 * 2) = {
            values[n][2 * half], values[n][2 * half + 1]};
    }
}

template <int Tiles, int Cols>
__device__ inline void scale(Accumulators<Tiles, Cols>& values, acc_t factor) {
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
#pragma unroll
        for (int n = 0; n < Cols / kMmaN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) values[m][n][e] *= factor;
}
