// Partial rows of the output, each from its own keys, and how a warp merges them.
//
// It is the state of FlashAttention for a row: the maximum and sum of its softmax, and the sum
// of values in that scale. Merging is exact (Milakov and Gimelshein 2018, section 3.1).
#pragma once

#include "mma/mma_products.cuh"
#include "softmax/online_softmax.cuh"

// Warps that share rows and divide the output's columns, and the head dims of their scores.
constexpr int kColumnWarps = COLUMN_WARPS;
constexpr int kPartCols = round_up(kValueDim, 2 * kMmaN * kColumnWarps);

struct alignas(16) PartialRow {
    acc_t sums[kPartCols];
    OnlineSoftmax softmax;
};

// A merged row of a warp; each lane has some of its columns.
struct MergedRow {
    static constexpr int kChunk = 4, kWarpCols = 32 * kChunk;
    static constexpr int kChunks = ceil_div(kPartCols, kWarpCols);
    static constexpr int kPartsAtOnce = 8 / kChunks;  // that registers allow
    using Chunk = Pack<acc_t, kChunk>;

    OnlineSoftmax softmax;
    Chunk sums[kChunks] = {};

    // Merges `count` parts; `part(i)` is part i. It reads Mostly parts together, the usual number,
    // if registers allow.
    template <int Mostly, class Part>
    __device__ static MergedRow of(int count, const Part& part) {
        constexpr int kAtOnce = Mostly < kPartsAtOnce ? Mostly : kPartsAtOnce;
        MergedRow merged;
        for (int first = 0; first < count; first += kAtOnce) {
            MergedRow parts[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (first + i < count) parts[i].load(part(first + i));
            }
            merged.add(parts);
        }
        return merged;
    }

    // Stores the row as a part of a larger one.
    __device__ void store(PartialRow& part) const {
        if (threadIdx.x % 32 == 0) part.softmax = softmax;
        for_each_chunk(
            [&](int i, int col) { *reinterpret_cast<Chunk*>(part.sums + col) = sums[i]; });
    }

    // Writes the row to the output, scaled and rounded.
    template <class T>
    __device__ void write(T* row, acc_t factor) const {
        for_each_chunk([&](int i, int col) {
            Pack<T, kChunk> values;
#pragma unroll
            for (int e = 0; e < kChunk; ++e) values[e] = from_acc<T>(sums[i][e] * factor);
            write_columns<kValueDim>(row, values, col);
        });
    }

  private:
    __device__ void load(const PartialRow& part) {
        softmax = part.softmax;
        for_each_chunk(
            [&](int i, int col) { sums[i] = *reinterpret_cast<const Chunk*>(part.sums + col); });
    }

    template <int Count>
    __device__ void add(const MergedRow (&parts)[Count]) {
        acc_t max = negative_infinity();
#pragma unroll
        for (const MergedRow& part : parts) max = part.softmax.max > max ? part.softmax.max : max;
        const acc_t shrink = softmax.raise_max(max);
        for_each_sum([&](int i, int e) { sums[i][e] *= shrink; });
#pragma unroll
        for (const MergedRow& part : parts) {
            const acc_t weight = exp2_of(part.softmax.max - softmax.shift());
            softmax.sum += part.softmax.sum * weight;
            for_each_sum([&](int i, int e) { sums[i][e] += part.sums[i][e] * weight; });
        }
    }

    template <class Function>
    __device__ static void for_each_sum(const Function& function) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
#pragma unroll
            for (int e = 0; e < kChunk; ++e) function(i, e);
        }
    }

    // Calls function(i, col) for the lane's chunks of columns.
    template <class Function>
    __device__ static void for_each_chunk(const Function& function) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int col = i * kWarpCols + threadIdx.x % 32 * kChunk;
            if (col < kPartCols) function(i, col);
        }
    }
};
