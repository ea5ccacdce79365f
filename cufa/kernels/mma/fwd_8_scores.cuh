// The rules of a call for the scores of fwd_8_split_kv: which are seen, and what they become.
#pragma once

#include "call/key_tiles.cuh"
#include "mma/fwd_8_rows.cuh"
#include "scores/mask_sixteens.cuh"

// The scores that a mask or the caller's function shows, one bit for each of a lane's, of a team's
// next tiles. A mask in memory is read at once and a tile ahead of that, so that nobody waits for
// it.
class SeenScores {
  public:
    static constexpr int kAhead = kStages - 1;  // tiles that are copied while one is attended to

    // What the first tiles show, and starts to read what the next one does. Without a tile there
    // may be no key, which the caller's function could be asked about.
    __device__ SeenScores(const WarpRows& rows, int first_tile, int end_tile) {
        if constexpr (kKeyMask) {
            if (first_tile >= end_tile) return;
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                load(rows, (first_tile + i * kTeams) * kBlockN);
                look(rows, (first_tile + i * kTeams) * kBlockN, i);
            }
            load(rows, (first_tile + kAhead * kTeams) * kBlockN);
        }
    }

    // Finds out what the tile kAhead tiles on shows; returns whether the lane sees any of it.
    __device__ bool look_ahead(const WarpRows& rows, int first_key) {
        return look(rows, first_key, kAhead);
    }
    // Starts to read what the tile after that one shows.
    __device__ void load(const WarpRows& rows, int first_key) {
        if constexpr (!kMaskAlone) return;
        bool lies = true;
        for_each_row(rows, [&](int, int, const ScoreRules& rules, int) {
            lies &= lies_in_sixteens(rules, first_key, kBlockN);
        });
        in_sixteens = __all_sync(0xffffffffu, lies);
        if (!in_sixteens) return;
        for_each_row(rows, [&](int m, int half, const ScoreRules& rules, int query) {
            masks[m][half].load(rules, query, first_key);
        });
    }
    // Goes on to the next tile.
    __device__ void advance() {
        if constexpr (kKeyMask) {
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
#pragma unroll
                for (int m = 0; m < kTiles; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) bits[i][m][half] = bits[i + 1][m][half];
        }
    }

    // Of the tile that is attended to.
    __device__ bool at(int m, int half, int n, int e) const {
        return bits[0][m][half] >> (2 * n + e) & 1;
    }

  private:
    static_assert(!kKeyMask || kBlockN / kMmaN * 2 <= 32, "a word has bits for 128 keys");

    template <class Take>
    __device__ static void for_each_row(const WarpRows& rows, const Take& take) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                take(m, half, rows[m].rules[half], rows[m].query[half]);
    }

    // Of the tile that was loaded last, if a mask is read.
    __device__ bool look(const WarpRows& rows, int first_key, int ahead) {
        unsigned int any = 0;
        for_each_row(rows, [&](int m, int half, const ScoreRules& rules, int query) {
            unsigned int& word = bits[ahead][m][half];
            if (kMaskAlone && in_sixteens) {
                masks[m][half].look(word, rules.mask, query, first_key);
            } else {
                word = 0;
#pragma unroll
                for (int n = 0; n < kBlockN / kMmaN; ++n)
                    word |= rules.sees_two(query, fragment_col(first_key, n)) << 2 * n;
            }
            any |= word;
        });
        return any != 0;
    }

    MaskOfQuery<kBlockN> masks[kTiles][2];
    unsigned int bits[kAhead + 1][kTiles][2];
    bool in_sixteens;
};

// Turns products into scores. Scores of keys that a row does not see become -inf. With KeysInside,
// no key is past the end.
template <bool KeysInside>
__device__ inline void apply(Scores& s, const WarpRows& rows, const SeenScores& seen, int first_key,
                             bool masked) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const ScoreRules& rules = rows[m].rules[half];
            const int query = rows[m].query[half];
            const auto sees = [&](int n, int e, int key) {
                if constexpr (kKeyMask) return seen.at(m, half, n, e);
                return rules.sees(query, key);
            };
#pragma unroll
            for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const SplitIndex key(fragment_col(first_key, 0), n * kMmaN + e);
                    acc_t& score = s[m][n][2 * half + e];
                    const bool hidden = masked && !sees(n, e, int(key));
                    if constexpr (!kReadsSeen)
                        score = rules.score<false, KeysInside>(score, query, key);
                    if (hidden) {
                        score = negative_infinity();
                    } else if constexpr (kReadsSeen) {
                        score = rules.score(score, query, key);
                    }
                }
        }
}
