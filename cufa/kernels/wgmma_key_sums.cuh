// Where a block of the Hopper backward works for a part of the query heads that share its keys:
// what those heads add to the gradients of the keys is written to the workspace, in float32, and a
// launch after the products' adds up the parts. In a fixed order: a call has the same bits every
// time.
#pragma once

#include "wgmma_key_work.cuh"

// For each row of keys, KV head and part a row of dK, not yet scaled, and dV.
struct KeySums {
    static constexpr int kKeyCols = round_up(kHeadDim, 8), kValueCols = round_up(kValueDim, 8);
    static constexpr int kCols = kKeyCols + kValueCols;

    float* data;
    Sizes sizes;

    // How many rows of keys one KV head has, and how many floats that makes of all parts.
    __device__ static long long rows(const Sizes& sizes) {
        return static_cast<long long>(kPacked ? 1 : sizes.batch) * sizes.seqlen_k;
    }
    __device__ static long long count(const Sizes& sizes) {
        return kParts > 1 ? rows(sizes) * parts_of_heads(sizes) * kCols : 0;
    }

    // Where the first part of a row of a KV head begins; the others follow.
    __device__ const float* parts_of(long long row, int kv_head) const {
        return data + (row * parts_of_heads(sizes) + kv_head * kParts) * kCols;
    }

    // Writes a warpgroup's sums for 64 keys of its work, from the key'th and first_col on.
    template <int Cols>
    __device__ void write_keys(const BackwardParams& call, const KeyWork& work, int key,
                               int first_col, const WgmmaSums<Cols>& dk) const {
        write<kKeyCols, Cols>(call, work, key, 0, first_col, dk);
    }
    template <int Cols>
    __device__ void write_values(const BackwardParams& call, const KeyWork& work, int key,
                                 int first_col, const WgmmaSums<Cols>& dv) const {
        write<kValueCols, Cols>(call, work, key, kKeyCols, first_col, dv);
    }

  private:
    // Eight columns of a row are four lanes', and a whole sector of memory.
    template <int End, int Cols>
    __device__ void write(const BackwardParams& call, const KeyWork& work, int key, int begin,
                          int first_col, const WgmmaSums<Cols>& sums) const {
        const Sequence sequence = work.sequence(call);
        const int lane = threadIdx.x % 32;
        const int own_key = work.first_key + key + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
        const int keys_end = end_of_keys(call, sequence);
        const int first_row = kPacked ? sequence.first_k : work.batch * sizes.seqlen_k;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int in_sequence = own_key + half * 8;
            if (in_sequence >= keys_end) continue;
            const long long row = static_cast<long long>(first_row) + in_sequence;
            float* to = data + (row * parts_of_heads(sizes) + work.part) * kCols + begin +
                        lane % 4 * 2 + first_col;
#pragma unroll
            for (int i = 0; i < Cols / 8; ++i) {
                if (first_col + i * 8 >= End) break;
                *reinterpret_cast<Pack<float, 2>*>(to + i * 8) = {sums[4 * i + 2 * half],
                                                                  sums[4 * i + 2 * half + 1]};
            }
        }
    }
};

// Writes four sums times `scale` from dim `first` on of a row's Dims, as far as it has those.
template <int Dims>
__device__ inline void write_four(scalar_t* row, int first, const Pack<float, 4>& sums,
                                  float scale) {
    if (first >= Dims) return;
    Pack<scalar_t, 4> rounded;
#pragma unroll
    for (int e = 0; e < 4; ++e) rounded[e] = from_acc<scalar_t>(sums[e] * scale);
    if (Dims % 4 == 0) {
        *reinterpret_cast<Pack<scalar_t, 4>*>(row + first) = rounded;
    } else {
        for (int e = 0; e < 4 && first + e < Dims; ++e) row[first + e] = rounded[e];
    }
}

// Adds up the parts of the gradients of keys and values, and rounds them: a warp for each row of a
// KV head.
template <int Threads>
__device__ inline void add_parts(const BackwardParams& call, const KeySums& sums) {
    const Sizes& sizes = call.sizes;
    const long long index = static_cast<long long>(blockIdx.x) * (Threads / 32) + threadIdx.x / 32;
    const long long row = index / sizes.kv_heads;
    const int kv_head = index % sizes.kv_heads;
    if (row >= KeySums::rows(sizes)) return;
    if constexpr (kPacked) {  // there may be rows before the first sequence, and after the last
        const int* cu_seqlens = call.features.cu_seqlens_k;
        if (row < cu_seqlens[0] || row >= cu_seqlens[sizes.batch]) return;
    }
    const int batch = kPacked ? 0 : row / sizes.seqlen_k;
    const int in_batch = row - static_cast<long long>(batch) * sizes.seqlen_k;
    const float* parts = sums.parts_of(row, kv_head);
#pragma unroll
    for (int col = threadIdx.x % 32 * 4; col < KeySums::kCols; col += 32 * 4) {
        Pack<float, 4> sum = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const auto four =
                *reinterpret_cast<const Pack<float, 4>*>(parts + part * KeySums::kCols + col);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += four[e];
        }
        if (col < KeySums::kKeyCols) {
            const auto dk = matrix_of<scalar_t>(call.dk, batch, kv_head);
            write_four<kHeadDim>(dk.row(in_batch), col, sum, call.softmax_scale);
        } else {
            const auto dv = matrix_of<scalar_t>(call.dv, batch, kv_head);
            write_four<kValueDim>(dv.row(in_batch), col - KeySums::kKeyCols, sum, 1);
        }
    }
}
