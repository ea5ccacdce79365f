// What the caller's mask and the range of keys show of a warp's scores. Each lane reads 16 keys of
// a row at once and passes them to others: one load per score would take longer than the products.
// All loads are issued before the first is used.
#pragma once

#include "scores/score_rules.cuh"

// Columns of a fragment; each lane has pairs of its scores.
constexpr int kFragmentCols = 8;

// Whether the mask and the range alone decide about single scores.
constexpr bool kMaskAlone = kMaskBits != 0 && !kMaskMod;

// Sixteen keys of a mask's row, as one load reads them.
template <int Bits>
struct SixteenOf {
    using type = Pack<unsigned int, 4>;
};
template <>
struct SixteenOf<1> {
    using type = Pack<unsigned short, 1>;
};
using Sixteen = SixteenOf<kMaskBits>::type;

// Whether a tile's rows can be read like this, from a key whose number is a multiple of 16.
__device__ inline bool lies_in_sixteens(const ScoreRules& rules, int first_key, int keys) {
    const Matrix<const unsigned char>& mask = rules.key_mask;
    const auto steps = reinterpret_cast<unsigned long long>(mask.data) | mask.row_stride;
    return steps % sizeof(Sixteen) == 0 && first_key + keys <= rules.mask.seqlen_k;
}
// A row past the end stands for the last row.
__device__ inline Sixteen load_sixteen(const ScoreRules& rules, int row, int key) {
    const unsigned char* const keys = rules.key_mask.row(min(row, rules.mask.seqlen_q - 1));
    return *reinterpret_cast<const Sixteen*>(keys + key / 8 * kMaskBits);
}

// A bit for each byte of a word that is not 0.
__device__ inline unsigned int bits_of_bytes(unsigned int word) {
    const unsigned int highest = ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word;
    return (highest >> 7 & 0x01010101u) * 0x01020408u >> 24;  // the factor puts them side by side
}
// One bit for each of sixteen keys from `key` on: whether the row sees it.
__device__ inline unsigned int seen_of(const Sixteen& keys, const Mask& mask, int row, int key) {
    const int end = min(max(mask.keys_end(row) - key, 0), 16);
    const int begin = kWindow ? min(max(mask.first_key(row) - key, 0), end) : 0;
    unsigned int bits = 0;
    if constexpr (kMaskBits == 1) {
        bits = keys[0];
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) bits |= bits_of_bytes(keys[i]) << 4 * i;
    }
    return bits & ((1u << end) - (1u << begin));
}

// For fragments whose rows are queries: one row of the four lanes that share it, and Columns keys.
template <int Columns>
class MaskOfQuery {
  public:
    __device__ void load(const ScoreRules& rules, int row, int first_key) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) keys[i] = load_sixteen(rules, row, first_key + column(i));
    }
    // Finds which of the lane's keys are seen: a bit for each, two for each fragment.
    __device__ void look(unsigned int& bits, const Mask& mask, int row, int first_key) const {
        static_assert(kMaskBits == 0 || Columns <= 128, "a word has bits for 128 keys");
        bits = 0;
        look(mask, row, first_key, [&](int n, unsigned int four) { bits |= four << 2 * n; });
    }
    // Calls take(n, bits) with the bits of fragments n and n + 1, for each even n.
    template <class Take>
    __device__ void look(const Mask& mask, int row, int first_key, const Take& take) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const unsigned int own = seen_of(keys[i], mask, row, first_key + column(i));
#pragma unroll
            for (int n = 8 * i; n < min_of(8 * i + 8, Columns / kFragmentCols); n += 2) {
                const unsigned int seen = __shfl_sync(0xffffffffu, own, n / 2 % 4, 4) >> 2 * lane();
                take(n, (seen & 3) | (seen >> 6 & 0xc));
            }
        }
    }

  private:
    static constexpr int kLoads = ceil_div(Columns, 64);
    Sixteen keys[kLoads];

    __device__ static int lane() { return threadIdx.x % 4; }
    // The lane's sixteen of 64 keys; if there are fewer, some lanes load the same.
    __device__ static int column(int i) { return min(64 * i + 16 * lane(), Columns - 16); }
};

// For fragments whose rows are keys: 16 keys, and Columns queries.
template <int Columns>
class MaskOfKeys {
  public:
    __device__ void load(const ScoreRules& rules, int first_row, int first_key) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            keys[i] = load_sixteen(rules, first_row + column(i), first_key);
    }
    // Finds which of the lane's scores are seen: a bit for each, in the order of its elements.
    __device__ void look(unsigned int (&words)[ceil_div(Columns, 64)], const Mask& mask,
                         int first_row, int first_key) const {
        for (unsigned int& word : words) word = 0;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const unsigned int own = seen_of(keys[i], mask, first_row + column(i), first_key);
#pragma unroll
            for (int n = 4 * i; n < min_of(4 * i + 4, Columns / kFragmentCols); ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int of_column = n % 4 * kFragmentCols + threadIdx.x % 4 * 2 + e;
                    const unsigned int seen =
                        __shfl_sync(0xffffffffu, own, of_column) >> threadIdx.x % 32 / 4;
                    words[n / 8] |= ((seen & 1) | (seen >> 6 & 4)) << (n % 8 * 4 + e);
                }
        }
    }

  private:
    static constexpr int kLoads = ceil_div(Columns, 32);
    Sixteen keys[kLoads];

    __device__ static int column(int i) { return 32 * i + threadIdx.x % 32; }
};
