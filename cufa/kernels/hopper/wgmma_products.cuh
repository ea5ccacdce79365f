// The products of a warpgroup (wgmma): what its registers hold, operands in shared memory, and how
// a product is issued and awaited.
#pragma once

#include "hopper/panel_tile.cuh"
#include "ptx/ptx_sm90a.cuh"

// The shape of one wgmma: 64 rows, and a depth of 32 bytes.
constexpr int kWgmmaM = 64;
template <class T>
constexpr int kWgmmaDepth = 32 / sizeof(T);
constexpr int kWgmmaK = kWgmmaDepth<operand_t>;

// A thread's part of a 64 x Cols accumulator: columns 8i + 2t and 8i + 2t + 1 of row g in [4i] and
// [4i + 1], of row g + 8 in [4i + 2] and [4i + 3], where g = lane / 4 and t = lane % 4.
template <int Cols>
using WgmmaSums = float[Cols / 2];
// The first of a warp's 16 rows in its warpgroup's 64, the first of a thread's two rows, which are
// eight apart, and the first of its two columns in each eight.
__device__ inline int row_of_warp(unsigned int thread = threadIdx.x) {
    return thread % kWarpgroup / 32 * 16;
}
__device__ inline int row_of_thread(unsigned int thread = threadIdx.x) {
    return row_of_warp(thread) + thread % 32 / 4;
}
__device__ inline unsigned int col_of_thread() {
    return threadIdx.x % 4 * 2;
}
// The sums, rounded, as the left operand of the next product: four words for each wgmma.
template <int Cols, class T = operand_t>
using WgmmaOperand = unsigned int[Cols / kWgmmaDepth<T>][4];

// The descriptor of an operand in shared memory for wgmma (PTX ISA, "Matrix Descriptor Format" of
// wgmma). The low word has the address and the stride between panels; the high word has the stride
// between groups of eight rows and the kind of swizzle. Addresses and strides are in units of 16
// bytes. The high word is the same for all operands of a kind; a sum in the low word leads from one
// operand to the next.
constexpr int kOperandUnit = 16;
// In a cluster, an address also says in which block's shared memory it lies, above this.
constexpr unsigned int kBlockWindow = 1 << 18;
// The kinds of swizzle: none, or 16-byte chunks change places within so many bytes of a row.
enum Swizzle : unsigned long long { kNoSwizzle = 0, kSwizzle128 = 1, kSwizzle32 = 3 };

__device__ inline unsigned int operand_at(const void* address, int panel_stride) {
    unsigned int place = ptx::shared_address(address);
    if (kClusterBlocks > 1) place %= kBlockWindow;
    return panel_stride / kOperandUnit << 16 | place / kOperandUnit;
}
template <Swizzle Kind, int RowBytes>
__device__ constexpr unsigned long long description_of(unsigned int operand) {
    constexpr unsigned long long kRows = kSwizzleRows * RowBytes / kOperandUnit;
    return Kind << 62 | kRows << 32 | operand;
}
template <int RowBytes = kPanelRowBytes>
__device__ constexpr unsigned long long description(unsigned int operand) {
    static_assert(RowBytes == kPanelRowBytes || RowBytes == kNarrowRowBytes, "as panels are");
    constexpr Swizzle kKind = RowBytes == kPanelRowBytes ? kSwizzle128 : kSwizzle32;
    return description_of<kKind, RowBytes>(operand);
}

// The depth runs along the columns, as in both operands of S = Q K^T. columns_step is the distance
// of the operand whose depth begins at `col`.
template <class Tile>
__device__ inline unsigned int depth_in_columns(const Tile& tile) {
    return operand_at(tile.data, 0);
}
template <class Tile>
__device__ constexpr unsigned int columns_step(int col) {
    const int col_bytes = col % Tile::kPanelCols * int(sizeof(typename Tile::Element));
    return (col / Tile::kPanelCols * Tile::kPanelBytes + col_bytes) / kOperandUnit;
}

// The depth runs along the rows, as in the V of O = P V.
template <class Tile>
__device__ inline unsigned int depth_in_rows(const Tile& tile) {
    return operand_at(tile.data, Tile::kPanelBytes);
}
// The same for one panel of columns.
template <class Tile>
__device__ inline unsigned int panel_depth_in_rows(const Tile& tile, int panel) {
    return operand_at(tile.data[panel], Tile::kPanelBytes);
}

template <int RowBytes = kPanelRowBytes>
__device__ constexpr unsigned int rows_step(int row) {
    return row * RowBytes / kOperandUnit;
}

// sums[place] += value. A register cannot be named at run time, so each sum is asked whether it is
// the one.
template <int Count>
__device__ inline void add_at(float (&sums)[Count], int place, float value) {
#pragma unroll
    for (int i = 0; i < Count; ++i) sums[i] = i == place ? sums[i] + value : sums[i];
}

template <int Count>
__device__ inline void hold_all(float (&values)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) ptx::hold(values[i]);
}

template <int Cols, class T>
struct WgmmaOfType {
    using type = ptx::Wgmma<Cols, is_bfloat16<T>>;
};
template <int Cols>
struct WgmmaOfType<Cols, float8_e4m3fn> {
    using type = ptx::WgmmaE4m3<Cols>;
};
template <int Cols, class T>
using WgmmaOf = typename WgmmaOfType<Cols, T>::type;

// Issues s = a b^T over Depth columns, as in S = Q K^T, or s += a b^T if Add. The product is done
// when its group is.
template <int Depth, int Cols, bool Add = false, class A, class B>
__device__ inline void issue_product_nt(WgmmaSums<Cols>& s, const A& a, const B& b) {
    using Product = WgmmaOf<Cols, operand_t>;
    static_assert(A::kRowBytes == kPanelRowBytes && B::kRowBytes == kPanelRowBytes);
    unsigned int a0 = depth_in_columns(a);
    const unsigned int b0 = depth_in_columns(b);
    ptx::hold(a0);  // or each step's sum would stay in a register from tile to tile
    hold_all(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Depth; k += kWgmmaK) {
        const unsigned long long a_k = description(a0 + columns_step<A>(k));
        const unsigned long long b_k = description(b0 + columns_step<B>(k));
        if (k == 0 && !Add) {
            Product::template multiply<false, false, false>(s, a_k, b_k);
        } else {
            Product::template multiply<false, false, true>(s, a_k, b_k);
        }
    }
    ptx::wgmma_commit();
}

// Issues o += p v, as in O += P V.
template <int Depth, int Cols, class V>
__device__ inline void issue_product_pn(WgmmaSums<Cols>& o, const WgmmaOperand<Depth>& p,
                                        const V& v) {
    using Product = ptx::Wgmma<Cols, is_bfloat16<operand_t>>;
    const unsigned int v0 = depth_in_rows(v);
    hold_all(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Depth; k += kWgmmaK) {
        Product::template multiply<true, true>(o, p[k / kWgmmaK], description(v0 + rows_step(k)));
    }
    ptx::wgmma_commit();
}

// Issues o += a b. The depth, Depth, runs along the columns of a and the rows of b, as in dV += P^T
// dO with P^T in shared memory.
template <int Depth, int Cols, class A, class B>
__device__ inline void issue_product_nn(WgmmaSums<Cols>& o, const A& a, const B& b) {
    using Product = ptx::Wgmma<Cols, is_bfloat16<operand_t>>;
    static_assert(B::kRowBytes == kPanelRowBytes);
    const unsigned int a0 = depth_in_columns(a);
    unsigned int b0 = depth_in_rows(b);
    ptx::hold(b0);  // or each step's sum would stay in a register from tile to tile
    hold_all(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Depth; k += kWgmmaK) {
        const unsigned long long a_k = description<A::kRowBytes>(a0 + columns_step<A>(k));
        Product::template multiply<false, true, true>(o, a_k, description(b0 + rows_step(k)));
    }
    ptx::wgmma_commit();
}

// Waits for all groups but the last Pending; their results are in `values`.
template <int Pending, int Count>
__device__ inline void wait_product(float (&values)[Count]) {
    ptx::wgmma_wait<Pending>();
    hold_all(values);
}

// Two sums rounded to T, with `low` first in memory. With Finite, numbers that are too large for T
// become its largest.
template <class T = operand_t, bool Finite = false>
__device__ inline unsigned int round_pair(float low, float high) {
    if constexpr (Finite && !is_bfloat16<T>) return ptx::pack_finite_f16(low, high);
    return is_bfloat16<T> ? ptx::pack_bf16(low, high) : ptx::pack_f16(low, high);
}

// Sums rounded to T, as the left operand of the next product.
template <int Cols, class T = operand_t, bool Finite = false>
__device__ inline void round_to_operand(WgmmaOperand<Cols, T>& operand,
                                        const WgmmaSums<Cols>& sums) {
#pragma unroll
    for (int i = 0; i < Cols / kWgmmaDepth<T> * 4; ++i) {
        operand[i / 4][i % 4] = round_pair<T, Finite>(sums[2 * i], sums[2 * i + 1]);
    }
}

// The same in other registers: a running product's operands must not even be read.
template <int Cols, class T = operand_t>
__device__ inline void copy_operand(WgmmaOperand<Cols, T>& copy,
                                    const WgmmaOperand<Cols, T>& operand) {
#pragma unroll
    for (int i = 0; i < Cols / kWgmmaDepth<T> * 4; ++i) {
        copy[i / 4][i % 4] = operand[i / 4][i % 4];
        ptx::hold(copy[i / 4][i % 4]);
    }
}

// Undoes round_to_operand, except for the rounding.
template <int Cols, class T = operand_t>
__device__ inline void widen_operand(WgmmaSums<Cols>& sums, const WgmmaOperand<Cols, T>& operand) {
#pragma unroll
    for (int i = 0; i < Cols / kWgmmaDepth<T> * 4; ++i) {
        const unsigned int pair = operand[i / 4][i % 4];
        sums[2 * i] = to_acc(T{static_cast<unsigned short>(pair)});
        sums[2 * i + 1] = to_acc(T{static_cast<unsigned short>(pair >> 16)});
    }
}

// Writes a warp's 16 rows of a tile, from first_row and first_col on, in the layout of TMA and
// wgmma.
template <int Cols, class Tile>
__device__ inline void write_rows(Tile& tile,
                                  const WgmmaOperand<Cols, typename Tile::Element>& values,
                                  int first_row, int first_col = 0) {
    using Element = typename Tile::Element;
    static_assert(sizeof(Element) == 2, "stmatrix stores 16-bit elements");
    unsigned int lane = threadIdx.x % 32;
    ptx::hold(lane);  // or each address would stay in a register from tile to tile
    if constexpr (Tile::kStepsByXor) {
        // Later chunks of a lane are an even number of chunks after its first. So only bits of its
        // address flip, and the swizzle is not recomputed.
        const unsigned int first =
            tile.at(first_row + lane % 16, lane / 16 * Tile::kChunkCols) - tile.at(0, 0);
#pragma unroll
        for (int i = 0; i < Cols / kWgmmaDepth<Element>; ++i) {
            const unsigned int col = first_col + i * kWgmmaDepth<Element>;
            Element* const panel = tile.at(0, col / Tile::kPanelCols * Tile::kPanelCols);
            ptx::stmatrix_x4(panel + (first ^ col % Tile::kPanelCols), values[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < Cols / kWgmmaDepth<Element>; ++i) {
            const int col = first_col + i * kWgmmaDepth<Element> + lane / 16 * Tile::kChunkCols;
            ptx::stmatrix_x4(tile.at(first_row + lane % 16, col), values[i]);
        }
    }
}

// Reads what write_rows wrote.
template <int Cols, class Tile>
__device__ inline void read_rows(WgmmaOperand<Cols>& values, Tile& tile, int first_row,
                                 int first_col = 0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Cols / kWgmmaK; ++i) {
        const int col = first_col + i * kWgmmaK + lane / 16 * kChunkCols;
        ptx::ldmatrix_x4(values[i], tile.at(first_row + lane % 16, col));
    }
}
