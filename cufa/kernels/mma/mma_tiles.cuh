// Tiles in shared memory for tensor cores: the copy that fills them, and the products that read
// them.
#pragma once

#include "call/columns.cuh"
#include "call/tensor.cuh"
#include "mma/operands_byte.cuh"
#include "mma/operands_double.cuh"
#include "mma/operands_half.cuh"
#include "mma/operands_single.cuh"

using Operands = OperandsOf<key_t>;

// Steps of a product that are unrolled where this is optional: all for 8 and 16 bits, few where one
// step has many instructions and needs as many registers.
constexpr int kStepsAtOnce = sizeof(scalar_t) <= 2 ? 16 : kTf32 ? 4 : 1;
// The same where both operands come from shared memory by rows.
constexpr int kRowStepsAtOnce = sizeof(scalar_t) == 8 ? 2 : kStepsAtOnce;

// A Rows x Cols tile; columns are padded to whole steps of a product. The eight rows of a matrix
// that ldmatrix loads must lie in different banks, so units of 16 bytes are swizzled: unit u of row
// r is at u ^ r % 8. Rows of bytes may be a half or a quarter of a line; then it is at u ^ r / 2 %
// 4 or u ^ r / 4 % 2. Rows that are not 1, 2, 4, ... lines long are padded to an odd number of
// units instead. Copies into them are slower, since a line of the source is then part of two.
template <int Rows, int Cols, class T = key_t>
struct MmaTile {
    using Element = T;
    static constexpr int kMatrixCols = kMatrixBytes / sizeof(T), kLineCols = kLineBytes / sizeof(T);
    static constexpr int kRows = Rows;
    static constexpr int kCols = round_up(Cols, kMmaK);
    static constexpr int kSpan = min_of(kCols, kLineCols);  // columns that a swizzle permutes
    static constexpr bool kSwizzled =
        (kSpan == kLineCols || sizeof(T) == 1) && (kCols & (kCols - 1)) == 0;
    static constexpr int kPitch = kSwizzled ? kCols : kCols + kMatrixCols;

    alignas(kLineBytes) T data[Rows * kPitch];

    __device__ static int place(int row, int col) {
        return row * kPitch + (kSwizzled ? col ^ swizzle(row) : col);
    }
    // The bits of a column that are flipped in this row.
    __device__ static int swizzle(int row) {
        constexpr int kRowsOfLine = kLineCols / kSpan, kUnits = kSpan / kMatrixCols;
        return (row / kRowsOfLine & (kUnits - 1)) * kMatrixCols;
    }
    __device__ T* at(int row, int col) { return data + place(row, col); }
    __device__ const T* at(int row, int col) const { return data + place(row, col); }
};

// Sets the padding columns to zero. Copies do not touch them, so once is enough.
//
// Here and below, the first Threads threads of the block take part; or others, if each passes its
// own index.
template <int Threads, int Cols, class Tile>
__device__ inline void clear_padding(Tile& tile, unsigned int thread = threadIdx.x) {
    constexpr int kPadding = Tile::kCols - Cols;
    if constexpr (kPadding > 0) {
        constexpr int kChunk = min_of(kPadding & -kPadding, Tile::kMatrixCols);
        constexpr int kRowChunks = kPadding / kChunk;
        using Chunk = Pack<typename Tile::Element, kChunk>;
        for (int i = thread; i < Tile::kRows * kRowChunks; i += Threads) {
            const int col = Cols + i % kRowChunks * kChunk;
            *reinterpret_cast<Chunk*>(tile.at(i / kRowChunks, col)) = Chunk{};
        }
    }
}

// How Threads threads divide the copy of rows of Cols columns of a type.
template <int Threads, int Cols, class T>
struct RowCopies {
    static constexpr int kChunk = kChunkOfRow<T, Cols>;
    static constexpr int kRowThreads = min_of(Cols / kChunk, Threads);
    static constexpr int kRowsAtOnce = floor_power_of_two(Threads / kRowThreads);
};

// Starts the copy of rows [first_row, first_row + Rows) and Cols columns to a tile's rows from
// to_row on; rows from end_row on become zeros. A thread stays in one column of chunks, so that
// address increments from row to row are the same for all threads.
template <int Threads, int Cols, int Rows, class Tile, class Index>
__device__ inline void copy_rows(Tile& tile, int to_row,
                                 Matrix<const typename Tile::Element> source, int first_row,
                                 int end_row, Index thread) {
    using Element = typename Tile::Element;
    using Copies = RowCopies<Threads, Cols, Element>;
    constexpr int kChunk = Copies::kChunk, kRowThreads = Copies::kRowThreads;
    constexpr int kRowsAtOnce = Copies::kRowsAtOnce;

    const int row = thread / kRowThreads, first_col = thread % kRowThreads * kChunk;
    if (Threads != kRowsAtOnce * kRowThreads && row >= kRowsAtOnce) return;
    const Element* const from = source.row(first_row + row);
    const bool whole = first_row + Rows <= end_row;
    // One round, unless a row has more chunks than there are threads.
    for (int col = first_col; col < Cols; col += kRowThreads * kChunk) {
        const TilePlace<Tile, Element> to(tile, row, col);
#pragma unroll(ptx::kCopiesAtOnce)
        for (int rows = 0; rows < Rows; rows += kRowsAtOnce) {
            if (Rows % kRowsAtOnce != 0 && row + rows >= Rows) break;
            const bool inside = whole || first_row + row + rows < end_row;
            ptx::copy_async<kChunk * sizeof(Element)>(
                to.at(to_row + rows, 0), from + rows * source.row_stride + col, inside);
        }
        if (kRowThreads * kChunk == Cols) break;
    }
}

// The same for all rows of a tile.
template <int Threads, int Cols, class Tile, class Index = unsigned int>
__device__ inline void copy_tile(Tile& tile, Matrix<const typename Tile::Element> source,
                                 int first_row, int end_row, Index thread = threadIdx.x) {
    copy_rows<Threads, Cols, Tile::kRows>(tile, 0, source, first_row, end_row, thread);
}

// Zeroes NaN and infinity in what this thread itself has copied to a tile and waited for. Returns
// whether there was any.
template <int Threads, int Cols, class Tile>
__device__ inline bool clear_copied_nonfinite(Tile& tile) {
    using Copies = RowCopies<Threads, Cols, scalar_t>;
    const int first_row = threadIdx.x / Copies::kRowThreads;
    const int first_col = threadIdx.x % Copies::kRowThreads * Copies::kChunk;
    if (first_row >= Copies::kRowsAtOnce) return false;
    bool found = false;
    for (int col = first_col; col < Cols; col += Copies::kRowThreads * Copies::kChunk)
#pragma unroll 4  // it runs for few tiles
        for (int row = first_row; row < Tile::kRows; row += Copies::kRowsAtOnce)
#pragma unroll
            for (int e = 0; e < Copies::kChunk; ++e) {
                scalar_t& value = *tile.at(row, col + e);
                if (is_finite(value)) continue;
                value = scalar_t{};
                found = true;
            }
    return found;
}

// Whether this thread, one of Threads that search together, finds NaN or infinity in a tile.
template <int Threads, class Tile>
__device__ inline bool finds_nonfinite(const Tile& tile, unsigned int thread = threadIdx.x) {
    using Element = typename Tile::Element;
    constexpr int kChunkCols = Tile::kMatrixCols, kRowChunks = Tile::kCols / kChunkCols;
    unsigned int found = 0;
#pragma unroll 1  // it runs for few tiles, and other code lacks registers
    for (int i = thread; i < Tile::kRows * kRowChunks; i += Threads) {
        const Element* chunk = tile.at(i / kRowChunks, i % kRowChunks * kChunkCols);
        if constexpr (sizeof(Element) == 2) {
            using Pairs = Pack<unsigned int, kChunkCols / 2>;
            const Pairs pairs = *reinterpret_cast<const Pairs*>(chunk);
#pragma unroll
            for (int e = 0; e < kChunkCols / 2; ++e) found |= nonfinite_of_pair<Element>(pairs[e]);
        } else {
            const auto values = *reinterpret_cast<const Pack<Element, kChunkCols>*>(chunk);
#pragma unroll
            for (int e = 0; e < kChunkCols; ++e) found |= !is_finite(values[e]);
        }
    }
    return found != 0;
}

// s += a b^T, as in S = Q K^T: a warp multiplies Tiles 16-row tiles of `a` from first_row on by
// Cols rows of `b` from b_first_row on, in columns [begin, end) of both.
template <int Tiles, int Cols, int StepsAtOnce = kStepsAtOnce, class A, class B>
__device__ inline void add_product_nt(Accumulators<Tiles, Cols>& s, const A& a, int first_row,
                                      const B& b, int b_first_row = 0, int begin = 0,
                                      int end = A::kCols) {
    const Operands::LeftNT<A> a_part(a, first_row);
    const Operands::RightNT<B> b_part(b, b_first_row);
#pragma unroll(StepsAtOnce)
    for (int k = begin; k < end; k += kMmaK) {
        Operands::Left left[Tiles];
#pragma unroll
        for (int m = 0; m < Tiles; ++m) left[m] = a_part.at(m * kMmaM, k);
#pragma unroll
        for (int n = 0; n < Cols / kMmaK * kMmaK; n += 2 * kMmaN) {
            const Operands::RightPair right = b_part.at(n, k);
#pragma unroll
            for (int m = 0; m < Tiles; ++m) {
                Fragment* const sums = &s[m][n / kMmaN];
                Operands::multiply_add(sums[0], sums[1], left[m], right);
            }
        }
        if constexpr (Cols % kMmaK != 0) {
#pragma unroll
            for (int m = 0; m < Tiles; ++m)
                b_part.multiply_half(s[m][Cols / kMmaN - 1], left[m], Cols - kMmaN, k);
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

// Writes the rows of a tile to rows [first_row, end_row) of a matrix. The whole block takes part.
template <int Threads, int Cols, class Tile>
__device__ inline void write_tile(const Tile& tile, Matrix<scalar_t> to, int first_row,
                                  int end_row) {
    constexpr int kChunk = kChunkOfRow<scalar_t, Cols>;
    constexpr int kRowChunks = Cols / kChunk;
    using Chunk = Pack<scalar_t, kChunk>;
    const int rows = min(Tile::kRows, end_row - first_row);
#pragma unroll 1  // it runs once, and other code lacks registers
    for (int i = threadIdx.x; i < rows * kRowChunks; i += Threads) {
        const int row = i / kRowChunks, col = i % kRowChunks * kChunk;
        *reinterpret_cast<Chunk*>(to.row(first_row + row) + col) =
            *reinterpret_cast<const Chunk*>(tile.at(row, col));
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
