// What one mma multiplies, for each type of elements: the operands that a lane holds, and how it
// gets them from tiles in shared memory or from accumulators.
//
// A product is named by how its operands lie, as in BLAS: `n` as the product needs it, `t`
// transposed; `p` is a left operand that lies in accumulators. Specialisations have
//   kDepth     the depth of one mma
//   Left       16 rows of a left operand
//   RightPair  16 columns of a right operand
//   left_nt, left_nn, left_tn, left_pn, right_nt, right_nn   the operands at (row, col) of a tile
//   multiply_add   of a Left and a RightPair
//   Pair, pair     two elements, rounded
#pragma once

#include "config.cuh"
#include "memory.cuh"

// Accumulators are 16x8; tiles are padded to depths that are multiples of kMmaK.
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
