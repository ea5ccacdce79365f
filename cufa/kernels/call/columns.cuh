// Columns of rows of the caller's arrays, in vectors as wide as the caller's alignment allows.
#pragma once

#include "call/config.cuh"
#include "call/memory.cuh"

// The number of elements in the widest vectors of which a row of Dims elements has whole ones.
template <class T, int Dims>
constexpr int kChunkOfRow = min_of(kAlignBytes / sizeof(T), Dims & -Dims);

// Writes neighbouring columns of a row, as far as they are before Dims.
template <int Dims, class T, int Count>
__device__ inline void write_columns(T* row, const Pack<T, Count>& values, int first_col) {
    constexpr int kChunk = min_of(kChunkOfRow<T, Dims>, Count);
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

// Writes neighbouring elements of 8 bits, rounded.
template <int Count>
__device__ inline void write_e4m3(float8_e4m3fn* y, const float (&x)[Count]) {
    if constexpr (Count % 4 == 0) {
        Pack<unsigned int, Count / 4> words;
#pragma unroll
        for (int i = 0; i < Count; i += 4) {
            words[i / 4] = ptx::pack_e4m3(x[i], x[i + 1], x[i + 2], x[i + 3]);
        }
        *reinterpret_cast<Pack<unsigned int, Count / 4>*>(y) = words;
    } else {
        for (int i = 0; i < Count; ++i) y[i] = {ptx::e4m3_from_float(x[i])};
    }
}
