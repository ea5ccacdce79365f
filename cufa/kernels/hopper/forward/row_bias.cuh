// The bias of a warpgroup's scores in the Hopper forward: from a tile that TMA copied, or loaded
// into registers while products run.
#pragma once

#include "hopper/bias_boxes.cuh"
#include "hopper/pipeline.cuh"
#include "scores/mask.cuh"

// Two neighbouring elements; two of 16 bits share a register, others become float32.
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
struct Pair<float> {
    float elements[2];

    Pair() = default;
    __device__ Pair(float low, float high) : elements{low, high} {}
    __device__ float element(int e) const { return elements[e]; }
};
template <>
struct Pair<double> : Pair<float> {
    using Pair<float>::Pair;
};

// The bias of Count scores of rows `row` and row + 8, in wgmma's layout: two neighbouring keys in a
// word.
template <class T, int Count>
struct BiasPairs {
    Pair<T> pairs[Count / 2];

    // `first_key` is this thread's first key, an even number.
    __device__ void load(const Features& features, const Mask& mask, int batch, int head, int row,
                         int first_key) {
        const ScoreTensor& tensor = features.bias;
        const T* const matrix = static_cast<const T*>(tensor.data) + batch * tensor.batch_stride +
                                head * tensor.head_stride;
        const T* rows[2];  // past the end the last row, which does no harm
#pragma unroll
        for (int half = 0; half < 2; ++half)
            rows[half] = matrix + min(row + 8 * half, mask.seqlen_q - 1) * tensor.row_stride;

        constexpr int kKeys = 2 * Count;
        const auto steps = reinterpret_cast<unsigned long long>(matrix) / sizeof(T) |
                           static_cast<unsigned long long>(tensor.row_stride);
        if (steps % 2 == 0 && first_key + kKeys <= mask.seqlen_k) {
#pragma unroll
            for (int i = 0; i < Count / 2; ++i) {
                const T* const at = rows[i % 2] + first_key + i / 2 * 8;
                const auto pair = *reinterpret_cast<const Pack<T, 2>*>(at);
                pairs[i] = Pair<T>(pair[0], pair[1]);
            }
        } else {
            const int last_key = mask.seqlen_k - 1;
#pragma unroll
            for (int i = 0; i < Count / 2; ++i) {
                const int key = first_key + i / 2 * 8;
                pairs[i] =
                    Pair<T>(rows[i % 2][min(key, last_key)], rows[i % 2][min(key + 1, last_key)]);
            }
        }
    }

    // Adds the bias to products, of which `unit` makes a score of 1.
    template <class Smem>
    __device__ void add_to(float (&s)[Count], float unit, Smem&, int, RingPosition<1>&) const {
#pragma unroll
        for (int i = 0; i < Count / 2; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) s[2 * i + e] += pairs[i].element(e) * unit;
    }
};
template <int Count>
struct BiasPairs<void, Count> {
    __device__ void load(const Features&, const Mask&, int, int, int, int) {}
    template <class Smem>
    __device__ void add_to(float (&)[Count], float, Smem&, int, RingPosition<1>&) const {}
};

// The same from a tile that TMA copied for the warpgroup.
template <class T, int Count>
struct BiasInTile {
    __device__ void load(const Features&, const Mask&, int, int, int, int) {}
    template <class Smem>
    __device__ void add_to(float (&s)[Count], float unit, Smem& smem, int warpgroup,
                           RingPosition<1>& at) const {
        Ring<1>& ring = smem.bias_rings[warpgroup];
        ring.wait_full(at);
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int col = 0; col < 2 * Count; col += kWgmmaK) {
            WgmmaOperand<kWgmmaK, T> words;
            WgmmaSums<kWgmmaK> values;
            const int key = col + lane / 16 * kChunkCols;
            ptx::ldmatrix_x4(words[0],
                             boxed_bias(smem.bias[warpgroup], row_of_warp() + lane % 16, key));
            widen_operand<kWgmmaK, T>(values, words);
#pragma unroll
            for (int i = 0; i < kWgmmaK / 2; ++i) s[col / 2 + i] += values[i] * unit;
        }
        ptx::proxy_fence();  // or TMA might overwrite the tile before loads are done
        release(ring, at);
        at.advance();
    }
};

template <class T, int Count, bool InBoxes = kBiasBoxes>
struct RowBiasOf {
    using type = BiasPairs<T, Count>;
};
template <class T, int Count>
struct RowBiasOf<T, Count, true> {
    using type = BiasInTile<T, Count>;
};
