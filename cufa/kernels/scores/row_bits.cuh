// Which keys a row sees, as one bit each.
#pragma once

#include "call/memory.cuh"

constexpr int kWordKeys = 32;  // of a row, in a word; a row's words are adjacent

// The bits of a row, moved by as few instructions as possible.
template <int Words>
struct RowBits {
    unsigned int of[Words];

    __device__ void load(const unsigned int* row) {
#pragma unroll
        for (int i = 0; i < Words; i += kAtOnce) {
            const Chunk chunk = *reinterpret_cast<const Chunk*>(row + i);
#pragma unroll
            for (int e = 0; e < kAtOnce; ++e) of[i + e] = chunk[e];
        }
    }
    __device__ void store(unsigned int* row) const {
#pragma unroll
        for (int i = 0; i < Words; i += kAtOnce) {
            Chunk chunk;
#pragma unroll
            for (int e = 0; e < kAtOnce; ++e) chunk[e] = of[i + e];
            *reinterpret_cast<Chunk*>(row + i) = chunk;
        }
    }

    __device__ bool has(int key) const {
        unsigned int word = of[0];
#pragma unroll
        for (int i = 1; i < Words; ++i)
            if (key / kWordKeys == i) word = of[i];
        return word >> key % kWordKeys & 1;
    }

  private:
    static constexpr int kAtOnce = min_of(Words & -Words, 4);
    using Chunk = Pack<unsigned int, kAtOnce>;
};
