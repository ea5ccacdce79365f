// Which probabilities dropout keeps.
#pragma once

#include "call/params.cuh"
#include "scores/philox.cuh"

// The number of a head's matrix of scores among those of all heads of all sequences: each has
// random numbers of its own.
__device__ inline unsigned int matrix_number(const Sizes& sizes, int batch, int head) {
    return static_cast<unsigned int>(batch * sizes.heads + head);
}

// Which of eight probabilities are kept: two of them to a word, in the highest bit of either half.
struct KeptEight {
    static constexpr unsigned int kFlags = 0x80008000;
    unsigned int pair[4];

    __device__ bool has(int row, int key) const {
        return pair[2 * (row % 2) + key / 8 % 2] >> (16 * (key % 2) + 15) & 1;
    }
};

// Of rows i, i + 1 and keys j, j + 1, j + 8, j + 9, those eight among which row and key are, i and
// j % 8 being even, and j % 16 below 8. It depends on places alone, so the backward finds the same,
// whatever its tiles are. A random number is the lower 15 bits of half a word: by adding to two at
// once, those that are not below the limit get the bit above.
__device__ inline KeptEight kept_of_eight(const Features& features, unsigned int matrix, int row,
                                          int key) {
    constexpr unsigned int kNumbers = ~KeptEight::kFlags;
    const unsigned int i = row, j = key;
    const RandomWords words =
        philox({j / 16 * 4 + j % 8 / 2, i / 2, matrix, features.offset}, features.seed);
    KeptEight kept;
#pragma unroll
    for (int word = 0; word < 4; ++word)
        kept.pair[word] = (words.word[word] & kNumbers) + features.kept_carry;
    return kept;
}
