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

#include "config.cuh"
#include "memory.cuh"

// A left operand has 16 rows, an accumulator 8 columns, and a step of a product is 16 deep.
constexpr int kMmaM = 16, kMmaN = 8, kMmaK = 16;
// Elements in 16 bytes: a row of the matrices that ldmatrix loads.
constexpr int kMatrixCols = 16 / sizeof(scalar_t);

// What a lane has of a 16x8 accumulator: columns 2t and 2t + 1 of row g, then of row g + 8, where
// g = lane / 4 and t = lane % 4.
template <class T>
using FragmentOf = accumulator_t<T>[4];
using Fragment = FragmentOf<scalar_t>;
template <int Tiles, int Cols>
using Accumulators = Fragment[Tiles][Cols / kMmaN];

template <class T>
struct OperandsOf;
