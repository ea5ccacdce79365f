// NaN and infinity in tiles for tensor cores. Where a mask cuts through a tile, they must reach the
// rows and keys that see them, and no others; but in a product over the whole tile 0 * NaN is NaN.
#pragma once

#include "mma/mma_products.cuh"

// Whether one of a lane's scores is NaN or infinite.
template <int Tiles, int Cols>
__device__ inline bool has_nonfinite(const Accumulators<Tiles, Cols>& scores) {
    acc_t zero = 0;
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
#pragma unroll
        for (int n = 0; n < Cols / kMmaN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) zero += scores[m][n][e] * 0;
    return !(zero == 0);
}

// Sets NaN and infinity in a tile to zero. The whole block takes part.
template <int Threads, class Tile>
__device__ inline void clear_nonfinite(Tile& tile) {
#pragma unroll 1  // it runs for few tiles, and other code lacks registers
    for (int i = threadIdx.x; i < Tile::kRows * Tile::kCols; i += Threads) {
        scalar_t& value = *tile.at(i / Tile::kCols, i % Tile::kCols);
        if (to_acc(value) * 0 != 0) value = from_acc<scalar_t>(0);
    }
}

// Adds NaN and infinity of queries [first_query, end), in columns from first_col on, to the sums of
// the keys that see them, whatever their weight.
template <int Dims, int Tiles, int Cols, class Keys>
__device__ inline void add_nonfinite(Accumulators<Tiles, Cols>& sums,
                                     Matrix<const scalar_t> queries, int first_query, int end,
                                     int first_col, const Keys& tile) {
#pragma unroll 1
    for (int query = first_query; query < end; ++query)
#pragma unroll
        for (int m = 0; m < Tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = int(tile.row({m, 0, half, 0}));
                if (!tile.rules.sees(query, key)) continue;
#pragma unroll
                for (int n = 0; n < Cols / kMmaN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int col = fragment_col(first_col, n) + e;
                        if (col >= Dims) continue;
                        const acc_t value = to_acc(queries.row(query)[col]);
                        if (value * 0 != 0) sums[m][n][2 * half + e] += value;
                    }
            }
}

// o += w v like add_product_nn, but one multiply-add at a time, and only where row and key see each
// other.
template <int Tiles, int Cols, class Tile, class Weight>
__device__ inline void add_seen(Accumulators<Tiles, Cols>& o, const Tile& v, int first_row,
                                int first_col, const Weight& weight) {
    for (int k = 0; k < Tile::kRows; ++k)
#pragma unroll
        for (int m = 0; m < Tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const scalar_t* w = weight(fragment_row(first_row, m, half), k);
                if (w == nullptr) continue;
#pragma unroll
                for (int n = 0; n < Cols / kMmaN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const scalar_t value = *v.at(k, fragment_col(first_col, n) + e);
                        o[m][n][2 * half + e] += to_acc(*w) * to_acc(value);
                    }
            }
}
