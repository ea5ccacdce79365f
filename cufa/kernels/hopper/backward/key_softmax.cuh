// The softmax and its gradient in the registers of a warpgroup with S^T and dP^T of 64 keys.
#pragma once

#include "hopper/alibi_line.cuh"
#include "hopper/backward/hidden_keys.cuh"
#include "hopper/backward/key_bias.cuh"
#include "hopper/backward/key_statistics.cuh"
#include "hopper/wgmma_products.cuh"
#include "scores/head_numbers.cuh"
#include "scores/kept_scores.cuh"
#include "scores/mask_sixteens.cuh"

// Whether a score's derivative by the scaled product, its slope, may differ from 1.
constexpr bool kSlopes = kSoftcap || (kScoreMod && kScoreModSlopes);
// Whether slopes depend on places alone: then they are computed where they are needed.
constexpr bool kSlopesOfPlaces = kSlopes && !kSoftcap && !kSlopeAsksScore;

// Whether ALiBi's line is added in two parts: one with the LSE, the rest in the exponential.
constexpr bool kAlibiLine = kAlibi && kScoresBeginWithLse;

// The place of a tile of queries.
struct TilePlace {
    const Features& features;
    int batch, head, first_row;
};

// What a product becomes, and the derivative by the product times the scale.
struct ShapedScore {
    float score, slope;
};

// For a warpgroup's 64 keys and a tile of BlockM queries.
template <int BlockM>
struct KeySoftmax {
    float scale_log2;  // turns products, or the scores made of them, into log 2
    float product_scale, softcap;
    int key[2], last_row;           // a thread's two keys, or the last one; the last row of all
    int row_of_key;                 // the row on the diagonal at the first of the keys
    int first_row[2], rows_end[2];  // the rows that see a thread's two keys
    int query;                      // the first of a thread's two queries in each eight of a tile
    unsigned int seen[kHidesScores ? ceil_div(BlockM, 64) : 1];  // scores of a tile, a bit for each
    AlibiLine line;                                              // of a tile, in units of products
    KeptScores<BlockM / 2, true> kept;                           // of a tile

    KeySoftmax() = default;
    __device__ KeySoftmax(const BackwardParams& call, const Mask& mask, int first_key)
        : scale_log2((kScoresBeginWithLse ? scale_of_scores(call) : 1) * float(kLog2E)),
          query(col_of_thread()) {
        if constexpr (kSoftcap) softcap = call.features.softcap;
        if constexpr (!kScoresBeginWithLse) product_scale = call.softmax_scale;
        if constexpr (kSoftcap) product_scale = call.softmax_scale / call.features.softcap;
        last_row = mask.seqlen_q - 1;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_of_warp() + half * 8 + threadIdx.x % 32 / 4;
            const int key = first_key + row;
            first_row[half] = key < mask.seqlen_k ? mask.first_row(key) : mask.seqlen_q + BlockM;
            if constexpr (kRowsEnd) rows_end[half] = mask.rows_end(key);
            this->key[half] = min(key, mask.seqlen_k - 1);
            if (kAlibi && half == 0) row_of_key = mask.row_at(key);
        }
    }

    // Hides those of a thread's keys that a mask hides from all rows.
    __device__ void hide_keys(const KeyMask& mask) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!mask.shows(0, this->key[half])) first_row[half] = last_row + 1 + BlockM;
        }
    }

    // Sets the line of a tile, if ALiBi uses one.
    __device__ void find_line(const TilePlace& place) {
        if constexpr (!kAlibiLine) return;
        constexpr int kLastQuery = BlockM - 7;
        const float slope = alibi_slope_of(place.features, place.batch, place.head) *
                            (float(kLog2E) * ptx::reciprocal_fast(scale_log2));
        const int distance = place.first_row + query - row_of_key;
        line = AlibiLine(slope, distance - 8, distance + kLastQuery);
    }

    // S^T and dP^T start from what is to be subtracted from them. Hold them before a product is
    // issued: otherwise some would be read only then, and the product would wait.
    __device__ void begin_scores(WgmmaSums<BlockM>& s, const RowStatistics<BlockM>& rows) const {
        if constexpr (kScoresBeginWithLse) begin<kAlibiLine>(s, rows.minus_lse);
    }
    __device__ void begin_gradients(WgmmaSums<BlockM>& dp,
                                    const RowStatistics<BlockM>& rows) const {
        begin<false>(dp, rows.minus_d);
    }

    // One of a thread's two keys, or the last key of all. Tiles that are not Masked have all keys.
    template <bool Masked>
    __device__ SplitIndex key_at(int half) const {
        if constexpr (Masked) return key[half];
        return {key[0], half * 8};
    }

    // Finds out which scores of a tile are seen, by the caller's mask or function. The warp's keys
    // begin at `warp_key`.
    __device__ void find_seen(const TilePlace& place, const ScoreRules& rules, int warp_key) {
        if constexpr (kMaskAlone) {
            if (lies_in_sixteens(rules, warp_key, 16)) {
                MaskOfKeys<BlockM> mask;
                mask.load(rules, place.first_row, warp_key);
                return mask.look(seen, rules.mask, place.first_row, warp_key);
            }
        }
        for (unsigned int& word : seen) word = 0;
#pragma unroll
        for (int i = 0; i < BlockM / 2; ++i) {
            const int row = place.first_row + query + i / 4 * 8 + i % 2;
            seen[i / 32] |= sees(place, row, i % 4 / 2) << i % 32;
        }
    }

    // Draws which weights of a tile dropout keeps. The warpgroup's keys begin at `first_key`.
    __device__ void draw_kept(const TilePlace& place, unsigned int matrix, int first_key) {
        kept.draw(place.features, matrix, first_key + row_of_thread(), place.first_row + query);
    }
    // The weights that dropout keeps, as an operand.
    __device__ void round_kept(WgmmaOperand<BlockM>& operand, const WgmmaSums<BlockM>& p) const {
        round_to_operand<BlockM>(operand, p);
        if constexpr (kDropout) drop(operand);
    }
    __device__ void drop(WgmmaOperand<BlockM>& operand) const { kept.drop(operand); }

    // Turns products into scores, with a soft cap.
    __device__ void bound(WgmmaSums<BlockM>& s) const {
#pragma unroll
        for (int i = 0; i < BlockM / 2; ++i) s[i] = softcap * tanh_of(s[i] * product_scale);
    }

    // The bias of a tile, if it is read from memory.
    template <class T>
    __device__ BiasInMemory<T> bias_in_memory(const TilePlace& place) const {
        if constexpr (is_same<T, void>) {
            return {};
        } else {
            return {matrix_of<const T>(place.features.bias, place.batch, place.head),
                    place.first_row,
                    last_row,
                    {key[0], key[1]}};
        }
    }

    // Turns products into scores: soft cap, bias and the caller's function.
    template <bool Masked, class Bias>
    __device__ void shape(WgmmaSums<BlockM>& s, const Bias& bias, const TilePlace& place) const {
        shape<Masked>(s, bias, place, [](int, const WgmmaSums<kWgmmaK>&) {});
    }
    // The same, and writes the slopes to a warp's rows of `slopes`.
    template <bool Masked, class Bias, class Tile>
    __device__ void shape(WgmmaSums<BlockM>& s, const Bias& bias, Tile& slopes, int warp_row,
                          const TilePlace& place) const {
        shape<Masked>(s, bias, place, [&](int col, const WgmmaSums<kWgmmaK>& of_sixteen) {
            WgmmaOperand<kWgmmaK> rounded;
            // One that is infinite would make a NaN of a weight of 0.
            round_to_operand<kWgmmaK, operand_t, true>(rounded, of_sixteen);
            write_rows<kWgmmaK>(slopes, rounded, warp_row, col);
        });
    }

    // Turns the gradient of the scores into that of the products times the scale, with slopes that
    // depend on places.
    template <bool Masked>
    __device__ void apply_slopes(WgmmaSums<BlockM>& ds, const TilePlace& place) const {
#pragma unroll
        for (int i = 0; i < BlockM / 2; ++i) {
            ds[i] *= modified_slope(place.features, 0, place.batch, place.head,
                                    row_at<Masked>(i, place), key_at<Masked>(i % 4 / 2));
            if (Masked && !sees(i, place)) ds[i] = 0;
        }
    }
    // The same with the slopes that `shape` wrote. Afterwards the memory of the slopes is free.
    template <class Tile>
    __device__ static void apply_slopes(WgmmaSums<BlockM>& ds, Tile& slopes, int warp_row) {
        __syncwarp();
#pragma unroll
        for (int col = 0; col < BlockM; col += kWgmmaK) {
            WgmmaOperand<kWgmmaK> rounded;
            WgmmaSums<kWgmmaK> part;
            read_rows<kWgmmaK>(rounded, slopes, warp_row, col);
            widen_operand<kWgmmaK>(part, rounded);
#pragma unroll
            for (int i = 0; i < kWgmmaK / 2; ++i) ds[col / 2 + i] *= part[i];
        }
        __syncwarp();
    }

    // S^T becomes P^T = 2^(S^T - LSE).
    template <bool Masked>
    __device__ void exponentiate(WgmmaSums<BlockM>& s, const RowStatistics<BlockM>& rows,
                                 int tile) const {
        const int distance = tile * BlockM + query - row_of_key;
        if (kAlibiLine && line.bent) bend(s, distance);
        float lowered[2] = {};  // how much the line lowers all scores of a key
        if constexpr (kAlibiLine) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                lowered[half] = line.step * (distance - 8 * half) * scale_log2;
        }
#pragma unroll
        for (int i = 0; i < BlockM / 8; ++i) {
            Pack<float, 2> shift = {};
            if constexpr (!kScoresBeginWithLse) shift = pair_at(rows.minus_lse, i);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& x = s[4 * i + e];
                x = exp2_of(x * scale_log2 + (shift[e % 2] - lowered[e / 2]));
                if (Masked && !sees(i, e, tile)) x = 0;
            }
        }
    }

    // Turns dP^T - D into dS^T = P^T o (dP^T - D), with P^T as computed or rounded. Where dropout
    // drops P^T, dP^T is 0. With Slopes, the result is the gradient not of capped scores but of the
    // products times the scale; P^T must then not be rounded.
    template <bool Masked, bool Slopes, class P>
    __device__ void differentiate(WgmmaSums<BlockM>& dp, const P& p,
                                  const RowStatistics<BlockM>& rows, int tile) const {
#pragma unroll
        for (int i = 0; i < BlockM / 4; ++i) {
            const Pack<float, 2> weights = pair_of(p, i);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = dp[2 * i + e];
                if constexpr (kDropout) {
                    if (!kept.has(2 * i + e)) x = pair_at(rows.minus_d, i / 2)[e];
                }
                x *= weights[e];
                if constexpr (Slopes) x *= slope_at(weights[e], pair_at(rows.minus_lse, i / 2)[e]);
                if (Masked && !sees(i / 2, i % 2 * 2 + e, tile)) x = 0;
            }
        }
    }

    // Whether a row sees one of the thread's two keys, where the caller's mask or function may hide
    // keys.
    __device__ bool sees(const TilePlace& place, int row, int half) const {
        const int inside = min(row, last_row);
        bool shown = mod_sees(place.features, place.batch, place.head, inside, key[half]);
        if constexpr (kHidesScores && kMaskBits != 0)
            shown &= KeyMask(place.features, place.batch, place.head).shows(inside, key[half]);
        return shown && in_range(row, half);
    }

    // Whether element i of a thread's scores has a row that sees its key.
    __device__ bool sees(int i, const TilePlace& place) const {
        if constexpr (kHidesScores) return seen[i / 32] >> i % 32 & 1;
        return in_range(place.first_row + query + i / 4 * 8 + i % 2, i % 4 / 2);
    }

  private:
    // The row of element i of a thread's scores, or the last row of all.
    template <bool Masked>
    __device__ SplitIndex row_at(int i, const TilePlace& place) const {
        const SplitIndex row(place.first_row + query, i / 4 * 8 + i % 2);
        if constexpr (Masked) return min(int(row), last_row);
        return row;
    }

    // Whether a row sees one of the thread's two keys, by the range of rows alone.
    __device__ bool in_range(int row, int half) const {
        return row >= first_row[half] && (!kRowsEnd || row < rows_end[half]);
    }

    static constexpr int kEights = RowStatistics<BlockM>::kEights;

    // Calls use_slopes(first of 16 queries, their slopes).
    template <bool Masked, class Bias, class UseSlopes>
    __device__ void shape(WgmmaSums<BlockM>& s, const Bias& bias, const TilePlace& place,
                          const UseSlopes& use_slopes) const {
#pragma unroll
        for (int col = 0; col < BlockM; col += kWgmmaK) {
            SixteenBiases added = {};
            bias.read(added, col);
            WgmmaSums<kWgmmaK> slopes;
#pragma unroll
            for (int i = 0; i < kWgmmaK / 2; ++i) {
                float& x = s[col / 2 + i];
                const auto shaped = shaped_score<Masked>(x, added[i], col / 2 + i, place);
                x = shaped.score;
                slopes[i] = shaped.slope;
            }
            use_slopes(col, slopes);
        }
    }

    // Bends the line where it crosses the diagonal.
    __device__ void bend(WgmmaSums<BlockM>& s, int distance) const {
        const float distances[] = {float(distance), float(distance - 8)};
#pragma unroll
        for (int i = 0; i < BlockM / 2; ++i)
            line.bend(s[i], distances[i / 2 % 2] + (i / 4 * 8 + i % 2));
    }

    // Elements 2i and 2i + 1 of a thread's weights.
    __device__ static Pack<float, 2> pair_of(const WgmmaSums<BlockM>& p, int i) {
        return {p[2 * i], p[2 * i + 1]};
    }
    __device__ static Pack<float, 2> pair_of(const WgmmaOperand<BlockM>& p, int i) {
        unsigned int pair = p[i / 4][i % 4];
        ptx::hold(pair);  // or all pairs would be widened before dP is there
        return {to_acc(scalar_t{static_cast<unsigned short>(pair)}),
                to_acc(scalar_t{static_cast<unsigned short>(pair >> 16)})};
    }

    // 1 - tanh^2, or 0 where the tanh is not known.
    __device__ static float slope(float tanh) { return fmaxf(1 - tanh * tanh, 0); }
    // The same for a score whose P is known: it was log2 P + LSE. Where P is 0, so is the slope.
    __device__ float slope_at(float p, float minus_lse) const {
        return slope((ptx::log2_fast(p) - minus_lse) * (float(kLn2) / softcap));
    }
    // The score of element i of a thread's products. If the row does not see the key the slope is
    // 0, whatever a function makes of the score.
    template <bool Masked>
    __device__ ShapedScore shaped_score(float product, float bias, int i,
                                        const TilePlace& place) const {
        ShapedScore shaped = {product * product_scale, 1};
        if constexpr (kSoftcap) {
            const float tanh = tanh_of(shaped.score);
            shaped = {softcap * tanh, slope(tanh)};
        }
        if constexpr (kBias) shaped.score += bias;
        if constexpr (kAlibi) shaped.score -= alibi(i, place);
        if constexpr (kScoreMod) {
            const auto& [features, batch, head, first_row] = place;
            const SplitIndex q_idx = row_at<Masked>(i, place);
            const SplitIndex kv_idx = key_at<Masked>(i % 4 / 2);
            shaped.slope *= modified_slope(features, shaped.score, batch, head, q_idx, kv_idx);
            shaped.score = modified_score(features, shaped.score, batch, head, q_idx, kv_idx);
            if (Masked && !sees(i, place)) shaped.slope = 0;
        }
        return shaped;
    }
    // What ALiBi subtracts from element i of a thread's scores.
    __device__ float alibi(int i, const TilePlace& place) const {
        const int distance = place.first_row + query + i / 4 * 8 + i % 2 - row_of_key;
        const float slope = alibi_slope_of(place.features, place.batch, place.head);
        return slope * fabsf(distance - i % 4 / 2 * 8);
    }
    // Starts sums from a value for each row and, WithLine, a part of the line.
    template <bool WithLine>
    __device__ void begin(WgmmaSums<BlockM>& sums, const float (&values)[BlockM]) const {
        constexpr int kRows = 2 * kEights;  // of a thread, adjacent in memory
#pragma unroll
        for (int i = 0; i < BlockM / 8 / kEights; ++i) {
            const auto* const own = values + i * kEights * 8 + query * kEights;
            auto rows = *reinterpret_cast<const Pack<float, kRows>*>(own);
            if constexpr (WithLine) {
#pragma unroll
                for (int e = 0; e < kRows; ++e)
                    rows[e] -= line.step * ((i * kEights + e / 2) * 8 + e % 2);
            }
#pragma unroll
            for (int e = 0; e < 2 * kRows; ++e) sums[2 * kRows * i + e] = rows[e / 4 * 2 + e % 2];
        }
    }
    __device__ Pack<float, 2> pair_at(const float (&values)[BlockM], int i) const {
        const float* const own = values + i / kEights * kEights * 8 + query * kEights;
        return *reinterpret_cast<const Pack<float, 2>*>(own + i % kEights * 2);
    }
    // Whether element 4i + e of a thread's scores has a row that sees its key.
    __device__ bool sees(int i, int e, int tile) const {
        if constexpr (kHidesScores) return seen[i / 8] >> (i * 4 + e) % 32 & 1;
        const int row = i * 8 + e % 2, first = tile * BlockM + query;
        return row >= first_row[e / 2] - first && (!kRowsEnd || row < rows_end[e / 2] - first);
    }
};
