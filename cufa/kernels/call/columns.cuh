// Writes some columns of a row of the output.
#pragma once

#include "call/config.cuh"
#include "call/memory.cuh"

// Writes neighbouring columns of a row, as far as they are before Dims, in vectors as wide as the
// caller's alignment allows.
template <int Dims, class T, int Count>
__device__ inline void write_columns(T* row, const Pack<T, Count>& values, int first_col) {
    constexpr int kChunk = min_of(min_of(kAlignBytes / sizeof(T), Dims & -Dims), Count);
    using Chunk = Pack<T, kChunk>;
#pragma unroll
    for (int col = 0; col < Count; col += kChunk) {
        if (first_col + col >= Dims) continue;
        Chunk chunk;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) chunk[e] = values[col + e];
        *reinterpret_cast<Chunk*>(row + first_col + col) = chunk;
    }
}
