// Tiles of 16-bit elements in shared memory as the copy engine writes them and wgmma reads them, and the
// products of a warpgroup.
#pragma once

#include "config.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "ptx_sm90a.cuh"

constexpr int kWarpgroup = 128;
// The shape of one wgmma: 64 rows, and a depth of 16.
constexpr int kWgmmaM = 64, kWgmmaK = 16;
// A tile lies in panels of 64 columns, 128 bytes a row. Eight rows of a panel are one swizzled unit:
// the 16-byte chunk c of row r lies at c ^ r.
constexpr int kPanelCols = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kSwizzleRows = 8;
constexpr int kSwizzleBytes = kSwizzleRows * kPanelRowBytes;
constexpr int kChunkCols = 8;

// What a thread has of a 64 x Cols accumulator: columns 8i + 2t and 8i + 2t + 1 of row g in [4i] and
// [4i + 1], of row g + 8 in [4i + 2] and [4i + 3], where g = lane / 4 and t = lane % 4.
template <int Cols>
using WgmmaSums = float[Cols / 2];
// The same, rounded and in pairs: the left operand of the next product, four words for each depth of 16.
template <int Cols>
using WgmmaOperand = unsigned int[Cols / kWgmmaK][4];

// A Rows x Cols tile; columns are padded to whole panels.
template <int Rows, int Cols>
struct PanelTile {
    static_assert(Rows % kSwizzleRows == 0, "a panel is made of eights of rows");
    static constexpr int kRows = Rows;
    static constexpr int kPanels = ceil_div(Cols, kPanelCols);
    static constexpr int kBytes = kPanels * Rows * kPanelRowBytes;

    alignas(kSwizzleBytes) scalar_t data[kPanels][Rows][kPanelCols];

    __device__ scalar_t* at(int row, int col) {
        const int chunk = col % kPanelCols / kChunkCols ^ row % kSwizzleRows;
        return &data[col / kPanelCols][row][chunk * kChunkCols + col % kChunkCols];
    }
};

// Starts the copy of one head's rows from first_row on, and of all columns.
template <class Tile>
__device__ inline void copy_tile(Tile& tile, const TensorMap& map, ptx::Barrier& barrier, int batch,
                                 int head, int first_row) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
        ptx::copy_box(tile.data[panel], map, barrier, panel * kPanelCols, first_row, head, batch);
    }
}

// Starts the copy of a tile to one head's rows from first_row on, and to columns from first_col on.
template <class Tile>
__device__ inline void store_tile(const TensorMap& map, const Tile& tile, int batch, int head,
                                  int first_row, int first_col) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
        ptx::store_box(map, tile.data[panel], first_col + panel * kPanelCols, first_row, head,
                       batch);
    }
    ptx::commit_stores();
}

// wgmma's description of an operand in shared memory: its address and two strides in bytes, between
// panels and between eights of rows, each in units of 16.
__device__ inline unsigned long long operand_at(const void* address, int panel_stride) {
    constexpr unsigned long long kSwizzle128 = 1ull << 62;
    return kSwizzle128 | static_cast<unsigned long long>(kSwizzleBytes >> 4) << 32 |
           static_cast<unsigned long long>(panel_stride >> 4) << 16 |
           (ptx::shared_address(address) & 0x3ffff) >> 4;
}
// What moves a description by so many bytes.
__device__ constexpr unsigned long long operand_step(int bytes) {
    return bytes >> 4;
}

// The depth runs along the columns, as in both operands of S = Q K^T. The second description is of the
// 16 columns from `col` on.
template <class Tile>
__device__ inline unsigned long long depth_in_columns(const Tile& tile) {
    return operand_at(tile.data, 0);
}
template <class Tile>
__device__ constexpr unsigned long long columns_step(int col) {
    return operand_step(col / kPanelCols * Tile::kRows * kPanelRowBytes +
                        col % kPanelCols * static_cast<int>(sizeof(scalar_t)));
}
// The depth runs along the rows, as in the V of O = P V.
template <class Tile>
__device__ inline unsigned long long depth_in_rows(const Tile& tile) {
    return operand_at(tile.data, Tile::kRows * kPanelRowBytes);
}
__device__ constexpr unsigned long long rows_step(int row) {
    return operand_step(row * kPanelRowBytes);
}

template <int Count>
__device__ inline void hold_all(float (&values)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) ptx::hold(values[i]);
}

// Issues s = a b^T over Depth columns, as in S = Q K^T. It is done when the group that it becomes is.
template <int Depth, int Cols, class A, class B>
__device__ inline void issue_product_nt(WgmmaSums<Cols>& s, const A& a, const B& b) {
    using Product = ptx::Wgmma<Cols, is_bfloat16<scalar_t>>;
    const unsigned long long a0 = depth_in_columns(a), b0 = depth_in_columns(b);
    hold_all(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Depth; k += kWgmmaK) {
        const unsigned long long a_k = a0 + columns_step<A>(k), b_k = b0 + columns_step<B>(k);
        if (k == 0) {
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
    using Product = ptx::Wgmma<Cols, is_bfloat16<scalar_t>>;
    const unsigned long long v0 = depth_in_rows(v);
    hold_all(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Depth; k += kWgmmaK) {
        Product::template multiply<true, true>(o, p[k / kWgmmaK], v0 + rows_step(k));
    }
    ptx::wgmma_commit();
}

// Waits for all groups but the last Pending, the results of which are in `values`.
template <int Pending, int Count>
__device__ inline void wait_product(float (&values)[Count]) {
    ptx::wgmma_wait<Pending>();
    hold_all(values);
}

// Two sums rounded to scalar_t, `low` first in memory.
__device__ inline unsigned int round_pair(float low, float high) {
    return is_bfloat16<scalar_t> ? ptx::pack_bf16(low, high) : ptx::pack_f16(low, high);
}

// Sums, rounded, as the left operand of the next product.
template <int Cols>
__device__ inline void round_to_operand(WgmmaOperand<Cols>& operand, const WgmmaSums<Cols>& sums) {
#pragma unroll
    for (int i = 0; i < Cols / kWgmmaK * 4; ++i) {
        operand[i / 4][i % 4] = round_pair(sums[2 * i], sums[2 * i + 1]);
    }
}

// Writes a warp's 16 rows of a tile, from first_row on, where the copy engine and wgmma look for them.
template <int Cols, class Tile>
__device__ inline void write_rows(Tile& tile, const WgmmaOperand<Cols>& values, int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Cols / kWgmmaK; ++i) {
        const int col = i * kWgmmaK + lane / 16 * kChunkCols;
        ptx::stmatrix_x4(tile.at(first_row + lane % 16, col), values[i]);
    }
}

// Whether this thread, of all that look together, finds NaN or infinity in a tile.
template <int Threads, class Tile>
__device__ inline bool finds_nonfinite(const Tile& tile) {
    using Pairs = Pack<unsigned int, 4>;
    const Pairs* const chunks = reinterpret_cast<const Pairs*>(tile.data);
    unsigned int found = 0;
#pragma unroll 4
    for (int i = threadIdx.x % Threads; i < Tile::kBytes / int(sizeof(Pairs)); i += Threads) {
        const Pairs pairs = chunks[i];
#pragma unroll
        for (int e = 0; e < 4; ++e) found |= nonfinite_of_pair<scalar_t>(pairs[e]);
    }
    return found != 0;
}

// Makes NaN and infinity in a tile zero. Threads may do it together, or several times over.
template <int Threads, class Tile>
__device__ inline void clear_nonfinite(Tile& tile) {
    scalar_t* const values = &tile.data[0][0][0];
#pragma unroll 1
    for (int i = threadIdx.x % Threads; i < Tile::kBytes / int(sizeof(scalar_t)); i += Threads) {
        if (!is_finite(values[i])) values[i] = scalar_t{};
    }
}
