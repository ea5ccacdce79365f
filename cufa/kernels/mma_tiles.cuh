// Tiles of 16-bit elements in shared memory for tensor cores: the copy that fills them, and the
// products that read them.
#pragma once

#include "config.cuh"
#include "memory.cuh"
#include "ptx_sm80.cuh"
#include "tensor.cuh"

// The shape of one mma: a 16x16 by a 16x8 matrix.
constexpr int kMmaM = 16, kMmaN = 8, kMmaK = 16;
// Elements in 16 bytes: a row of the 8x8 matrices that ldmatrix loads.
constexpr int kMatrixCols = 8;

// What a lane has of a 16x8 accumulator: columns 2t and 2t + 1 of row g, then of row g + 8, where
// g = lane / 4 and t = lane % 4.
using Fragment = float[4];
template <int Tiles, int Cols>
using Accumulators = Fragment[Tiles][Cols / kMmaN];

// A Rows x Cols tile; columns are padded to sixteens. A row is an odd number of 16-byte units long,
// so that the eight rows of an 8x8 matrix lie in different banks.
template <int Rows, int Cols>
struct HalfTile {
    static constexpr int kRows = Rows;
    static constexpr int kCols = round_up(Cols, kMmaK);
    static constexpr int kPitch = kCols + kMatrixCols;

    alignas(16) scalar_t data[Rows * kPitch];

    __device__ scalar_t* at(int row, int col) { return data + row * kPitch + col; }
    __device__ const scalar_t* at(int row, int col) const { return data + row * kPitch + col; }
};

// Makes the columns that are padding zero. Copies leave them alone, so once is enough.
template <int Threads, int Cols, class Tile>
__device__ inline void clear_padding(Tile& tile) {
    constexpr int kPadding = Tile::kCols - Cols;
    if constexpr (kPadding > 0) {
        for (int i = threadIdx.x; i < Tile::kRows * kPadding; i += Threads) {
            *tile.at(i / kPadding, Cols + i % kPadding) = scalar_t{};
        }
    }
}

// Starts the copy of rows [first_row, first_row + Rows) and Cols columns into a tile; rows from
// end_row on become zeros. The whole block takes part: a thread keeps to one column of chunks, so
// that what it adds to its addresses from row to row is the same for all.
template <int Threads, int Cols, class Tile>
__device__ inline void copy_tile(Tile& tile, Matrix<const scalar_t> source, int first_row,
                                 int end_row) {
    constexpr int kChunk = min_of(kAlignBytes / sizeof(scalar_t), Cols & -Cols);
    constexpr int kRowThreads = min_of(Cols / kChunk, Threads);
    constexpr int kRowsAtOnce = Threads / kRowThreads;

    const int row = threadIdx.x / kRowThreads, first_col = threadIdx.x % kRowThreads * kChunk;
    if (Threads % kRowThreads != 0 && row >= kRowsAtOnce) return;
    const scalar_t* const from = source.row(first_row + row);
    const bool whole = first_row + Tile::kRows <= end_row;
#pragma unroll
    for (int rows = 0; rows < Tile::kRows; rows += kRowsAtOnce) {
        if (Tile::kRows % kRowsAtOnce != 0 && row + rows >= Tile::kRows) break;
        const bool inside = whole || first_row + row + rows < end_row;
        // One round, unless a row has more chunks than there are threads.
        for (int col = first_col; col < Cols; col += kRowThreads * kChunk) {
            ptx::copy_async<kChunk * sizeof(scalar_t)>(
                tile.at(row + rows, col), from + rows * source.row_stride + col, inside);
            if (kRowThreads * kChunk == Cols) break;
        }
    }
}

// Whether this thread, of all that look together, finds NaN or infinity in a tile.
template <int Threads, class Tile>
__device__ inline bool finds_nonfinite(const Tile& tile) {
    using Pairs = Pack<unsigned int, kMatrixCols / 2>;
    constexpr int kRowChunks = Tile::kCols / kMatrixCols;
    unsigned int found = 0;
#pragma unroll 1  // it runs for few tiles, and registers are what the others lack
    for (int i = threadIdx.x; i < Tile::kRows * kRowChunks; i += Threads) {
        const scalar_t* chunk = tile.at(i / kRowChunks, i % kRowChunks * kMatrixCols);
        const Pairs pairs = *reinterpret_cast<const Pairs*>(chunk);
#pragma unroll
        for (int e = 0; e < kMatrixCols / 2; ++e) found |= nonfinite_of_pair<scalar_t>(pairs[e]);
    }
    return found != 0;
}

__device__ inline void mma(Fragment& d, const unsigned int (&a)[4], unsigned int b0,
                           unsigned int b1) {
    if constexpr (is_bfloat16<scalar_t>) {
        ptx::mma_m16n8k16_bf16(d, a, b0, b1);
    } else {
        ptx::mma_m16n8k16_f16(d, a, b0, b1);
    }
}

// Two floats rounded to scalar_t, `low` first in memory.
__device__ inline unsigned int pack(float low, float high) {
    if constexpr (is_bfloat16<scalar_t>) {
        return ptx::pack_bf16(low, high);
    } else {
        return ptx::pack_f16(low, high);
    }
}

// s += a b^T, as in S = Q K^T: a warp multiplies Tiles 16-row tiles of `a` from first_row on by
// Cols rows of `b` from b_first_row on.
template <int Tiles, int Cols, class A, class B>
__device__ inline void add_product_nt(Accumulators<Tiles, Cols>& s, const A& a, int first_row,
                                      const B& b, int b_first_row = 0) {
    const int lane = threadIdx.x % 32;
    const scalar_t* a_row = a.at(first_row + lane % 16, lane / 16 * kMatrixCols);
    const scalar_t* b_row =
        b.at(b_first_row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * kMatrixCols);
#pragma unroll
    for (int k = 0; k < A::kCols; k += kMmaK) {
        unsigned int a_part[Tiles][4];
#pragma unroll
        for (int m = 0; m < Tiles; ++m)
            ptx::ldmatrix_x4(a_part[m], a_row + m * kMmaM * A::kPitch + k);
#pragma unroll
        for (int n = 0; n < Cols; n += 2 * kMmaN) {
            unsigned int b_part[4];
            ptx::ldmatrix_x4(b_part, b_row + n * B::kPitch + k);
#pragma unroll
            for (int m = 0; m < Tiles; ++m) {
                mma(s[m][n / kMmaN], a_part[m], b_part[0], b_part[1]);
                mma(s[m][n / kMmaN + 1], a_part[m], b_part[2], b_part[3]);
            }
        }
    }
}

// o += a v for 16 columns of `a`, whose fragments are at hand, and 16 rows of v; lane_row is what a
// lane loads of those rows.
template <int Tiles, int Cols>
__device__ inline void add_columns(Accumulators<Tiles, Cols>& o, const unsigned int (&a)[Tiles][4],
                                   const scalar_t* lane_row) {
#pragma unroll
    for (int n = 0; n < Cols; n += 2 * kMmaN) {
        unsigned int v[4];
        ptx::ldmatrix_x4_trans(v, lane_row + n);
#pragma unroll
        for (int m = 0; m < Tiles; ++m) {
            mma(o[m][n / kMmaN], a[m], v[0], v[1]);
            mma(o[m][n / kMmaN + 1], a[m], v[2], v[3]);
        }
    }
}

// o += p v, as in O += P V, where p is an accumulator: what a lane has of it is what it must have
// of a left operand, in the same order.
template <int Tiles, int Depth, int Cols, class V>
__device__ inline void add_product_pn(Accumulators<Tiles, Cols>& o,
                                      const Accumulators<Tiles, Depth>& p, const V& v) {
    const int lane = threadIdx.x % 32;
    const scalar_t* lane_row = v.at(lane % 16, lane / 16 * kMatrixCols);
#pragma unroll
    for (int k = 0; k < Depth; k += kMmaK) {
        unsigned int a[Tiles][4];
#pragma unroll
        for (int m = 0; m < Tiles; ++m) {
            const Fragment& left = p[m][k / kMmaN];
            const Fragment& right = p[m][k / kMmaN + 1];
            a[m][0] = pack(left[0], left[1]);
            a[m][1] = pack(left[2], left[3]);
            a[m][2] = pack(right[0], right[1]);
            a[m][3] = pack(right[2], right[3]);
        }
        add_columns<Tiles, Cols>(o, a, lane_row + k * V::kPitch);
    }
}

// o += a v, as in dK += dS^T Q: Tiles 16-row tiles of `a` from first_row on, by Cols columns of v
// from first_col on.
template <int Tiles, int Cols, class A, class V>
__device__ inline void add_product_nn(Accumulators<Tiles, Cols>& o, const A& a, int first_row,
                                      const V& v, int first_col) {
    const int lane = threadIdx.x % 32;
    const scalar_t* a_row = a.at(first_row + lane % 16, lane / 16 * kMatrixCols);
    const scalar_t* lane_row = v.at(lane % 16, first_col + lane / 16 * kMatrixCols);
#pragma unroll
    for (int k = 0; k < V::kRows; k += kMmaK) {
        unsigned int part[Tiles][4];
#pragma unroll
        for (int m = 0; m < Tiles; ++m)
            ptx::ldmatrix_x4(part[m], a_row + m * kMmaM * A::kPitch + k);
        add_columns<Tiles, Cols>(o, part, lane_row + k * V::kPitch);
    }
}

// o += a^T v, as in dQ = dS K from dS^T: Tiles 16-row tiles of a^T from first_row on.
template <int Tiles, int Cols, class A, class V>
__device__ inline void add_product_tn(Accumulators<Tiles, Cols>& o, const A& a, int first_row,
                                      const V& v, int first_col) {
    const int lane = threadIdx.x % 32;
    const scalar_t* a_row = a.at(lane % 8 + lane / 16 * 8, first_row + lane / 8 % 2 * kMatrixCols);
    const scalar_t* lane_row = v.at(lane % 16, first_col + lane / 16 * kMatrixCols);
#pragma unroll
    for (int k = 0; k < V::kRows; k += kMmaK) {
        unsigned int part[Tiles][4];
#pragma unroll
        for (int m = 0; m < Tiles; ++m)
            ptx::ldmatrix_x4_trans(part[m], a_row + k * A::kPitch + m * kMmaM);
        add_columns<Tiles, Cols>(o, part, lane_row + k * V::kPitch);
    }
}

// Writes accumulators, rounded, into a tile from (first_row, first_col) on.
template <int Tiles, int Cols, class Tile>
__device__ inline void store_tile(Tile& tile, const Accumulators<Tiles, Cols>& values,
                                  int first_row, int first_col) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < Tiles; ++m)
#pragma unroll
        for (int n = 0; n < Cols / kMmaN; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                scalar_t* to =
                    tile.at(first_row + m * kMmaM + half * 8 + g, first_col + n * kMmaN + 2 * t);
                *reinterpret_cast<unsigned int*>(to) =
                    pack(values[m][n][2 * half], values[m][n][2 * half + 1]);
            }
}

// Writes what a lane has of one row of accumulators (half 0: row g, 1: row g + 8), scaled and
// rounded.
template <int Dims, int Fragments>
__device__ inline void store_row(scalar_t* row, const Fragment (&values)[Fragments], int half,
                                 float scale, int first_col = 0) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < Fragments; ++n) {
        const int col = first_col + n * kMmaN + 2 * t;
        const float low = values[n][2 * half] * scale, high = values[n][2 * half + 1] * scale;
        if (Dims % 2 == 0 && kAlignBytes >= 4) {
            if (col < Dims) *reinterpret_cast<unsigned int*>(row + col) = pack(low, high);
        } else {
            if (col < Dims) row[col] = from_acc<scalar_t>(low);
            if (col + 1 < Dims) row[col + 1] = from_acc<scalar_t>(high);
        }
    }
}
