// Values in 8 bits, turned so that wgmma takes them: it reads such operands with their depth along
// rows of bytes alone, and the depth of O = P V are the keys.
#pragma once

#include "shared.cuh"
#include "wgmma_tiles.cuh"

// Keys in a chunk of 16 bytes.
constexpr int kChunkKeys = kChunkBytes;

// A tile of V as wgmma reads it where nothing is swizzled: for each 16 keys a chunk of each value
// dim, eight chunks one after the other being a unit. Within a chunk the keys are in the order of
// `key_at`.
template <int Keys, int Dims>
struct ValueTile {
    static constexpr int kUnitRows = 8;
    static_assert(Dims % kUnitRows == 0 && Keys % kWgmmaK == 0, "a tile is made of whole units");
    static constexpr int kBytes = Keys * Dims;

    alignas(kChunkBytes) scalar_t data[Keys / kChunkKeys][Dims][kChunkKeys];
};

// Which of 16 keys a byte of a chunk is of. Four bytes of a weight operand's row are one thread's,
// and of the scores the thread has columns 2t and 2t + 1 of each eight: with the keys in this order
// the weights need not change hands.
__device__ constexpr int key_at(int byte) {
    return byte / 4 * 2 + byte % 4 / 2 * 8 + byte % 2;
}

// Issues o += p v.
template <int Keys, int Dims>
__device__ inline void issue_product_pv(WgmmaSums<Dims>& o, const WgmmaOperand<Keys>& p,
                                        const ValueTile<Keys, Dims>& v) {
    using Product = WgmmaOf<Dims, scalar_t>;
    constexpr unsigned long long kUnitStride =
        ValueTile<Keys, Dims>::kUnitRows * kChunkBytes / kOperandUnit;
    // Next to each other in the depth are chunks of the same dim.
    const unsigned int v0 = operand_at(v.data, Dims * kChunkBytes);
    hold_all(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < Keys; key += kWgmmaK) {
        const unsigned int step = key / kChunkKeys * Dims * kChunkBytes / kOperandUnit;
        Product::template multiply<false, true>(o, p[key / kWgmmaK], kUnitStride << 32 | v0 + step);
    }
    ptx::wgmma_commit();
}

// The other operand: weights, rounded, in the order of `key_at`.
template <int Keys>
__device__ inline void round_to_weights(WgmmaOperand<Keys>& p, const WgmmaSums<Keys>& s) {
#pragma unroll
    for (int i = 0; i < Keys / kWgmmaK * 4; ++i) {
        // Words 0 and 1 are rows g and g + 8 of the first 16 keys, 2 and 3 of the others.
        const float* const eights = s + i / 2 * 8 + i % 2 * 2;
        p[i / 4][i % 4] = ptx::pack_e4m3(eights[0], eights[1], eights[4], eights[5]);
    }
}

// NaN in one of four elements sets that one's highest bit.
__device__ inline unsigned int nan_bits(unsigned int four) {
    return (four & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u;
}

// Turns keys [first_key, first_key + Keys) of a head's values into a tile; zero from end_key on.
// NaN, of which 0 times is not 0, becomes zero too. Returns whether there was any. All Threads of a
// block take part.
template <int Threads, int Keys, int Dims>
__device__ inline bool turn(ValueTile<Keys, Dims>& to, Matrix<const scalar_t> from, int first_key,
                            int end_key) {
    // As wide as the caller's alignment allows, but no piece may straddle the last column.
    constexpr int kPiece = min_of(kAlignBytes, kValueDim & -kValueDim);
    using Piece = Pack<scalar_t, kPiece>;
    struct Rows {
        alignas(kChunkBytes) scalar_t data[Keys][Dims];
    };
    Rows& rows = shared_memory<Rows, Keys * Dims>();
    constexpr int kRowPieces = Dims / kPiece, kPieces = Keys * kRowPieces;
    constexpr int kOfThread = ceil_div(kPieces, Threads);
    Piece pieces[kOfThread] = {};
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
        const int place = threadIdx.x + i * Threads;
        const int key = place / kRowPieces, dim = place % kRowPieces * kPiece;
        if (place < kPieces && first_key + key < end_key && dim < kValueDim) {
            pieces[i] = *reinterpret_cast<const Piece*>(from.row(first_key + key) + dim);
        }
    }
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
        const int place = threadIdx.x + i * Threads;
        const int key = place / kRowPieces, dim = place % kRowPieces * kPiece;
        if (place < kPieces) *reinterpret_cast<Piece*>(&rows.data[key][dim]) = pieces[i];
    }
    __syncthreads();

    unsigned int found = 0;
    for (int i = threadIdx.x; i < Keys / kChunkKeys * Dims; i += Threads) {
        const int chunk = i / Dims, dim = i % Dims;
        Pack<unsigned int, kChunkBytes / 4> words = {};
#pragma unroll
        for (int byte = 0; byte < kChunkBytes; ++byte) {
            const unsigned int bits = rows.data[chunk * kChunkKeys + key_at(byte)][dim].bits;
            words[byte / 4] |= bits << byte % 4 * 8;
        }
#pragma unroll
        for (int word = 0; word < kChunkBytes / 4; ++word) {
            const unsigned int nan = nan_bits(words[word]);
            words[word] &= ~((nan >> 7) * 0xffu);
            found |= nan;
        }
        *reinterpret_cast<Pack<unsigned int, kChunkBytes / 4>*>(to.data[chunk][dim]) = words;
    }
    return __syncthreads_or(found != 0);
}
