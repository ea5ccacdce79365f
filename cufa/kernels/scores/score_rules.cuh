// What a call may do element by element between Q K^T and the softmax, and between the softmax and
// V: soft cap, bias, ALiBi, the caller's functions, masks, dropout. All kernels that support these
// use this, except that Hopper's kernels in 8 and 16 bits shape scores in wgmma_softmax.cuh and
// key_softmax.cuh.
#pragma once

#include "scores/dropout.cuh"
#include "scores/head_numbers.cuh"
#include "scores/key_mask.cuh"
#include "softmax/online_softmax.cuh"

// Whether scores may only be computed for keys that are seen, as others have no bias. What a
// function reads is read for all, at once.
constexpr bool kReadsSeen = kBias && !kScoreMod;

// The rules of one head of one sequence. Rows and keys are numbered from the sequence's first.
struct ScoreRules {
    Mask mask;
    const Features& features;
    int batch, head;
    acc_t scale;
    acc_t alibi_slope;
    Matrix<const bias_t> bias;
    KeyMask key_mask;
    unsigned int matrix;  // the number of this head's matrix of scores, over all sequences

    template <class Params>
    __device__ ScoreRules(const Params& params, const Sequence& sequence, int head)
        : mask(sequence.mask(params.features)),
          features(params.features),
          batch(sequence.batch),
          head(head),
          scale(params.softmax_scale),
          matrix(matrix_number(params.sizes, sequence.batch, head)) {
        if constexpr (kAlibi) alibi_slope = alibi_slope_of(features, sequence.batch, head);
        if constexpr (kBias) bias = matrix_of<const bias_t>(features.bias, sequence.batch, head);
        if constexpr (kMaskBits != 0) key_mask = KeyMask(features, sequence.batch, head);
    }

    // The score of a product, in log 2. With a bias, the key must be in the sequence. Here
    // and below, with RowInside and KeyInside they are known to be in the sequence.
    template <bool RowInside = false, bool KeyInside = RowInside>
    __device__ acc_t score(acc_t product, SplitIndex row, SplitIndex key) const {
        if constexpr (!kShapedScores) return product * (scale * acc_t(kLog2E));
        if constexpr (kScoreMod) {
            const SplitIndex q_idx = inside<RowInside>(row), kv_idx = inside_key<KeyInside>(key);
            const acc_t score = unmodified(product, int(row), int(kv_idx));
            return modified_score(features, score, batch, head, q_idx, kv_idx) * acc_t(kLog2E);
        }
        return unmodified(product, int(row), int(key)) * acc_t(kLog2E);
    }

    // The derivative of a score by the product times the scale.
    __device__ acc_t slope(acc_t product) const {
        if constexpr (!kSoftcap) return 1;
        const acc_t bounded = tanh_of(product * scale * softcap_reciprocal());
        return 1 - bounded * bounded;
    }

    // The derivative of the caller's function by the score that it gets.
    template <bool RowInside = false, bool KeyInside = RowInside>
    __device__ acc_t modified_slope_at(acc_t product, SplitIndex row, SplitIndex key) const {
        const SplitIndex q_idx = inside<RowInside>(row), kv_idx = inside_key<KeyInside>(key);
        const acc_t score = unmodified(product, int(row), int(kv_idx));
        return modified_slope(features, score, batch, head, q_idx, kv_idx);
    }

    // The derivatives by the array elements that the function reads.
    template <bool RowInside = false, bool KeyInside = RowInside>
    __device__ void element_slopes_at(acc_t product, SplitIndex row, SplitIndex key,
                                      ElementSlope* slopes) const {
        const SplitIndex q_idx = inside<RowInside>(row), kv_idx = inside_key<KeyInside>(key);
        const acc_t score = unmodified(product, int(row), int(kv_idx));
        element_slopes(features, score, batch, head, q_idx, kv_idx, slopes);
    }

    // Whether the caller's function shows the key to the row. With Inside, neither is past an end.
    template <bool Inside = false>
    __device__ bool function_shows(int row, int key) const {
        if constexpr (Inside) return mod_sees(features, batch, head, row, key);
        return mod_sees(features, batch, head, inside(row), inside_key(key));
    }
    // Whether both the function and the caller's mask show it.
    template <bool Inside>
    __device__ bool shows(int row, int key) const {
        bool shown = true;
        if constexpr (kMaskMod) shown = function_shows<Inside>(row, key);
        if constexpr (kMaskBits != 0)
            shown &=
                Inside ? key_mask.shows(row, key) : key_mask.shows(inside(row), inside_key(key));
        return shown;
    }
    // Whether the row sees the key. Both may be past the ends.
    __device__ bool sees(int row, int key) const {
        if (kMaskMod && !function_shows(row, key)) return false;
        if (!mask.in_range(row, key)) return false;
        return kMaskBits == 0 || key_mask.shows(row, key);
    }
    // The same for a key with an even number, in bit 0, and the next key, in bit 1.
    __device__ unsigned int sees_two(int row, int key) const {
        unsigned int seen = mask.in_range(row, key) | mask.in_range(row, key + 1) << 1;
        if constexpr (kMaskMod) {
            seen &= function_shows(row, key) | function_shows(row, key + 1) << 1;
        }
        if (kMaskBits == 1 && seen) seen &= key_mask.row(row)[key / 8] >> key % 8;
        if constexpr (kMaskBits == 8) {
            if (seen & 1) seen ^= key_mask.row(row)[key] == 0;
            if (seen & 2) seen ^= (key_mask.row(row)[key + 1] == 0) << 1;
        }
        return seen;
    }

    // Whether dropout keeps a probability.
    __device__ bool keeps(int row, int key) const {
        return kept_of_eight(features, matrix, row, key).has(row, key);
    }

  private:
    // Like other templates, this one is not compiled where it is not called: a void bias_t has no
    // elements.
    template <class T>
    __device__ static acc_t element(const Matrix<const T>& matrix, int row, int key) {
        return static_cast<acc_t>(to_acc(matrix.row(row)[key]));
    }

    __device__ acc_t softcap() const { return features.softcap; }
    __device__ acc_t softcap_reciprocal() const { return features.softcap_reciprocal; }

    // Tiles have rows and keys past the sequence's end, whose scores nobody reads. They get the
    // place of the last row or key. This is cheaper than to skip reads, because what several scores
    // need is read once.
    __device__ int inside(int row) const { return min(row, mask.seqlen_q - 1); }
    __device__ int inside_key(int key) const { return min(key, mask.seqlen_k - 1); }
    template <bool Inside>
    __device__ SplitIndex inside(SplitIndex row) const {
        if constexpr (Inside) return row;
        return inside(int(row));
    }
    template <bool Inside>
    __device__ SplitIndex inside_key(SplitIndex key) const {
        if constexpr (Inside) return key;
        return inside_key(int(key));
    }

    // The score before the caller's function. The soft cap is that of Gemma 2 (Gemma Team 2024).
    __device__ acc_t unmodified(acc_t product, int row, int key) const {
        acc_t score = product * scale;
        if constexpr (kSoftcap) score = softcap() * tanh_of(score * softcap_reciprocal());
        return score + added(row, key);
    }
    __device__ acc_t added(int row, int key) const {
        acc_t sum = 0;
        if constexpr (kBias) sum += element(bias, inside(row), key);
        if constexpr (kAlibi) {
            const int distance = mask.diagonal(row) - key;
            sum -= alibi_slope * static_cast<acc_t>(distance < 0 ? -distance : distance);
        }
        return sum;
    }
};

// Ends a row, which Lanes threads share. Returns the factor that turns its weighted sum of values
// into the output.
template <int Lanes>
__device__ inline acc_t end_row(OnlineSoftmax& softmax, const ScoreRules& rules) {
    softmax.total<Lanes>();
    acc_t factor = 1;
    if constexpr (kSink) factor = softmax.add(sink_log2_of(rules.features, rules.head));
    if constexpr (kDropout) factor *= kept_scale(rules.features);
    return factor * softmax.normalizer();
}
