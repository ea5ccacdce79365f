// Values in 8 bits, turned so that wgmma takes them: it reads such operands with their depth along
// rows of bytes alone, and the depth of O = P V are the keys.
#pragma once

#include "hopper/wgmma_tiles.cuh"

// Keys in a chunk of 16 bytes.
constexpr int kChunkKeys = kChunkBytes;

// A tile of V as wgmma reads it where nothing is swizzled: for each 16 keys a chunk of each value
// dim, eight chunks one after the other being a unit. Four bytes of a weight operand's row are one
// thread's, and of the scores the thread has columns 2t and 2t + 1 of each eight. So that weights
// need not change hands, byte b of a chunk is of key b / 4 * 2 + b % 4 / 2 * 8 + b % 2.
template <int Keys, int Dims>
struct ValueTile {
    static constexpr int kUnitRows = 8;
    static_assert(Dims % kUnitRows == 0 && Keys % kWgmmaK == 0, "a tile is made of whole units");
    static constexpr int kDims = Dims;

    alignas(kChunkBytes) scalar_t data[Keys / kChunkKeys][Dims][kChunkKeys];
};

// Issues o += p v, of the first Dims of the tile's.
template <int Keys, int Dims, int TileDims>
__device__ inline void issue_product_pv(WgmmaSums<Dims>& o, const WgmmaOperand<Keys>& p,
                                        const ValueTile<Keys, TileDims>& v) {
    using Product = WgmmaOf<Dims, scalar_t>;
    constexpr unsigned long long kUnitStride =
        ValueTile<Keys, TileDims>::kUnitRows * kChunkBytes / kOperandUnit;
    // Next to each other in the depth are chunks of the same dim.
    const unsigned int v0 = operand_at(v.data, TileDims * kChunkBytes);
    hold_all(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < Keys; key += kWgmmaK) {
        const unsigned int step = key / kChunkKeys * TileDims * kChunkBytes / kOperandUnit;
        Product::template multiply<false, true>(o, p[key / kWgmmaK], kUnitStride << 32 | v0 + step);
    }
    ptx::wgmma_commit();
}

// The other operand: weights, rounded, in the order of a chunk's keys.
template <int Keys>
__device__ inline void round_to_weights(WgmmaOperand<Keys>& p, const WgmmaSums<Keys>& s) {
#pragma unroll
    for (int i = 0; i < Keys / kWgmmaK * 4; ++i) {
        // Words 0 and 1 are rows g and g + 8 of the first 16 keys, 2 and 3 of the others.
        const float* const eights = s + i / 2 * 8 + i % 2 * 2;
        p[i / 4][i % 4] = ptx::pack_e4m3(eights[0], eights[1], eights[4], eights[5]);
    }
}

// Of four elements those that are NaN: their highest bits.
__device__ inline unsigned int nan_bits(unsigned int four) {
    return (four & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u;
}

// A chunk as words, and what makes NaN in it zero.
using ChunkWords = Pack<unsigned int, kChunkBytes / 4>;
__device__ inline void clear_nan(ChunkWords& words) {
#pragma unroll
    for (int i = 0; i < kChunkBytes / 4; ++i) words[i] &= ~((nan_bits(words[i]) >> 7) * 0xffu);
}

// Looks for NaN. One more in its place turns the sign of what has all other bits set; what then is
// carried to the next element's place does not matter.
class NanSearch {
  public:
    __device__ void look_at(unsigned int four) { turned |= four + 0x01010101u ^ four; }
    __device__ bool found() const { return (turned & 0x80808080u) != 0; }

  private:
    unsigned int turned = 0;
};

// How one of Warps goes through its part of a tile of values to turn it: in steps of 16 keys and 32
// dims, AtOnce of them together. ldmatrix, for which two dims are an element, gives a lane two keys
// next to each other of two dims, and of the keys 8 later: as two words of two chunks. stmatrix
// then puts chunks together.
template <int Warps, int AtOnce, int Keys, int Dims>
class Turner {
  public:
    __device__ explicit Turner(unsigned int thread) : warp(thread / 32), lane(thread % 32) {}

    // Turns this warp's part. If Search, NaN, of which 0 times is not 0, becomes zero; returns
    // whether there was any.
    template <bool Search, class Rows>
    __device__ bool turn(ValueTile<Keys, Dims>& to, Rows& from) const {
        static_assert(Rows::kPanelCols == kRoundDims || Rows::kPanels == 1,
                      "a round is what one panel has");
        const unsigned int row = lane % 16;
        NanSearch nan;
        if constexpr (kPanels == 1) {
            // Unrolled, so that places in memory differ by constants.
            const scalar_t* const rows = from.data[0][warp * kChunkKeys + row];
#pragma unroll
            for (unsigned int first = 0; first < kRounds; first += Warps) {
                if (first + Warps > kRounds && first + warp >= kRounds) break;
                turn_round<Search>(to, rows + first * kChunkKeys * kPanelRowBytes, first + warp,
                                   nan);
            }
        } else {
#pragma unroll 1  // registers are what such a warp lacks
            for (unsigned int round = warp; round < kRounds; round += Warps) {
                turn_round<Search>(
                    to, from.data[panel_of(round)][keys_of(round) * kChunkKeys + row], round, nan);
            }
        }
        if (!Search) return false;
        const bool found = __any_sync(0xffffffffu, nan.found());
        __syncwarp();  // a vote says nothing of what was written
        if (__builtin_expect(found, false)) clear_nan(to);
        return found;
    }

  private:
    static constexpr unsigned int kStepDims = 2 * kChunkBytes;
    static_assert(Dims % kStepDims == 0, "a tile is made of whole steps");
    // A round is a panel's part of 16 keys.
    static constexpr unsigned int kRoundDims = min_of(Dims, kPanelCols);
    static constexpr unsigned int kSteps = kRoundDims / kStepDims;
    static constexpr unsigned int kPanels = ceil_div(Dims, kRoundDims);
    static constexpr unsigned int kRounds = Keys / kChunkKeys * kPanels;
    // Which bytes of two words are those of the even dim, and of the odd one.
    static constexpr unsigned int kEvenBytes = 0x6420, kOddBytes = 0x7531;

    // Of the rows of a round, this lane says the place of `row`.
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

    // Of the dims of a step, the one whose chunk a lane says the place of. Of the chunks of even
    // dims and of odd ones, half change places, so that the eight that are stored at once lie in
    // different banks.
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
