// 8-bit values, transposed for wgmma: it reads 8-bit operands only with the depth along rows, and
// the depth of O = P V is the keys.
#pragma once

#include "hopper/wgmma_products.cuh"

// Keys in a chunk of 16 bytes.
constexpr int kChunkKeys = kChunkBytes;

// A tile of V as wgmma reads it without swizzle. For each 16 keys and each dim it has a chunk;
// eight consecutive chunks are a unit. A thread needs four adjacent bytes of a row of weights, but
// its scores are columns 2t and 2t + 1 of each eight. So that weights need not move between
// threads, byte b of a chunk is key b / 4 * 2 + b % 4 / 2 * 8 + b % 2.
template <int Keys, int Dims>
struct ValueTile {
    static_assert(Dims % kSwizzleRows == 0 && Keys % kWgmmaK == 0, "a tile is made of whole units");
    static constexpr int kDims = Dims;

    alignas(kChunkBytes) scalar_t data[Keys / kChunkKeys][Dims][kChunkKeys];
};

// Issues o += p v for the first Dims of the tile's dims.
template <int Keys, int Dims, int TileDims>
__device__ inline void issue_product_pv(WgmmaSums<Dims>& o, const WgmmaOperand<Keys>& p,
                                        const ValueTile<Keys, TileDims>& v) {
    using Product = WgmmaOf<Dims, scalar_t>;
    // Chunks that are adjacent in the depth have the same dim.
    const unsigned int v0 = operand_at(v.data, TileDims * kChunkBytes);
    hold_all(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < Keys; key += kWgmmaK) {
        const unsigned int step = key / kChunkKeys * TileDims * kChunkBytes / kOperandUnit;
        Product::template multiply<false, true>(o, p[key / kWgmmaK],
                                                description_of<kNoSwizzle, kChunkBytes>(v0 + step));
    }
    ptx::wgmma_commit();
}

// The other operand: weights, rounded, in the key order of a chunk.
template <int Keys>
__device__ inline void round_to_weights(WgmmaOperand<Keys>& p, const WgmmaSums<Keys>& s) {
#pragma unroll
    for (int i = 0; i < Keys / kWgmmaK * 4; ++i) {
        // Words 0 and 1 are rows g and g + 8 of the first 16 keys, words 2 and 3 of the next 16.
        const float* const eights = s + i / 2 * 8 + i % 2 * 2;
        p[i / 4][i % 4] = ptx::pack_e4m3(eights[0], eights[1], eights[4], eights[5]);
    }
}

// Sets the highest bit of each of four elements that is NaN.
__device__ inline unsigned int nan_bits(unsigned int four) {
    return (four & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u;
}

// A chunk as words, and how NaN in it becomes zero.
using ChunkWords = Pack<unsigned int, kChunkBytes / 4>;
__device__ inline void clear_nan(ChunkWords& words) {
#pragma unroll
    for (int i = 0; i < kChunkBytes / 4; ++i) words[i] &= ~((nan_bits(words[i]) >> 7) * 0xffu);
}

// Searches for NaN. In NaN all bits but the sign are set, so adding one flips the sign bit. The
// carry into the next element does not matter.
class NanSearch {
  public:
    __device__ void look_at(unsigned int four) { turned |= four + 0x01010101u ^ four; }
    __device__ bool found() const { return (turned & 0x80808080u) != 0; }

  private:
    unsigned int turned = 0;
};

// How one of Warps transposes its part of a tile of values: in steps of 16 keys and 32 dims, AtOnce
// of them together. ldmatrix treats two dims as one element. It gives a lane two adjacent keys of
// two dims, and the same 8 keys later: two words for each of two chunks. stmatrix then assembles
// the chunks.
template <int Warps, int AtOnce, int Keys, int Dims>
class Turner {
  public:
    __device__ explicit Turner(unsigned int thread) : warp(thread / 32), lane(thread % 32) {}

    // Transposes this warp's part. If Search, replaces NaN by zero, because 0 times NaN is not 0,
    // and returns whether there was any.
    template <bool Search, class Rows>
    __device__ bool turn(ValueTile<Keys, Dims>& to, Rows& from) const {
        static_assert(Rows::kPanelCols == kRoundDims || Rows::kPanels == 1,
                      "a round is what one panel has");
        const unsigned int row = lane % 16;
        NanSearch nan;
        if constexpr (kPanels == 1) {
            // Unrolled, so that addresses differ by constants.
            const scalar_t* const rows = from.data[0][warp * kChunkKeys + row];
#pragma unroll
            for (unsigned int first = 0; first < kRounds; first += Warps) {
                if (first + Warps > kRounds && first + warp >= kRounds) break;
                turn_round<Search>(to, rows + first * kChunkKeys * kPanelRowBytes, first + warp,
                                   nan);
            }
        } else {
#pragma unroll 1  // such a warp is short of registers
            for (unsigned int round = warp; round < kRounds; round += Warps) {
                turn_round<Search>(
                    to, from.data[panel_of(round)][keys_of(round) * kChunkKeys + row], round, nan);
            }
        }
        if (!Search) return false;
        const bool found = __any_sync(0xffffffffu, nan.found());
        __syncwarp();  // a vote does not order writes
        if (__builtin_expect(found, false)) clear_nan(to);
        return found;
    }

  private:
    static constexpr unsigned int kStepDims = 2 * kChunkBytes;
    static_assert(Dims % kStepDims == 0, "a tile is made of whole steps");
    // A round is 16 keys of one panel.
    static constexpr unsigned int kRoundDims = min_of(Dims, kPanelCols);
    static constexpr unsigned int kSteps = kRoundDims / kStepDims;
    static constexpr unsigned int kPanels = ceil_div(Dims, kRoundDims);
    static constexpr unsigned int kRounds = Keys / kChunkKeys * kPanels;
    // Selects the bytes of the even dim, or of the odd one, from two words.
    static constexpr unsigned int kEvenBytes = 0x6420, kOddBytes = 0x7531;

    // `row` is the row of the round whose address this lane gives to ldmatrix.
    template <bool Search>
    __device__ void turn_round(ValueTile<Keys, Dims>& to, const scalar_t* row, unsigned int round,
                               NanSearch& nan) const {
        const unsigned int chunk = lane / 16 ^ lane % kSwizzleRows, dim = dim_of(lane);
        const unsigned int even = swaps(lane) ? kOddBytes : kEvenBytes;
        const unsigned int odd = swaps(lane) ? kEvenBytes : kOddBytes;
#pragma unroll
        for (unsigned int first = 0; first < kSteps; first += AtOnce) {
            unsigned int pairs[AtOnce][4];
#pragma unroll
            for (unsigned int i = 0; i < AtOnce; ++i) {
                const unsigned int step = first + i;
                if (!exists(round, step)) continue;
                ptx::ldmatrix_x4_trans(pairs[i], row + (chunk * kChunkBytes ^ step * kStepDims));
            }
#pragma unroll
            for (unsigned int i = 0; i < AtOnce; ++i) {
                const unsigned int step = first + i;
                if (!exists(round, step)) continue;
                unsigned int words[4];
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const unsigned int* const two = &pairs[i][w / 2 * 2];
                    words[w] = __byte_perm(two[0], two[1], w % 2 == 0 ? even : odd);
                    if (Search) nan.look_at(words[w]);
                }
                ptx::stmatrix_x4(to.data[keys_of(round)][first_dim(round, step) + dim], words);
            }
        }
    }

    // The dim of a step whose chunk's address this lane gives. Half of the chunks of even and odd
    // dims change places, so that the eight chunks stored together lie in different banks.
    __device__ static unsigned int dim_of(unsigned int lane) {
        const unsigned int matrix = lane / 8, row = lane % 8;
        return matrix / 2 * kChunkBytes + 2 * row + (row / 4 ^ matrix % 2);
    }
    __device__ static bool swaps(unsigned int lane) { return lane >= 16; }

    __device__ static unsigned int keys_of(unsigned int round) { return round / kPanels; }
    __device__ static unsigned int panel_of(unsigned int round) { return round % kPanels; }
    __device__ static unsigned int first_dim(unsigned int round, unsigned int step) {
        return panel_of(round) * kRoundDims + step * kStepDims;
    }
    __device__ static bool exists(unsigned int round, unsigned int step) {
        return step < kSteps && (Dims % kRoundDims == 0 || first_dim(round, step) < Dims);
    }

    __device__ void clear_nan(ValueTile<Keys, Dims>& to) const {
#pragma unroll 1
        for (unsigned int round = warp; round < kRounds; round += Warps)
#pragma unroll 1
            for (unsigned int step = 0; step < kSteps; ++step) {
                if (!exists(round, step)) continue;
                const unsigned int dim = first_dim(round, step) + dim_of(lane);
                auto& chunk = to.data[keys_of(round)][dim];
                ::clear_nan(*reinterpret_cast<ChunkWords*>(chunk));
            }
    }

    unsigned int warp, lane;
};
