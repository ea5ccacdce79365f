// What one mma multiplies, for each type of elements: the operands that a lane holds, and how it
// gets them from tiles in shared memory or from accumulators.
//
// A product is named by how its operands lie, as in BLAS: `n` as the product needs it, `t`
// transposed; `p` is a left operand that lies in accumulators. Specialisations have
//   Left, RightPair          16 rows and 16 columns of operands, kMmaK deep
//   LeftNT, LeftNN, LeftTN, RightNT, RightNN   where a lane finds them in a tile
//   left_pn                  a Left from accumulators
//   multiply_add             what a Left and a RightPair add to two accumulators
//   Pair, pair               two elements, rounded
#pragma once

#include "call/config.cuh"
#include "call/memory.cuh"

// A left operand has 16 rows, an accumulator 8 columns, and a step of a product is 16 deep; or 32,
// of bytes.
constexpr int kMmaM = 16, kMmaN = 8, kMmaK = sizeof(key_t) == 1 ? 32 : 16;
// What shared memory gives at once is a line, and a row of the matrices that ldmatrix loads.
constexpr int kLineBytes = 128, kMatrixBytes = 16;

// A lane's own element of a tile, and others which lie as far from it in the tile of every lane. If
// the tile is swizzled they are found by flipping bits, which no sum may carry into: `rows` and
// `cols` must have no bit in common with the lane's own row, modulo eight, and column. That is done
// anew for each product: the flipped addresses would be more registers than there are.
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

// What a lane has of a 16x8 accumulator: columns 2t and 2t + 1 of row g, then of row g + 8, where
// g = lane / 4 and t = lane % 4.
template <class T>
using FragmentOf = accumulator_t<T>[4];
using Fragment = FragmentOf<scalar_t>;
template <int Tiles, int Cols>
using Accumulators = Fragment[Tiles][Cols / kMmaN];

// Of accumulators for rows and columns from the first on, the row that a lane's half (0: row g, 1:
// row g + 8) of fragments `m` is of, and the first of the two columns that it has of fragment `n`.
__device__ inline int fragment_row(int first_row, int m, int half) {
    return first_row + m * kMmaM + half * 8 + threadIdx.x % 32 / 4;
}
__device__ inline int fragment_col(int first_col, int n) {
    return first_col + n * kMmaN + threadIdx.x % 4 * 2;
}

template <class T>
struct OperandsOf;
