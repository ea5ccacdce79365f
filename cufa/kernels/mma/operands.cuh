// What one mma multiplies, for each element type: a lane's operands, and how it gets them from
// tiles in shared memory or from accumulators.
//
// A product is named by the layout of its operands, as in BLAS: `n` as the product needs it, `t`
// transposed; `p` is a left operand in accumulators. Specialisations have
//   Left, RightPair          16 rows and 16 columns of operands, kMmaK deep
//   LeftNT, LeftNN, LeftTN, RightNT, RightNN   how a lane loads them from a tile
//   RightHalfNT              the first half of a RightPair, and how it is multiplied
//   left_pn                  a Left from accumulators
//   multiply_add             adds the product of a Left and a RightPair to two accumulators
//   Pair, pair               two elements, rounded
#pragma once

#include "call/config.cuh"
#include "call/memory.cuh"

// A left operand has 16 rows, an accumulator 8 columns, and a step of a product is 16 deep, or 32
// for bytes.
constexpr int kMmaM = 16, kMmaN = 8, kMmaK = sizeof(key_t) == 1 ? 32 : 16;
// Bytes that shared memory delivers at once, and of a row of the matrices that ldmatrix loads.
constexpr int kLineBytes = 128, kMatrixBytes = 16;

// A lane's own element of a tile, from which other elements are addressed at offsets that are the
// same in all lanes. In a swizzled tile they are found by flipping bits, without carries: `rows`
// and `cols` must have no bit in common with the lane's own row, modulo eight, and column. This is
// repeated for each product: there are not enough registers for the flipped addresses.
template <class Tile, class Element = const typename Tile::Element>
class TilePlace {
  public:
    template <class T>
    __device__ TilePlace(T& tile, int row, int col)
        : data(tile.data), own(ptx::anew(Tile::place(row, col))) {}

    __device__ Element* at(int rows, int cols) const {
        if constexpr (!Tile::kSwizzled) return data + own + rows * Tile::kPitch + cols;
        const int flipped = Tile::swizzle(rows) ^ cols % Tile::kSpan;
        return data + (own ^ flipped) + rows * Tile::kPitch + cols / Tile::kSpan * Tile::kSpan;
    }

  private:
    Element* data;
    int own;
};

// A lane's part of a 16x8 accumulator: columns 2t and 2t + 1 of row g, then of row g + 8, where g =
// lane / 4 and t = lane % 4.
template <class T>
using FragmentOf = accumulator_t<T>[4];
using Fragment = FragmentOf<scalar_t>;
template <int Tiles, int Cols>
using Accumulators = Fragment[Tiles][Cols / kMmaN];

// In accumulators that begin at first_row and first_col: the row of a lane's half (0: row g, 1: row
// g + 8) of fragment `m`, and the first of its two columns in fragment `n`.
__device__ inline int fragment_row(int first_row, int m, int half) {
    return first_row + m * kMmaM + half * 8 + threadIdx.x % 32 / 4;
}
__device__ inline int fragment_col(int first_col, int n) {
    return first_col + n * kMmaN + threadIdx.x % 4 * 2;
}

template <class T>
struct OperandsOf;
