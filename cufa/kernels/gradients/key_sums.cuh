// For blocks of the backward that process a part of the queries that share their keys. They
// write their part of the gradients of the keys to the workspace, and a later launch adds up the
// parts, in a fixed order: every run gives the same bits.
#pragma once

#include "call/columns.cuh"
#include "call/tensor.cuh"

// The queries that read a KV head are split into kParts parts; a block has one. They are kHeadParts
// parts of its query heads, and of each of those kRowParts parts of the rows that see the block's
// keys.
constexpr int kHeadParts = HEAD_PARTS, kRowParts = ROW_PARTS, kParts = kHeadParts * kRowParts;

// The number of parts over all KV heads.
__device__ inline int parts_of_heads(const Sizes& sizes) {
    return sizes.kv_heads * kParts;
}
// The number of query heads in a part.
__device__ inline int heads_of_part(const Sizes& sizes) {
    return sizes.heads / (sizes.kv_heads * kHeadParts);
}

// For each row of keys, KV head and part: a row of dK, not yet scaled, and of dV.
struct KeySums {
    static constexpr int kKeyCols = round_up(kHeadDim, 8), kValueCols = round_up(kValueDim, 8);
    static constexpr int kCols = kKeyCols + kValueCols;
    using Chunk = Pack<acc_t, kVec>;  // what a lane adds up at once

    acc_t* data;
    Sizes sizes;

    // The number of rows of keys of one KV head, and of sums for all parts.
    __device__ static long long rows(const Sizes& sizes) {
        return static_cast<long long>(kPacked ? 1 : sizes.batch) * sizes.seqlen_k;
    }
    __device__ static long long count(const Sizes& sizes) {
        return kParts > 1 ? rows(sizes) * parts_of_heads(sizes) * kCols : 0;
    }

    // The first part of a row of a KV head; the others follow.
    __device__ const acc_t* parts_of(long long row, int kv_head) const {
        return data + (row * parts_of_heads(sizes) + kv_head * kParts) * kCols;
    }
    // The row of a sequence's first key; and one of the parts, counted over all KV heads, of the
    // key that is `key` rows later.
    __device__ long long first_row(int batch, int first_k) const {
        return kPacked ? first_k : static_cast<long long>(batch) * sizes.seqlen_k;
    }
    __device__ acc_t* part_of(long long first_row, int key, int part) const {
        return data + ((first_row + key) * parts_of_heads(sizes) + part) * kCols;
    }
};

// Writes sums times `scale` to a row from dim `first` on, as far as the row has Dims.
template <int Dims>
__device__ inline void write_sums(scalar_t* row, int first, const KeySums::Chunk& sums,
                                  acc_t scale) {
    Pack<scalar_t, kVec> rounded;
#pragma unroll
    for (int e = 0; e < kVec; ++e) rounded[e] = from_acc<scalar_t>(sums[e] * scale);
    write_columns<Dims>(row, rounded, first);
}

// If there are parts, adds up and rounds the gradients of keys and values: one warp for each row of
// a KV head.
template <int Threads>
__device__ inline void add_parts(const BackwardParams& call, const KeySums& sums) {
    if constexpr (kParts == 1) return;
    const Sizes& sizes = call.sizes;
    const long long index = static_cast<long long>(blockIdx.x) * (Threads / 32) + threadIdx.x / 32;
    const long long row = index / sizes.kv_heads;
    const int kv_head = index % sizes.kv_heads;
    if (row >= KeySums::rows(sizes)) return;
    if constexpr (kPacked) {  // there may be rows before the first sequence and after the last
        const int* cu_seqlens = call.features.cu_seqlens_k;
        if (row < cu_seqlens[0] || row >= cu_seqlens[sizes.batch]) return;
    }
    const int batch = kPacked ? 0 : row / sizes.seqlen_k;
    const int in_batch = row - static_cast<long long>(batch) * sizes.seqlen_k;
    const acc_t* parts = sums.parts_of(row, kv_head);
#pragma unroll
    for (int col = threadIdx.x % 32 * kVec; col < KeySums::kCols; col += 32 * kVec) {
        KeySums::Chunk sum = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const auto more =
                *reinterpret_cast<const KeySums::Chunk*>(parts + part * KeySums::kCols + col);
#pragma unroll
            for (int e = 0; e < kVec; ++e) sum[e] += more[e];
        }
        if (col < KeySums::kKeyCols) {
            const auto dk = matrix_of<scalar_t>(call.dk, batch, kv_head);
            write_sums<kHeadDim>(dk.row(in_batch), col, sum, call.softmax_scale);
        } else {
            const auto dv = matrix_of<scalar_t>(call.dv, batch, kv_head);
            write_sums<kValueDim>(dv.row(in_batch), col - KeySums::kKeyCols, sum, 1);
        }
    }
}
