// The rules of a call for the scores of fwd_5_mma: which are seen, what they become, which are
// dropped.
#pragma once

#include "call/key_tiles.cuh"
#include "mma/fwd_5_block.cuh"
#include "scores/kept_scores.cuh"
#include "scores/mask_sixteens.cuh"

// The keys of a lane's scores that a row sees: one bit each, or a range, from its beginning to its
// end relative to the lane's first key; with kKeyBits both, where a bit is one of the tile's keys.
struct SeenOfRow {
    using Bits = RowBits<kKeyBits ? kBlockN / kWordKeys : 1>;
    Bits bits;
    int begin = 0, end = 0;

    __device__ bool at(int n, int e) const {
        const int key = n * kMmaN + e;
        if constexpr (kKeyBits) {
            const unsigned int of_lane = bits.of[key / kWordKeys] >> fragment_col(0, 0);
            if (!(of_lane >> key % kWordKeys & 1)) return false;
        } else if constexpr (kKeyMask) {
            return bits.of[0] >> (2 * n + e) & 1;
        }
        return kRowsAlike || (key < end && (!kWindow || key >= begin));
    }
};

// The keys of a lane's scores that their rows see. A mask is read at once, so that there is one
// wait for all of it, and kept as one bit per score.
class SeenScores {
  public:
    // `seen_keys` is a Seen.
    template <class SeenKeys>
    __device__ SeenScores(const SeenKeys& seen_keys, const ScoreRules& rules, int first_row,
                          int first_key, bool masked)
        : rules(rules), first_row(first_row), first_key(first_key) {
        if (!kKeyMask || !masked) return;
        if constexpr (kKeyBits) {
            bits[0][0] = seen_keys.of_tile(first_key);
        } else if (kMaskAlone && lies_in_sixteens(rules, first_key, kBlockN)) {
            read_mask();
        } else {
            ask();
        }
    }

    __device__ SeenOfRow of_row(int m, int half) const {
        const SeenOfRow::Bits& of_row = bits[m % kTilesApart][half % kHalvesApart];
        if constexpr (kRowsAlike || (kKeyMask && !kKeyBits)) return {of_row};
        // Rows past the end may see any key: they are not written.
        if constexpr (!kCutTiles) {
            const int own = ptx::anew(threadIdx.x) % 4 * 2;  // fragment_col, but in no register
            return {{}, 0, rules.mask.seqlen_k - first_key - own};
        }
        const int lanes_first = fragment_col(first_key, 0);
        const int row = first_row + row_of(m, half);
        return {of_row, rules.mask.first_key(row) - lanes_first,
                rules.mask.keys_end(row) - lanes_first};
    }

    // Zeroes those values, among the ones that the thread has copied, of which no row sees the key.
    __device__ void clear_copied_values(Smem& smem) const {
        const auto shown = [&](int key) { return bits[0][0].has(key); };
        clear_copied_rows<kThreads, kValueDim>(smem.v, shown);
    }

  private:
    static_assert(!kKeyMask || kBlockN / kMmaN * 2 <= 32, "a word has bits for 128 keys");
    // Those of a lane's rows that have bits of their own.
    static constexpr int kTilesApart = kKeyBits ? 1 : kTiles, kHalvesApart = kKeyBits ? 1 : 2;

    __device__ void read_mask() {
        MaskOfQuery<kBlockN> rows[kTiles][2];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                rows[m][half].load(rules, first_row + row_of(m, half), first_key);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + row_of(m, half);
                rows[m][half].look(bits[m][half].of[0], rules.mask, row, first_key);
            }
    }

    __device__ void ask() {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned int seen = 0;
#pragma unroll
                for (int n = 0; n < kBlockN / kMmaN; ++n) {
                    const int row = first_row + row_of(m, half), key = fragment_col(first_key, n);
                    seen |= rules.sees_two(row, key) << 2 * n;
                }
                bits[m][half].of[0] = seen;
            }
    }

    const ScoreRules& rules;
    int first_row, first_key;
    SeenOfRow::Bits bits[kTilesApart][kHalvesApart];
};

// Turns products into scores by the call's rules. Scores of keys that a row does not see become
// -inf. With Masked, there may be such keys, also past the end.
template <bool Masked>
__device__ inline void apply(const ScoreRules& rules, Scores& s, const SeenScores& seen,
                             int first_row, int first_key) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const SeenOfRow of_row = seen.of_row(m, half);
#pragma unroll
            for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int row = first_row + row_of(m, half);
                    const SplitIndex key(fragment_col(first_key, 0), n * kMmaN + e);
                    acc_t& score = s[m][n][2 * half + e];
                    const bool hidden = Masked && !of_row.at(n, e);
                    if constexpr (kShapedScores && !kReadsSeen)
                        score = rules.score<false, !Masked>(score, row, key);
                    if (hidden) {
                        score = negative_infinity();
                    } else if constexpr (kReadsSeen) {
                        score = rules.score(score, row, key);
                    }
                }
        }
}
__device__ inline void apply(const ScoreRules& rules, Scores& s, const SeenScores& seen,
                             int first_row, int first_key, bool masked) {
    if (masked) {
        apply<true>(rules, s, seen, first_row, first_key);
    } else if constexpr (kShapedScores) {
        apply<false>(rules, s, seen, first_row, first_key);
    }
}

// Drops probabilities at random.
__device__ inline void drop(const ScoreRules& rules, Scores& p, int first_row, int first_key) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
        KeptScores<kBlockN / 2, false> kept;
        kept.draw(rules.features, rules.matrix, first_row + row_of(m, 0),
                  fragment_col(first_key, 0));
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i)
            if (!kept.has(i)) p[m][i / 4][i % 4] = 0;
    }
}
