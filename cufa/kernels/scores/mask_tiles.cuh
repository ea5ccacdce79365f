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

// What a warp has found of a tile so far. It stops once it has found both seen and unseen keys, so
// a mask without structure is cheap to inspect.
struct FoundKeys {
    bool some = false, all = true;

    __device__ void add(bool shows_some, bool shows_all) {
        some |= shows_some;
        all &= shows_all;
    }
    template <class Word>
    __device__ void add(Word word) {
        add(word != 0, shows_all(word));
    }
    __device__ void join_lanes() {
        some = __any_sync(0xffffffffu, some);
        all = __all_sync(0xffffffffu, all);
    }
    __device__ bool is_open() const { return all || !some; }
    __device__ SeenPart part() const { return all ? kAll : some ? kSome : kNone; }
};

// A warp reads Bytes of each row of a mask, in chunks of so many words.
template <int Bytes, int Words>
__device__ inline SeenPart part_of_chunks(Matrix<const unsigned char> mask, int rows) {
    using Chunk = Pack<unsigned int, Words>;
    constexpr int kAtOnce = 4;  // chunks that a lane loads together
    constexpr int kOfRow = Bytes / int(sizeof(Chunk));
    const int chunks = rows * kOfRow;
    FoundKeys found;
    for (int first = 0; first < chunks && found.is_open(); first += 32 * kAtOnce) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            // Past the end, the last chunk stands in, which changes nothing.
            const int at = min(first + 32 * i + int(threadIdx.x % 32), chunks - 1);
            const auto* const row = reinterpret_cast<const Chunk*>(mask.row(at / kOfRow));
            const Chunk chunk = row[at % kOfRow];
#pragma unroll
            for (int word = 0; word < Words; ++word) found.add(chunk[word]);
        }
        found.join_lanes();
    }
    return found.part();
}

// A warp reads `bytes`, up to Most, of each row of a mask, wherever they lie: as many as it can in
// words, and those before the first and after the last word one by one.
template <int Most>
__device__ inline SeenPart part_of_bytes(Matrix<const unsigned char> mask, int rows, int bytes) {
    using Word = unsigned int;
    constexpr int kWord = sizeof(Word), kOthers = kWord - 1;  // the most at each end
    constexpr int kAtOnce = 8;  // rows whose bytes a lane loads together
    const int lane = threadIdx.x % 32;
    FoundKeys found;
    for (int first = 0; first < rows && found.is_open(); first += kAtOnce) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            // Past the end, the last row stands in, which changes nothing.
            const unsigned char* const row = mask.row(min(first + i, rows - 1));
            const int before = min(int(-reinterpret_cast<unsigned long long>(row) % kWord), bytes);
            const int words = (bytes - before) / kWord;
            const auto* const aligned = reinterpret_cast<const Word*>(row + before);
            // Lanes without a word or byte of their own read another's, which changes nothing.
#pragma unroll
            for (int word = 0; word < ceil_div(Most, kWord); word += 32)
                if (words > 0) found.add(aligned[min(word + lane, words - 1)]);
            const int at = lane % 2 == 0 ? lane / 2 : bytes - 1 - lane / 2;
            found.add(row[lane < 2 * kOthers ? max(min(at, bytes - 1), 0) : 0]);
        }
        found.join_lanes();
    }
    return found.part();
}

// For the mask in memory, by one warp. In a byte of bits, keys past the sequence's last count as if
// they belonged to it: such a tile is masked score by score anyway.
template <int Rows, int Keys>
__device__ inline SeenPart part_of_mask(const ScoreRules& rules, int first_row, int first_key) {
    constexpr int kBytes = Keys * kMaskBits / 8, kVector = min_of(16, kBytes & -kBytes);
    constexpr int kWords = kVector / int(sizeof(unsigned int));
    const Matrix<const unsigned char>& mask = rules.key_mask;
    const int rows = mask.row_stride == 0 ? 1 : min(Rows, rules.mask.seqlen_q - first_row);
    const int bytes = ceil_div(min(Keys, rules.mask.seqlen_k - first_key) * kMaskBits, 8);
    const Matrix<const unsigned char> tile = {mask.row(first_row) + first_key / 8 * kMaskBits,
                                              mask.row_stride};
    if constexpr (kWords > 0) {
        const auto steps = reinterpret_cast<unsigned long long>(tile.data) | tile.row_stride;
        if (bytes == kBytes && steps % kVector == 0)
            return part_of_chunks<kBytes, kWords>(tile, rows);
    }
    return part_of_bytes<kBytes>(tile, rows, bytes);
}

// For the caller's function, by one warp. Places past the ends stand for the last ones, which
// changes nothing.
template <int Rows, int Keys>
__device__ inline SeenPart part_of_function(const ScoreRules& rules, int first_row, int first_key) {
    FoundKeys found;
    // A lane has the same keys in all rows, so what depends on a key or a row is reused.
#pragma unroll 4
    for (int row = first_row; row < first_row + Rows; ++row)
#pragma unroll
        for (int key = 0; key < Keys; key += 32) {
            const int in_tile = key + threadIdx.x % 32;
            if (Keys % 32 != 0 && in_tile >= Keys) continue;
            const bool shown = rules.function_shows(row, first_key + in_tile);
            found.add(shown, shown);
        }
    found.join_lanes();
    return found.part();
}
