// The scores of a tile that dropout keeps, in the registers of the threads that have these scores.
#pragma once

#include "call/memory.cuh"
#include "ptx/ptx_common.cuh"
#include "scores/dropout.cuh"

// One bit for each of a thread's Count scores in a warp's 16 rows, in the layout of mma and wgmma:
// rows g and g + 8, columns 2t, 2t + 1 and those 8, 16, ... further. Rows are queries or, with
// RowsAreKeys, keys. Two neighbouring rows share their random words and belong to lanes four apart:
// each lane draws half of the words, and the two exchange them.
template <int Count, bool RowsAreKeys>
class KeptScores {
  public:
    // `row` and `col` belong to the thread's first score.
    __device__ void draw(const Features& features, unsigned int matrix, int row, int col) {
        const int parity = row % 2;
        const int drawn_row = RowsAreKeys ? row : row + 8 * parity;
        const int drawn_col = RowsAreKeys ? col + 8 * parity : col;
        if constexpr (kOffGrid) first_block = col / 8 % 2;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            const int eights = min(kWordEights, kEights - word * kWordEights);
            // Flags enter at bits 15 and 31 and move down as others follow.
            unsigned int drawn = 0;
#pragma unroll
            for (int eight = 0; eight < eights; ++eight) {
                const int at = drawn_col + (word * kWordEights + eight) * 16;
                const KeptEight kept = RowsAreKeys ? kept_of_eight(features, matrix, at, drawn_row)
                                                   : kept_of_eight(features, matrix, drawn_row, at);
#pragma unroll
                for (int i = 0; i < 4; ++i) drawn = drawn >> 1 | (kept.pair[i] & KeptEight::kFlags);
            }
            drawn >>= 4 * (kWordEights - eights);
            const unsigned int others = __shfl_xor_sync(0xffffffffu, drawn, 4);
            const unsigned int own = drawn >> kRowBit * parity & kOfRow;
            bits[word] = own << kRowBit * parity | (others >> kRowBit * parity & kOfRow)
                                                       << kRowBit * (1 - parity);
            if constexpr (RowsAreKeys) swap_blocks_and_neighbours(bits[word]);
        }
    }

    __device__ bool has(int i) const {
        const int pair = pair_of(i);
        return bits[pair / 16] >> (pair % 16 + 16 * (i % 2)) & 1;
    }

    // Zeroes the other scores in an operand, in which a word is two neighbours of a row.
    template <int Steps>
    __device__ void drop(unsigned int (&p)[Steps][4]) const {
#pragma unroll
        for (int i = 0; i < Steps * 4; ++i) {
            const int pair = pair_of(2 * i);
            p[i / 4][i % 4] &= ptx::spread_signs(bits[pair / 16] << (15 - pair % 16));
        }
    }

  private:
    // Whether columns may begin off a multiple of 16. From a multiple on, a word serves two
    // adjacent blocks of eight columns.
    static constexpr bool kOffGrid = !RowsAreKeys && Count % 8 != 0;
    static constexpr int kWordEights = 4;  // groups of eight whose bits fill a word
    static constexpr int kEights = ceil_div(Count + 4 * kOffGrid, 8);
    static constexpr int kWords = ceil_div(kEights, kWordEights);
    // The distance of the two rows' bits in what a lane drew, and the bits of the even row.
    static constexpr int kRowBit = RowsAreKeys ? 16 : 2;
    static constexpr unsigned int kOfRow = RowsAreKeys ? 0x0000ffff : 0x33333333;
    unsigned int bits[kWords];
    int first_block;  // with kOffGrid: whether the first columns are the second block of a word

    // The number of the pair of bits, 16 apart, to which the bit of score i belongs.
    __device__ int pair_of(int i) const {
        const int block = kOffGrid ? i / 4 + first_block : i / 4, half = i / 2 % 2;
        return block / 2 * 4 + (RowsAreKeys ? block % 2 * 2 + half : half * 2 + block % 2);
    }
    // Of each four bits, two belong to the first of two neighbours and two to the second. The
    // halves of the word, which were for two blocks of columns, become those of the neighbours.
    __device__ static void swap_blocks_and_neighbours(unsigned int& word) {
        const unsigned int differ = (word >> 14 ^ word) & 0x0000cccc;
        word ^= differ ^ differ << 14;
    }
};
