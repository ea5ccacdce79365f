// The bias of the scores that a thread of the Hopper forward has of a tile: read while their
// products are computed, two neighbouring keys in a word.
#pragma once

#include "call/params.cuh"
#include "scores/mask.cuh"

// Two neighbouring elements, those of 16 bits in one register.
template <class T>
struct Pair {
    unsigned int word;

    Pair() = default;
    __device__ Pair(T low, T high) : word(low.bits | static_cast<unsigned int>(high.bits) << 16) {}
    __device__ float element(int e) const {
        return to_acc(T{static_cast<unsigned short>(word >> 16 * e)});
    }
};
template <>
struct alignas(8) Pair<float> {
    float elements[2];

    Pair() = default;
    __device__ Pair(float low, float high) : elements{low, high} {}
    __device__ float element(int e) const { return elements[e]; }
};

// Of Count scores of rows `row` and row + 8, as wgmma leaves them in registers.
template <class T, int Count>
struct BiasPairs {
    Pair<T> pairs[Count / 2];

    // `first_key` is the first of this thread's, an even number.
    __device__ void load(const Features& features, const Mask& mask, int batch, int head, int row,
                         int first_key) {
        const ScoreTensor& tensor = features.bias;
        const T* const matrix = static_cast<const T*>(tensor.data) + batch * tensor.batch_stride +
                                head * tensor.head_stride;
        const T* rows[2];  // past the end the last one, which is as good
#pragma unroll
        for (int half = 0; half < 2; ++half)
            rows[half] = matrix + min(row + 8 * half, mask.seqlen_q - 1) * tensor.row_stride;

        constexpr int kKeys = 2 * Count;
        const auto steps = reinterpret_cast<unsigned long long>(matrix) / sizeof(T) |
                           static_cast<unsigned long long>(tensor.row_stride);
        if (steps % 2 == 0 && first_key + kKeys <= mask.seqlen_k) {
#pragma unroll
            for (int i = 0; i < Count / 2; ++i) {
                const T* const pair = rows[i % 2] + first_key + i / 2 * 8;
                pairs[i] = *reinterpret_cast<const Pair<T>*>(pair);
            }
        } else {
            const int last_key = mask.seqlen_k - 1;
#pragma unroll
            for (int i = 0; i < Count / 2; ++i) {
                const int key = first_key + i / 2 * 8;
                pairs[i] = {rows[i % 2][min(key, last_key)], rows[i % 2][min(key + 1, last_key)]};
            }
        }
    }

    // Adds it to products, `unit` of which make a score of 1.
    __device__ void add_to(float (&s)[Count], float unit) const {
#pragma unroll
        for (int i = 0; i < Count / 2; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) s[2 * i + e] += pairs[i].element(e) * unit;
    }
};
template <int Count>
struct BiasPairs<void, Count> {
    __device__ void load(const Features&, const Mask&, int, int, int, int) {}
    __device__ void add_to(float (&)[Count], float) const {}
};
