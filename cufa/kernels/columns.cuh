// How some columns of a row of the output are written.
#pragma once

#include "config.cuh"
#include "memory.cuh"

// Writes neighbouring columns of a row, those before Dims of them, as many at once as the caller's
// alignment allows.
template <int Dims, int Count>
__device__ inline void write_columns(scalar_t* row, const Pack<scalar_t, Count>& values,
                                     int first_col) {
    constexpr int kChunk = min_of(min_of(kAlignBytes / sizeof(scalar_t), Dims & -Dims), Count);
    using Chunk = Pack<scalar_t, kChunk>;
#pragma unroll
    for (int col = 0; col < Count; col += kChunk) {
        if (first_col + col >= Dims) continue;
        Chunk chunk;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) chunk[e] = values[col + e];
        *reinterpret_cast<Chunk*>(row + first_col + col) = chunk;
    }
}
