// Which scores of a tile are seen, as one bit each. A warp writes the bits, and a warpgroup of the
// Hopper forwards reads those of its scores. So what a mask or a mask_mod shows of a tile is found
// once for all heads, if it is the same for them, and costs two instructions per score where a tile
// is cut.
#pragma once

#include "hopper/wgmma_products.cuh"
#include "scores/mask_sixteens.cuh"
#include "scores/mask_tiles.cuh"
#include "scores/row_bits.cuh"

// Writes a tile's bits by testing each score, one key per lane. Inside: all rows are in the
// sequence, and all keys are in the range of each row.
template <int Rows, int Keys, bool Inside>
__device__ inline void ask_for_bits(unsigned int* bits, const ScoreRules& rules, int first_row,
                                    int first_key) {
    constexpr int kWords = Keys / kWordKeys;
    constexpr int kAtOnce = 8;  // rows whose array elements are loaded together
    const int lane = threadIdx.x % 32, key = first_key + lane;
    for (int first = 0; first < Rows; first += kAtOnce) {
        bool shown[kAtOnce][kWords];
#pragma unroll
        for (int word = 0; word < kWords; ++word)
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                shown[i][word] =
                    rules.template shows<Inside>(first_row + first + i, key + kWordKeys * word);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            // Rows past the end, which nobody asks for, count as the last row.
            const int row = min(first_row + first + i, rules.mask.seqlen_q - 1);
            RowBits<kWords> words;
#pragma unroll
            for (int word = 0; word < kWords; ++word) {
                const bool in_range = Inside || rules.mask.in_range(row, key + kWordKeys * word);
                words.of[word] = __ballot_sync(0xffffffffu, shown[i][word] && in_range);
            }
            if (lane == 0) words.store(bits + (first + i) * kWords);
        }
    }
}

// The same from a mask that is stored in sixteens; two lanes make a word.
template <int Rows, int Keys>
__device__ inline void read_bits(unsigned int* bits, const ScoreRules& rules, int first_row,
                                 int first_key) {
    constexpr int kOfRow = Keys / 16, kRounds = Rows * kOfRow / 32;
    constexpr int kAtOnce = min_of(4, kRounds & -kRounds);  // a lane's loads in flight
    static_assert(Rows * kOfRow % 32 == 0, "all lanes have as many");
    for (int first = 0; first < kRounds; first += kAtOnce) {
        Sixteen keys[kAtOnce];
        const auto place = [&](int i) { return (first + i) * 32 + int(threadIdx.x % 32); };
        const auto row_of = [&](int i) {
            return min(first_row + place(i) / kOfRow, rules.mask.seqlen_q - 1);
        };
        const auto key_of = [&](int i) { return first_key + place(i) % kOfRow * 16; };
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) keys[i] = load_sixteen(rules, row_of(i), key_of(i));
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const unsigned int own = seen_of(keys[i], rules.mask, row_of(i), key_of(i));
            const unsigned int next = __shfl_down_sync(0xffffffffu, own, 1);
            if (threadIdx.x % 2 == 0) bits[place(i) / 2] = own | next << 16;
        }
    }
}

// Writes the bits of a tile, by one warp. Returns what is seen of the tile.
template <int Rows, int Keys, bool Inside>
__device__ inline SeenPart write_seen_bits(unsigned int* bits, const ScoreRules& rules,
                                           int first_row, int first_key) {
    if (kMaskAlone && lies_in_sixteens(rules, first_key, Keys)) {
        if constexpr (kMaskAlone) read_bits<Rows, Keys>(bits, rules, first_row, first_key);
    } else {
        ask_for_bits<Rows, Keys, Inside>(bits, rules, first_row, first_key);
    }
    __syncwarp();
    // What is seen of the tile is read from the words, so nothing is summed per score.
    constexpr int kWords = Keys / kWordKeys;
    FoundKeys found;
#pragma unroll
    for (int row = threadIdx.x % 32; row < Rows; row += 32) {
        RowBits<kWords> words;
        words.load(bits + row * kWords);
#pragma unroll
        for (const unsigned int word : words.of) found.add(word != 0, word == ~0u);
    }
    found.join_lanes();
    return found.part();
}

// The bits of a thread's Count scores, which are in two rows, 8 apart; or one row's for both.
template <int Count, bool Alike>
struct SeenBits {
    static constexpr int kWords = ceil_div(2 * Count, kWordKeys);  // of a row
    static constexpr int kRows = Alike ? 1 : 2;
    RowBits<kWords> rows[kRows];

    // `row` has the words of the first row.
    __device__ void load(const unsigned int* row) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) rows[i].load(row + 8 * i * kWords);
    }

    // Sets scores that are not seen to `masked`.
    __device__ void hide(float (&s)[Count], float masked) const {
        const int first_key = col_of_thread();
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const int key = i / 4 * 8 + i % 2;
            const unsigned int of_thread = rows[i / 2 % kRows].of[key / kWordKeys] >> first_key;
            if (!(of_thread >> key % kWordKeys & 1)) s[i] = masked;
        }
    }
};
