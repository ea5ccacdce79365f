// What the caller's mask, and the range of keys, show of a warp's scores. Lanes read 16 keys of a
// row at once and tell each other: a load for each score would take longer than the products. All
// loads are on their way before the first is looked at.
#pragma once

#include "scores/score_rules.cuh"

// Columns of a fragment: the lanes have its scores in pairs.
constexpr int kFragmentCols = 8;

// Whether single scores are known by the mask and the range alone.
constexpr bool kMaskAlone = kMaskBits != 0 && !kMaskMod;

// A mask's sixteen keys of a row, as one load takes them.
template <int Bits>
struct SixteenOf {
    using type = Pack<unsigned int, 4>;
};
template <>
struct SixteenOf<1> {
    using type = Pack<unsigned short, 1>;
};
using Sixteen = SixteenOf<kMaskBits>::type;

// Whether a tile's rows can be read so, from a key on whose number is a multiple of 16.
__device__ inline bool lies_in_sixteens(const ScoreRules& rules, int first_key, int keys) {
    const Matrix<const unsigned char>& mask = rules.key_mask;
    const auto steps = reinterpret_cast<unsigned long long>(mask.data) | mask.row_stride;
    return steps % sizeof(Sixteen) == 0 && first_key + keys <= rules.mask.seqlen_k;
}
// A row past the end stands for the last one.
__device__ inline Sixteen load_sixteen(const ScoreRules& rules, int row, int key) {
    const unsigned char* const keys = rules.key_mask.row(min(row, rules.mask.seqlen_q - 1));
    return *reinterpret_cast<const Sixteen*>(keys + key / 8 * kMaskBits);
}

// A bit for each byte of a word that is not 0.
__device__ inline unsigned int bits_of_bytes(unsigned int word) {
    const unsigned int highest = ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word;
    return (highest >> 7 & 0x01010101u) * 0x01020408u >> 24;  // the factor puts them side by side
}
// Which of sixteen keys from `key` on a row sees: a bit each.
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

// Of fragments whose rows are queries: a row of the four lanes that share it, and Columns keys.
template <int Columns>
class MaskOfQuery {
  public:
    __device__ void load(const ScoreRules& rules, int row, int first_key) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) keys[i] = load_sixteen(rules, row, first_key + column(i));
    }
    // Calls take(n, bits) for each even n: what is seen of the lane's two keys of fragment n, in
    // bits 0 and 1, and of those of the next one, in 2 and 3.
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
    // Which of a group of 64 the lane loads; where there are fewer, some load the same.
    __device__ static int column(int i) { return min(64 * i + 16 * lane(), Columns - 16); }
};

// Of fragments whose rows are keys: 16 of them, and Columns queries.
template <int Columns>
class MaskOfKeys {
  public:
    __device__ void load(const ScoreRules& rules, int first_row, int first_key) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            keys[i] = load_sixteen(rules, first_row + column(i), first_key);
    }
    // Calls take(n, e, bits) for each of the lane's columns: whether it is seen by the first of its
    // keys in bit 0, by the second in bit 2.
    template <class Take>
    __device__ void look(const Mask& mask, int first_row, int first_key, const Take& take) const {
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
                    take(n, e, (seen & 1) | (seen >> 6 & 4));
                }
        }
    }

  private:
    static constexpr int kLoads = ceil_div(Columns, 32);
    Sixteen keys[kLoads];

    __device__ static int column(int i) { return 32 * i + threadIdx.x % 32; }
};
