// The backward's tile of scores: a warp's part of it, the rows and keys of its scores, and their
// gradients.
#pragma once

#include "gradients/score_gradients.cuh"
#include "mma/mma_products.cuh"
#include "scores/kept_scores.cuh"
#include "scores/mask_sixteens.cuh"
#include "softmax/exp2_table.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kSplit = SPLIT, kMaxSplit = 4;
constexpr int kThreads = THREADS, kWarps = kThreads / 32, kBlocksPerSm = BLOCKS_PER_SM;
// A block owns kBlockN rows of scores and walks over tiles of kBlockM columns. kSplit warps share
// rows and divide the columns. Where these are fewer than one fragment for each warp, kScoreSplit
// warps divide them, and others compute the same scores.
constexpr int kTiles = kBlockN / (kWarps / kSplit * kMmaM);
constexpr int kScoreSplit = min_of(kSplit, kBlockM / kMmaN);
constexpr int kColumns = kBlockM / kScoreSplit;
static_assert(kTiles * (kWarps / kSplit) * kMmaM == kBlockN,
              "a warp must own whole 16-row tiles of keys");
static_assert(kColumns % kMmaN == 0, "a warp must own whole fragments of columns");

// Steps of products that are unrolled. With three blocks per SM, a thread has 168 registers; with
// 512 threads, 128.
constexpr bool kFewRegisters = kBlocksPerSm * kThreads >= 512 || (kTf32 && kBlocksPerSm >= 3);
constexpr int kSteps = kFewRegisters ? min_of(kStepsAtOnce, 2) : kStepsAtOnce;
// The same for S^T and dP^T. If a warp has a single fragment, a step is one mma: many steps are
// needed to hide the latency of their operands.
constexpr int kScoreSteps = kColumns < kMmaK ? 16 : kSteps;

// Whether all queries that share a key see the same of a mask: then it hides whole keys, of which
// those who own them ask once; and whether they see the same keys of a tile.
constexpr bool kHidesKeys = HIDES_KEYS, kQueriesAlike = kHidesKeys && !kRangeMask;

using Scores = Accumulators<kTiles, kColumns>;
// Smaller than the forward's: there is less room.
using Powers = Exp2Table<acc_t, 7>;

// A warp's place: its rows of what the block owns, and its part of columns and head dims.
struct Place {
    int first_row, part, g, t;

    __device__ explicit Place(unsigned int thread = threadIdx.x)
        : first_row(thread / 32 / kSplit * kTiles * kMmaM),
          part(thread / 32 % kSplit),
          g(thread % 32 / 4),
          t(thread % 4) {}

    // The row of a lane's half (0: row g, 1: row g + 8) of its fragments m.
    __device__ int row(int m, int half) const { return first_row + m * kMmaM + half * 8 + g; }
    // The first column of its scores.
    __device__ int first_col() const { return part % kScoreSplit * kColumns; }
    // The first of the two columns that a lane has of fragment n.
    __device__ int col(int n) const { return first_col() + n * kMmaN + 2 * t; }
    // Whether the scores are its own, not those that another warp has too.
    __device__ bool owns_scores() const { return kScoreSplit == kSplit || part < kScoreSplit; }
};

// One of a lane's scores: element e of a half of fragment (m, n).
struct Element {
    int m, n, half, e;
};

// The scores of a tile: the block's own rows from first_row on, and the columns from first_col on.
// Rows are keys, as in key_tiles, or queries.
template <bool RowsAreKeys>
struct TileOfScores {
    static constexpr bool kRowsAreKeys = RowsAreKeys;
    static constexpr int kKeys = RowsAreKeys ? kBlockN : kBlockM;
    const Powers& exp2;
    const ScoreRules& rules;
    const Place& place;
    int first_row, first_col;
    unsigned int shown_rows;  // with kAsksOnce, bit_of each of the lane's rows that the mask shows

    static constexpr bool kAsksOnce = RowsAreKeys && kHidesKeys;
    __device__ static unsigned int bit_of(int m, int half) { return 1u << (2 * m + half); }

    __device__ SplitIndex row(Element at) const {
        return {first_row + place.row(0, 0), at.m * kMmaM + at.half * 8};
    }
    __device__ SplitIndex col(Element at) const {
        return {first_col + place.col(0), at.n * kMmaN + at.e};
    }
    __device__ SplitIndex query(Element at) const { return RowsAreKeys ? col(at) : row(at); }
    __device__ SplitIndex key(Element at) const { return RowsAreKeys ? row(at) : col(at); }

    __device__ int first_key() const { return RowsAreKeys ? first_row : first_col; }

    __device__ bool sees(Element at) const {
        const int of_query = int(query(at)), of_key = int(key(at));
        if constexpr (!kAsksOnce) return rules.sees(of_query, of_key);
        return (shown_rows & bit_of(at.m, at.half)) && rules.mask.in_range(of_query, of_key);
    }

    // The scores of fragments m that dropout keeps.
    using Kept = KeptScores<kColumns / 2, RowsAreKeys>;
    __device__ void draw_kept(Kept& kept, int m) const {
        const Element first = {m, 0, 0, 0};
        kept.draw(rules.features, rules.matrix, int(row(first)), int(col(first)));
    }
};
using KeyRows = TileOfScores<true>;
using QueryRows = TileOfScores<false>;

// Which of a lane's scores have a row that sees the key. A mask in memory is read before the
// products, so that there is one wait for all of it, and kept as one bit per score.
template <class Tile>
class SeenScores {
  public:
    __device__ SeenScores(const Tile& tile, bool masked) : tile(tile) {
        if (!kKeepsBits || !masked) return;
        if (kInSixteens && lies_in_sixteens(tile.rules, tile.first_key(), Tile::kKeys)) {
            if constexpr (Tile::kRowsAreKeys) {
                read_mask_of_keys();
            } else {
                read_mask_of_queries();
            }
        } else {
            ask();
        }
    }

    __device__ bool at(Element at) const {
        if constexpr (!kKeepsBits) return tile.sees(at);
        const int bit = at.n % kWordFragments * 4 + 2 * at.half + at.e;
        return bits[at.m][at.n / kWordFragments] >> bit & 1;
    }

  private:
    static constexpr bool kKeepsBits = kKeyMask && !Tile::kAsksOnce;
    static constexpr int kWordFragments = 8;  // of four scores each
    // Whether the warp's keys begin at a multiple of 16, whichever part of the columns it has.
    static constexpr bool kInSixteens = kMaskAlone && (Tile::kRowsAreKeys || kColumns % 16 == 0);
    const Tile& tile;
    unsigned int bits[kTiles][ceil_div(kColumns / kMmaN, kWordFragments)];

    // Adds some of the four bits of fragment (m, n); with `first`, a word is cleared before its
    // first fragment.
    __device__ void add(int m, int n, unsigned int some, bool first) {
        unsigned int& word = bits[m][n / kWordFragments];
        word = (first && n % kWordFragments == 0 ? 0 : word) | some << n % kWordFragments * 4;
    }

    // The warp's first row of fragments m, and its first column.
    __device__ int row_of(int m) const { return tile.first_row + tile.place.first_row + m * kMmaM; }
    __device__ int first_col() const { return tile.first_col + tile.place.first_col(); }

    __device__ void read_mask_of_keys() {
        MaskOfKeys<kColumns> masks[kTiles];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) masks[m].load(tile.rules, first_col(), row_of(m));
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
            masks[m].look(bits[m], tile.rules.mask, first_col(), row_of(m));
    }

    __device__ void read_mask_of_queries() {
        MaskOfQuery<kColumns> masks[kTiles][2];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                masks[m][half].load(tile.rules, row_of(m) + half * 8 + tile.place.g, first_col());
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int query = row_of(m) + half * 8 + tile.place.g;
                masks[m][half].look(tile.rules.mask, query, first_col(),
                                    [&](int n, unsigned int seen) {
                                        add(m, n, (seen & 3) << 2 * half, half == 0);
                                        add(m, n + 1, (seen >> 2) << 2 * half, false);
                                    });
            }
    }

    __device__ void ask() {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int n = 0; n < kColumns / kMmaN; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) add(m, n, tile.sees({m, n, e / 2, e % 2}) << e, e == 0);
    }
};

// Turns S into P, and dP into the gradient of the products. Where a row does not see a key, both
// are set to zero rather than computed: an LSE of -inf or a NaN in the key must have no effect.
// `add_up` adds to the other gradients, score by score.
template <bool Masked, class Tile, class StatsOf, class AddUp>
__device__ inline void differentiate(Scores& s, Scores& dp, const Tile& tile,
                                     const SeenScores<Tile>& seen, const StatsOf& stats_of,
                                     const AddUp& add_up) {
    // A block's own queries may be past the end, whatever masks do.
    constexpr bool kRowInside = !Masked && Tile::kRowsAreKeys;
    typename Tile::Kept kept[kTiles];
    if constexpr (kDropout) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) tile.draw_kept(kept[m], m);
    }
#pragma unroll
    for (int n = 0; n < kColumns / kMmaN; ++n)
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    // The second half goes first where this saves work (array_gradients.cuh).
                    const Element at = {m, n, kArrayGradients ? 1 - half : half, e};
                    const SplitIndex query = tile.query(at), key = tile.key(at);
                    const int i = 2 * at.half + e;
                    const bool is_seen = !Masked || seen.at(at);
                    ScoreGradient gradient;
                    // Only a bias must not be read where nothing is seen.
                    if (is_seen || !kBias || kScoreMod) {
                        gradient = score_gradient<kRowInside, !Masked>(
                            tile.exp2, tile.rules, s[m][n][i], dp[m][n][i], query, key,
                            stats_of(at), kDropout && kept[m].has(4 * n + i));
                    }
                    if (!is_seen) gradient = {};
                    if (is_seen) add_up(at, s[m][n][i], gradient);
                    s[m][n][i] = gradient.p;
                    dp[m][n][i] = gradient.product;
                }
        }
}

// The product of a warp's rows and its columns.
template <class Rows, class Columns>
__device__ inline void product_of(Scores& s, const Rows& rows, const Columns& columns,
                                  const Place& place) {
    add_product_nt<kTiles, kColumns, kScoreSteps>(s, rows, place.first_row, columns,
                                                  place.first_col());
}

// P or dS as products take it. If they take it from registers, and rounding halves these registers,
// it is rounded at once: the search for NaN before the products needs some.
__device__ inline decltype(auto) weights_of(const Scores& scores) {
    if constexpr (kSplit == 1 && sizeof(scalar_t) == 2) {
        return LeftStrip<kTiles, kColumns>(scores);
    } else {
        return (scores);
    }
}

template <class Tile, class Values>
__device__ inline void store_scores(Tile& tile, const Values& scores, const Place& place) {
    if (place.owns_scores())
        store_tile<kTiles, kColumns>(tile, scores, place.first_row, place.first_col());
}
