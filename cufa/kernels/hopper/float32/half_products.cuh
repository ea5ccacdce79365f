// Products of operands in halves. Each operand is a sum of a large and a small part; only the
// product of the small parts is omitted.
#pragma once

#include "hopper/float32/halves.cuh"

// The products that make up one, the smallest first, and the parts of its operands that each
// multiplies.
constexpr int kProducts = kHalves > 1 ? 3 : 1;
__device__ constexpr int left_part(int product) {
    return kHalves > 1 && product == 0;
}
__device__ constexpr int right_part(int product) {
    return kHalves > 1 && product == 1;
}

// Halves in shared memory as an operand whose depth runs along the columns, as in both operands of
// S = Q K^T.
template <class Tile>
struct DepthInColumns {
    static constexpr bool kShared = true, kTransposed = false;
    unsigned int first;

    __device__ explicit DepthInColumns(const Tile& tile) : first(depth_in_columns(tile)) {
        ptx::hold(first);  // or each step's sum would stay in a register from tile to tile
    }
    __device__ unsigned long long at(int part, int k) const {
        return description(first + rows_step(part * (Tile::kRows / kHalves)) +
                           columns_step<Tile>(k));
    }
};
// The same if the depth runs along the rows, as in V of O = P V, and in both operands of dQ = dS K
// with dS^T; for the columns from a panel on.
template <class Tile>
struct DepthInRows {
    static constexpr bool kShared = true, kTransposed = true;
    unsigned int first;

    __device__ explicit DepthInRows(const Tile& tile, int panel = 0)
        : first(panel_depth_in_rows(tile, panel)) {
        ptx::hold(first);
    }
    __device__ unsigned long long at(int part, int k) const {
        return description(first + rows_step(part * (Tile::kRows / kHalves) + k));
    }
};
// Halves in registers, as a left operand.
template <int Depth>
struct InRegisters {
    static constexpr bool kShared = false;
    const WgmmaOperand<Depth> (&halves)[kHalves];

    __device__ const unsigned int (&at(int part, int k) const)[4] {
        return halves[part][k / kWgmmaK];
    }
};

// Adds the product of a step of the depth, or starts the sums with it.
template <int Cols, bool Add, class A, class B>
__device__ inline void multiply_halves(WgmmaSums<Cols>& sums, const A& a, const B& b, int product,
                                       int k) {
    using Product = WgmmaOf<Cols, operand_t>;
    const auto& a_k = a.at(left_part(product), k);
    const auto b_k = b.at(right_part(product), k);
    if constexpr (A::kShared) {
        Product::template multiply<A::kTransposed, B::kTransposed, Add>(sums, a_k, b_k);
    } else {
        Product::template multiply<B::kTransposed, Add>(sums, a_k, b_k);
    }
}

// Issues sums = a b, or of that what is from Begin to End of the depth.
template <int End, int Cols, int Begin = 0, class A, class B>
__device__ inline void issue_halves(WgmmaSums<Cols>& sums, const A& a, const B& b) {
    hold_all(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
#pragma unroll
        for (int k = Begin; k < End; k += kWgmmaK) {
            if (product == 0 && k == Begin) {
                multiply_halves<Cols, false>(sums, a, b, product, k);
            } else {
                multiply_halves<Cols, true>(sums, a, b, product, k);
            }
        }
    }
    ptx::wgmma_commit();
}

// Float32 sums times `factor`, as halves; those beyond float16, if Finite, as its largest number.
template <int Depth, bool Finite = false>
__device__ inline void halve(WgmmaOperand<Depth> (&halves)[kHalves], const WgmmaSums<Depth>& sums,
                             float factor) {
    constexpr auto pack = Finite ? ptx::pack_finite_f16 : ptx::pack_f16;
#pragma unroll
    for (int i = 0; i < Depth / 2; i += 2) {
        const float low = sums[i] * factor, high = sums[i + 1] * factor;
        const HalfPair large(pack(low, high));
        halves[0][i / 8][i / 2 % 4] = large.pair;
        if (kHalves > 1) {
            halves[kHalves - 1][i / 8][i / 2 % 4] = pack(low - large.low(), high - large.high());
        }
    }
}
