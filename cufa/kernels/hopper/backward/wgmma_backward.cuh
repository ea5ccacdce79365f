// The parameters of the 16-bit Hopper backwards, and what they do to tiles: take out NaN, multiply,
// store.
#pragma once

#include "hopper/backward/wgmma_turns.cuh"
#include "hopper/bias_boxes.cuh"
#include "hopper/nonfinite_elements.cuh"

struct Params : BiasMap<> {
    TensorMap q, k, v, dout, dk, dv;
    BackwardParams call;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "the host passes a different struct");

// Takes NaN and infinity out of a tile of keys: 0 times it would reach queries that do not see the
// key. Infinity becomes the largest number, whose weights are mostly those of infinity. What
// `marked` has of the key becomes NaN, so that queries that see it get NaN from there: the values,
// if only dP is computed from them. `thread` is one of Threads that do this together, each for a
// part of a row.
template <int Threads, class KeyRows, class Marked>
__device__ inline void take_out_of_keys(KeyRows& k, Marked& marked, int thread) {
    constexpr int kParts = Threads / KeyRows::kRows;
    constexpr int kCols = KeyRows::kPanels * kPanelCols;
    const int row = thread % KeyRows::kRows, part = thread / KeyRows::kRows;
    NonfiniteSearch search;
#pragma unroll
    for (int col = part * kChunkCols; col < kCols; col += kParts * kChunkCols) {
        search.look_at(k.at(row, col));
    }
    if (!search.found()) return;
#pragma unroll 1
    for (int i = 0; i < kCols / kParts; ++i) {
        scalar_t& value =
            *k.at(row, (i / kChunkCols * kParts + part) * kChunkCols + i % kChunkCols);
        if (!is_finite(value)) value = nearest_finite(value);
    }
    *marked.at(row, part) = from_acc<scalar_t>(negative_infinity() * 0);
}

// The same for a tile of queries and dO, by all consumers, once no product reads it. For what rows
// of queries had, D is NaN already. No thread branches on its own here: the addresses and
// descriptors in the loop around this would no longer be uniform.
template <int Threads, class QueryRows, class OutRows>
__device__ inline void take_out_of_queries(QueryRows& q, OutRows& dout, int barrier) {
    const int thread = threadIdx.x - kWarpgroup;
    ptx::named_barrier_sync<Threads>(barrier);
    clear_nonfinite<Threads, true>(q, thread);
    clear_nonfinite<Threads>(dout, thread);
    ptx::proxy_fence();
    ptx::named_barrier_sync<Threads>(barrier);
}

// Issues s = a^T b for a panel of a's columns and Cols of b's columns, from b_col on. The depth
// runs along the rows of all Tiles tiles, as in dQ^T = K^T dS^T.
template <int Cols, int Tiles, class A, class B>
__device__ inline void issue_product_tn(WgmmaSums<Cols>& s, const A (&a)[Tiles], int a_panel,
                                        const B (&b)[Tiles], int b_col) {
    using Product = ptx::Wgmma<Cols, is_bfloat16<scalar_t>>;
    hold_all(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
        unsigned int a0 = panel_depth_in_rows(a[tile], a_panel);
        const unsigned int b0 = panel_depth_in_rows(b[tile], b_col / B::kPanelCols) +
                                columns_step<B>(b_col % B::kPanelCols);
        ptx::hold(a0);  // or each step's sum would stay in a register from tile to tile
#pragma unroll
        for (int k = 0; k < A::kRows; k += kWgmmaK) {
            const unsigned long long a_k = description(a0 + rows_step(k));
            const unsigned long long b_k =
                description<B::kRowBytes>(b0 + rows_step<B::kRowBytes>(k));
            if (tile == 0 && k == 0) {
                Product::template multiply<true, true, false>(s, a_k, b_k);
            } else {
                Product::template multiply<true, true, true>(s, a_k, b_k);
            }
        }
    }
    ptx::wgmma_commit();
}

// Rounds a warpgroup's gradients and writes them to a tile, for send_out.
template <int Dims, class Rows>
__device__ inline void write_rounded(Rows& rows, const WgmmaSums<Dims>& sums) {
    WgmmaOperand<Dims> rounded;
    round_to_operand<Dims>(rounded, sums);
    write_rows<Dims>(rows, rounded, row_of_warp());
}

// Stores a tile of gradients by Threads threads. It begins at key number `key` of the work's tile
// and at head dim first_col.
template <int TensorDims, int Threads, class Tile>
__device__ inline void send_out(const TensorMap& map, const Tensor& tensor, Tile& rows,
                                const BackwardParams& call, const KeyWork& work, int key,
                                int first_col) {
    const Sequence sequence = work.sequence(call);
    const int first_key = work.first_key + key, thread = threadIdx.x % Threads;
    const int count = kPacked ? end_of_keys(call, sequence) - first_key : Tile::kRows;
    if (count < Tile::kRows) {  // TMA would write beyond the sequence
        write_first_rows<TensorDims, Threads>(sequence.keys<scalar_t>(tensor, work.kv_head()), rows,
                                              count, first_key, first_col, thread);
    } else if (thread == 0) {
        store_tile(map, rows, work.map_batch(), work.kv_head(), sequence.first_k + first_key,
                   first_col);
    }
}
