// What a warpgroup of the Hopper forwards does to a tile of scores between its two products, in the
// registers of the first product: soft cap, mask, online softmax.
#pragma once

#include "call/tensor.cuh"
#include "hopper/alibi_line.cuh"
#include "hopper/wgmma_products.cuh"
#include "softmax/online_softmax.cuh"

// Where larger scores are looked for before there are weights, a maximum is raised only if a score
// exceeds it by more than this, in log 2. So weights reach up to 2^8, which float32 sums and 16-bit
// weights hold as precisely as weights up to 1. 2^8 is the last power of 2 that 8-bit weights hold.
constexpr float kSlack = 8;
// Where larger scores are noticed afterwards, a thread's weights in a row may have this sum before
// maxima are raised. Operands can hold each of these weights.
constexpr float kLargestSum = sizeof(scalar_t) == 1 ? 448 : 32768;
// A maximum is set this far below the largest score. 8-bit weights lose precision below 2^-6, so
// weights that count should be far above it. But the sum of a thread's weights in a row, at most 48
// (of 192 keys) in tiles of the plan's choice, should stay below kLargestSum even if all scores are
// equal.
constexpr float kHeadroom = sizeof(scalar_t) == 1 ? 3 : 0;
// A row that sees fewer keys of its first tile is likely to see larger scores in the next tile, and
// its maximum would have to be raised. So it is set this far above the largest score.
constexpr int kFewKeys = 32;
constexpr float kAboveFewKeys = 2;
// From here on weights may have been infinite and cannot be shrunk.
constexpr float kAlmostInfinity = 0x1p126f;

// Whether scores stay in the units they come in: of products or, with a soft cap, of the cap. What
// is added to them is then converted to these units.
constexpr bool kKeepsUnits = !kScoreMod || kScoreModAdds;
// Whether anything is added.
constexpr bool kAdds = kAlibi || kBias || kScoreMod;

// Turns a product of a query and a key, bounded if there is a soft cap, into a score in log 2.
struct Scale {
    float factor;       // never 0: -inf * 0 is NaN
    float inverse;      // NaN if factor < 0: the largest score is then the smallest product
    float lowered = 0;  // how much all of this thread's scores are to be lowered

    __device__ Scale(float scale_log2, const Features& features)
        : factor(kKeepsUnits ? scale_log2 : float(kLog2E)),
          inverse(factor > 0 ? 1 / factor : not_a_number()) {
        if constexpr (kKeepsUnits && kSoftcap) {
            factor = features.softcap * float(kLog2E);
            inverse = features.softcap_reciprocal * float(kLn2);
        }
        // What is added to scores is divided by the factor, so it must not be too close to 0.
        if (kAdds && fabsf(factor) < kSmallestScale) {
            factor = kSmallestScale;
            inverse = 1 / kSmallestScale;
        }
    }

    // The product whose score is -inf.
    __device__ float masked() const {
        return factor < 0 ? -negative_infinity() : negative_infinity();
    }

    // A score after it is lowered, and before.
    __device__ float lower(float score) const {
        if constexpr (kAlibi) return score - lowered;
        return score;
    }
    __device__ float before_lowering(float score) const {
        if constexpr (kAlibi) return score + lowered;
        return score;
    }
};

// Turns products into scores, with a soft cap.
template <int Count>
__device__ inline void bound(float (&s)[Count], float softmax_scale, const Features& features) {
    const float inner = softmax_scale * features.softcap_reciprocal;
    const float unit = kKeepsUnits ? 1 : features.softcap;
#pragma unroll
    for (int i = 0; i < Count; ++i) s[i] = unit * tanh_of(s[i] * inner);
}

// Adds ALiBi to a tile of products. `slope` is in units of products, and `distance` is that of a
// thread's first row and key. Returns the part that all of the thread's scores share and that is
// still to be subtracted.
template <int Count>
__device__ inline float add_alibi(float (&s)[Count], float slope, int distance) {
    constexpr int kFarthest = 2 * Count - 7;  // the last key from the first
    const AlibiLine line(slope, distance - kFarthest, distance + 8);
    const auto nearer = [](int i) { return i / 4 * 8 + i % 2 - i / 2 % 2 * 8; };  // than the first
    if (line.bent) {  // one branch for all scores: few tiles are bent
        const float farthest = distance;
#pragma unroll
        for (int i = 0; i < Count; ++i) line.bend(s[i], farthest - nearer(i));
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) s[i] = fmaf(line.step, nearer(i), s[i]);
    return line.step * distance;
}

// Calls modify(score, q_idx, kv_idx) for each of a thread's scores, of rows `row` and row + 8 and
// of keys from `key` on.
template <int Count, class Modify>
__device__ inline void modify_each(float (&s)[Count], int row, int key, const Modify& modify) {
#pragma unroll
    for (int i = 0; i < Count; ++i) modify(s[i], {row, i / 2 % 2 * 8}, {key, i / 4 * 8 + i % 2});
}

// The same for a tile that may extend past the ends, where nobody reads scores: functions that look
// something up get the last row and key.
template <int Count, class Modify>
__device__ inline void modify_all(float (&s)[Count], const Mask& mask, int row, int key,
                                  const Modify& modify) {
    constexpr int kLastRow = 8, kLastKey = 2 * Count - 7;  // from the first
    const int last_row = mask.seqlen_q - 1, last_key = mask.seqlen_k - 1;
    const bool inside = row + kLastRow <= last_row && key + kLastKey <= last_key;
    if (!kScoreModLooksUp || __all_sync(0xffffffffu, inside))
        return modify_each(s, row, key, modify);
    modify_each(s, row, key, [&](float& score, SplitIndex q_idx, SplitIndex kv_idx) {
        modify(score, min(int(q_idx), last_row), min(int(kv_idx), last_key));
    });
    hold_all(s);  // or both ways would share their reads, at addresses kept in registers
}

// The keys of a thread's scores in a tile: the first one, and how far after it the key of [i] is.
struct KeysInOrder {
    __device__ static int first() { return col_of_thread(); }
    __device__ static constexpr int after_first(int i) { return i / 4 * 8 + i % 2; }
};

// Which of a thread's scores belong to a part of a tile: all of them, or those of keys from Begin
// to before End, in the order of Keys.
struct WholeTile {
    __device__ static constexpr bool has(int) { return true; }
};
template <class Keys, int Begin, int End>
struct TilePart {
    static_assert(Begin % 16 == 0 && End % 16 == 0, "four threads share each sixteen keys");
    __device__ static constexpr bool has(int i) {
        return Begin <= Keys::after_first(i) && Keys::after_first(i) < End;
    }
};

// Sets the scores of keys that a row does not see to `masked`. `row` is the first of this thread's
// two rows; the other is row + 8.
template <class Keys, class Part = WholeTile, int Count>
__device__ inline void apply_mask(float (&s)[Count], const Mask& mask, int row, int first_key,
                                  float masked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int first_of_thread = first_key + Keys::first();
        const int end = mask.keys_end(row + 8 * half) - first_of_thread;
        const int begin = kWindow ? mask.first_key(row + 8 * half) - first_of_thread : 0;
#pragma unroll
        for (int i = 2 * half; i < Count; i += 4)
#pragma unroll
            for (int e = 0; e < 2 && Part::has(i); ++e) {
                const int key = Keys::after_first(i + e);
                if (key >= end || (kWindow && key < begin)) s[i + e] = masked;
            }
    }
}

// Sets the scores that the caller's function does not show to `masked`. Past the ends, the last row
// and the last key stand in.
template <int Count>
__device__ inline void hide(float (&s)[Count], const Features& features, const Mask& mask,
                            int batch, int head, int row, int first_key, float masked) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        const int q_idx = min(row + i / 2 % 2 * 8, mask.seqlen_q - 1);
        const int key = first_key + col_of_thread() + i / 4 * 8 + i % 2;
        if (!mod_sees(features, batch, head, q_idx, min(key, mask.seqlen_k - 1))) s[i] = masked;
    }
}

// Multiplies sums under old maxima by the factors that RowPair::raise found.
template <int Count>
__device__ inline void rescale(float (&o)[Count], const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) o[i] *= shrink[i / 2 % 2];
}

// The softmax of a thread's two rows.
struct RowPair {
    OnlineSoftmax rows[2];

    // Sets the maxima by the Part of the first tile of products.
    template <class Part = WholeTile, int Count>
    __device__ void begin(const float (&s)[Count], Scale scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            rows[half].max = first_largest<Part>(s, half, scale) - kHeadroom;
    }

    // Raises the maxima if a product of the tile exceeds one. Returns whether it did; O must then
    // be multiplied by `shrink`.
    template <int Count>
    __device__ bool raise(const float (&s)[Count], Scale scale, float (&shrink)[2]) {
        const bool raised = __any_sync(0xffffffffu, exceeds(s, 0, scale) | exceeds(s, 1, scale));
        if (__builtin_expect(raised, false)) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float largest = lanes_max<4>(largest_of<WholeTile>(s, half, scale));
                shrink[half] = rows[half].raise_max(largest - kHeadroom);
            }
        }
        return raised;
    }

    // Turns a tile of products into weights under the current maxima, and sums a thread's weights
    // in each row. Keys outside Part get no weight.
    template <class Part = WholeTile, int Count>
    __device__ void weigh(float (&s)[Count], Scale scale, float (&sums)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float shift = scale.before_lowering(rows[half].shift());
            sums[half] = 0;
#pragma unroll
            for (int i = 2 * half; i < Count; i += 4)
#pragma unroll
                for (int e = i; e < i + 2; ++e) {
                    s[e] = Part::has(i) ? exp2_of(s[e] * scale.factor - shift) : 0;
                    if (Part::has(i)) sums[half] += s[e];
                }
        }
    }

    // Whether some of a warp's weights are too large. Their sums tell, and are needed anyway, so
    // nobody has to look for the largest score beforehand.
    __device__ bool any_too_large(const float (&sums)[2]) const {
        return __any_sync(0xffffffffu, !fit(sums));
    }
    // Whether none of this thread's weights is too large. Here and below, conditions are joined by
    // & and |, because && and || would become branches.
    __device__ bool fit(const float (&sums)[2]) const {
        return sums[0] <= kLargestSum & sums[1] <= kLargestSum & have_maxima();
    }

    // Raises the maxima in that case, and shrinks the weights and their sums. Returns false if it
    // cannot, because some weights are beyond floats.
    template <int Count>
    __device__ bool shrink_weights(float (&s)[Count], float (&sums)[2], float (&shrink)[2]) {
        float largest[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) largest[half] = lanes_max<4>(largest_weight(s, half));
        const bool known = fmaxf(largest[0], largest[1]) < kAlmostInfinity & have_maxima();
        if (!__all_sync(0xffffffffu, known)) return false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& row = rows[half];
            shrink[half] = row.raise_max(row.max + log2_of(largest[half]) - kHeadroom);
            sums[half] *= shrink[half];
        }
        rescale(s, shrink);
        return true;
    }

    __device__ void add(const float (&sums)[2]) {
        rows[0].sum += sums[0];
        rows[1].sum += sums[1];
    }

  private:
    __device__ bool have_maxima() const {
        return rows[0].max > negative_infinity() & rows[1].max > negative_infinity();
    }

    // The largest of this thread's weights in a row.
    template <int Count>
    __device__ static float largest_weight(const float (&s)[Count], int half) {
        float largest = 0;
#pragma unroll
        for (int i = 2 * half; i < Count; i += 4) largest = fmaxf(largest, fmaxf(s[i], s[i + 1]));
        return largest;
    }

    // Whether one of this thread's products in a row may exceed the maximum by more than the slack.
    template <int Count>
    __device__ bool exceeds(const float (&s)[Count], int half, Scale scale) const {
        const float limit = (scale.before_lowering(rows[half].max) + kSlack) * scale.inverse;
        return !(limit >= 0) | (largest_bits(s, half) > __float_as_int(limit));
    }

    // The bits of the largest of this thread's products in a row, or of a negative one if all are
    // negative. Floats compare like integers unless both are negative, and one instruction compares
    // three integers.
    template <int Count>
    __device__ static int largest_bits(const float (&s)[Count], int half) {
        int largest = __float_as_int(s[2 * half]);
#pragma unroll
        for (int i = 2 * half; i < Count; i += 4) {
            largest = max(max(largest, __float_as_int(s[i])), __float_as_int(s[i + 1]));
        }
        return largest;
    }

    // The largest score of a row's first tile, usually found by the bits of products. Where a mask
    // may leave a row few keys, that attempt would fail.
    template <class Part, int Count>
    __device__ static float first_largest(const float (&s)[Count], int half, Scale scale) {
        if constexpr (!kRangeMask && !kAlibi) {
            const float product = lanes_max<4>(__int_as_float(largest_bits(s, half)));
            const bool found = scale.factor > 0 && product >= 0;
            if (__builtin_expect(__all_sync(0xffffffffu, found), true))
                return product * scale.factor;
        }
        return lanes_max<4>(largest_of<Part>(s, half, scale));
    }

    // A vote, so that the sign of the factor is not tested for each product.
    template <class Part, int Count>
    __device__ static float largest_of(const float (&s)[Count], int half, Scale scale) {
        float largest = negative_infinity();
        if (__builtin_expect(__any_sync(0xffffffffu, scale.factor < 0), false)) {
#pragma unroll
            for (int i = 2 * half; i < Count; i += 4) {
                if (Part::has(i)) largest = fmaxf(largest, fmaxf(-s[i], -s[i + 1]));
            }
        } else {
#pragma unroll
            for (int i = 2 * half; i < Count; i += 4) {
                if (Part::has(i)) largest = fmaxf(largest, fmaxf(s[i], s[i + 1]));
            }
        }
        return scale.lower(largest * fabsf(scale.factor));
    }
};
