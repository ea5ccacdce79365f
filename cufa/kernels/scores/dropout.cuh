// Selects the probabilities that dropout keeps.
#pragma once

#include "call/params.cuh"
#include "scores/philox.cuh"

// The number of a head's matrix of scores among all heads of all sequences: each has its own random
// numbers.
__device__ inline unsigned int matrix_number(const Sizes& sizes, int batch, int head) {
    return static_cast<unsigned int>(batch * sizes.heads + head);
}

// The factor of probabilities, where dropout drops some: of those that it keeps.
__device__ inline acc_t kept_scale(const Features& features) {
    return kDropout ? features.kept_scale : 1;
}

// Which of eight probabilities are kept: two per word, each in the highest bit of a half.
struct KeptEight {
    static constexpr unsigned int kFlags = 0x80008000;
    unsigned int pair[4];

    __device__ bool has(int row, int key) const {
        return pair[2 * (row % 2) + key / 8 % 2] >> (16 * (key % 2) + 15) & 1;
    }
};

// The group of eight to which row and key belong: rows i, i + 1 and keys j, j + 1, j + 8, j + 9,
// with even i, even j % 8, and j % 16 < 8. It depends only on places, so the backward finds the
// same, whatever its tiles are. A random number is the lower 15 bits of half a word. One addition
// handles two: those that reach the limit carry into the bit above.
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
