// Views of the caller's arrays: one (seqlen, dim) matrix of a (batch, seqlen, heads, dim) tensor.
#pragma once

#include "params.cuh"

template <class T>
struct Matrix {
    T* data;
    long long row_stride;

    __device__ T* row(int r) const { return data + r * row_stride; }
};

template <class T>
__device__ inline Matrix<T> matrix_of(const Tensor& tensor, int batch, int head) {
    return {static_cast<T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride,
            tensor.row_stride};
}

// Query heads share a KV head in groups of heads / kv_heads.
__device__ inline int kv_head_of(int head, const Sizes& sizes) {
    return head / (sizes.heads / sizes.kv_heads);
}

// The row of (batch, heads, seqlen_q) arrays such as LSE at which a head's rows begin.
__device__ inline long long first_row_of(int batch, int head, const Sizes& sizes) {
    return (static_cast<long long>(batch) * sizes.heads + head) * sizes.seqlen_q;
}

// The tile of queries that a block owns.
struct QueryTile {
    int batch, head, kv_head, first_row;
};

// Blocks are numbered tile by tile, the last queries first: under a causal mask those see most
// keys, and long work that starts late would leave the GPU waiting for it.
template <int BlockM>
__device__ inline QueryTile query_tile_of_block(const Sizes& sizes) {
    const int tiles = (sizes.seqlen_q + BlockM - 1) / BlockM;
    const int heads = sizes.batch * sizes.heads;
    const int tile = tiles - 1 - blockIdx.x / heads;
    const int batch = blockIdx.x % heads / sizes.heads, head = blockIdx.x % heads % sizes.heads;
    return {batch, head, kv_head_of(head, sizes), tile * BlockM};
}
