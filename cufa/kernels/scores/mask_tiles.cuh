// What the caller's mask shows of a tile of scores: nothing, some or all.
#pragma once

#include "call/memory.cuh"
#include "scores/score_rules.cuh"

enum SeenPart : unsigned short { kNone, kSome, kAll };

// Whether a word of the mask, with one bit or byte per key, shows all of its keys.
template <class Word>
__device__ inline bool shows_all(Word word) {
    if constexpr (kMaskBits == 1) return word == Word(~Word(0));
    constexpr Word kLowest = Word(0x01010101), kHighest = Word(0x80808080);
    return Word((word - kLowest) & ~word & kHighest) == 0;  // no byte is 0
}

// A warp reads `bytes` of each row of a mask, in chunks of that type. It stops once it has found
// both seen and unseen keys, so a mask without structure is cheap to inspect.
template <class Word, int Words>
__device__ inline SeenPart part_of_chunks(Matrix<const unsigned char> mask, int rows, int bytes) {
    using Chunk = Pack<Word, Words>;
    constexpr int kAtOnce = 4;  // chunks that a lane loads together
    const int of_row = bytes / int(sizeof(Chunk)), chunks = rows * of_row;
    bool some = false, all = true;
    for (int first = 0; first < chunks && (all || !some); first += 32 * kAtOnce) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            // Past the end, the last chunk stands in, which changes nothing.
            const int at = min(first + 32 * i + int(threadIdx.x % 32), chunks - 1);
            const unsigned char* row = mask.row(at / of_row);
            const Chunk chunk = reinterpret_cast<const Chunk*>(row)[at % of_row];
#pragma unroll
            for (int word = 0; word < Words; ++word) {
                some |= chunk[word] != 0;
                all &= shows_all(chunk[word]);
            }
        }
        some = __any_sync(0xffffffffu, some);
        all = __all_sync(0xffffffffu, all);
    }
    return all ? kAll : some ? kSome : kNone;
}

// For the mask in memory, by one warp. In a byte of bits, keys past the sequence's last count as if
// they belonged to it: such a tile is masked score by score anyway.
template <int Rows, int Keys>
__device__ inline SeenPart part_of_mask(const ScoreRules& rules, int first_row, int first_key) {
    constexpr int kBytes = Keys * kMaskBits / 8, kVector = min_of(16, kBytes & -kBytes);
    const Matrix<const unsigned char>& mask = rules.key_mask;
    const int rows = mask.row_stride == 0 ? 1 : min(Rows, rules.mask.seqlen_q - first_row);
    const int bytes = ceil_div(min(Keys, rules.mask.seqlen_k - first_key) * kMaskBits, 8);
    const Matrix<const unsigned char> tile = {mask.row(first_row) + first_key / 8 * kMaskBits,
                                              mask.row_stride};
    if constexpr (kVector >= int(sizeof(unsigned int))) {
        const auto steps = reinterpret_cast<unsigned long long>(tile.data) | tile.row_stride;
        if (bytes == kBytes && steps % kVector == 0)
            return part_of_chunks<unsigned int, kVector / 4>(tile, rows, kBytes);
    }
    return part_of_chunks<unsigned char, 1>(tile, rows, bytes);
}

// For the caller's function, by one warp. Places past the ends stand for the last ones, which
// changes nothing.
template <int Rows, int Keys>
__device__ inline SeenPart part_of_function(const ScoreRules& rules, int first_row, int first_key) {
    bool some = false, all = true;
    // A lane has the same keys in all rows, so what depends on a key or a row is reused.
#pragma unroll 4
    for (int row = first_row; row < first_row + Rows; ++row)
#pragma unroll
        for (int key = 0; key < Keys; key += 32) {
            const int in_tile = key + threadIdx.x % 32;
            if (Keys % 32 != 0 && in_tile >= Keys) continue;
            const bool shown = rules.function_shows(row, first_key + in_tile);
            some |= shown;
            all &= shown;
        }
    some = __any_sync(0xffffffffu, some);
    all = __all_sync(0xffffffffu, all);
    return all ? kAll : some ? kSome : kNone;
}
