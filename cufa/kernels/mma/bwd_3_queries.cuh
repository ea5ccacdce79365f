// The blocks of bwd_3_mma that own queries and compute dQ, where every run must give the same bits.
#pragma once

#include "mma/bwd_3_copies.cuh"
#include "mma/mma_nonfinite.cuh"

// The gradients of a warp's queries, in its part of the head dims.
struct QueryGradients {
    Accumulators<kTiles, kHeadPart> dq;
    RowStats stats[kTiles][2];

    __device__ void load_stats(const QueryHead& head, const Place& place, int first_query) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int query = first_query + place.row(m, half);
                const bool inside = query < head.rules.mask.seqlen_q;
                stats[m][half] = inside ? head.stats[query] : RowStats{};
            }
    }

    // Processes one tile of keys: dQ += dS K.
    __device__ void attend(QuerySmem& smem, int stage, const ScoreRules& rules, const Place& place,
                           int first_query, int first_key, bool masked) {
        const QueryRows tile{smem, rules, place, first_query, first_key};
        const SeenScores<QueryRows> seen(tile, masked);
        Scores s = {}, dp = {};
        product_of(s, smem.q, smem.k[stage], place);
        product_of(dp, smem.dout, smem.v[stage], place);
        const auto stats_of = [&](Element at) { return stats[at.m][at.half]; };
        const auto nothing_else = [](Element, acc_t, const ScoreGradient&) {};
        if (masked) {
            differentiate<true>(s, dp, tile, seen, stats_of, nothing_else);
        } else {
            differentiate<false>(s, dp, tile, seen, stats_of, nothing_else);
        }
        const bool cut =
            kCutTiles && masked && __syncthreads_or(finds_nonfinite<kThreads>(smem.k[stage]));
        if (kSplit > 1 || cut) {
            store_scores(smem.ds, dp, place);
            __syncthreads();  // dS is whole
        }
        const int first_col = place.part * kHeadPart;
        if (cut) {
            add_seen<kTiles, kHeadPart>(
                dq, smem.k[stage], place.first_row, first_col, [&](int query, int key) {
                    const bool seen = rules.sees(first_query + query, first_key + key);
                    return seen ? smem.ds.at(query, key) : nullptr;
                });
        } else if constexpr (kSplit == 1) {
            add_product_pn<kTiles, kColumns, kHeadPart>(dq, dp, smem.k[stage]);
        } else {
            add_product_nn<kTiles, kHeadPart>(dq, smem.ds, place.first_row, smem.k[stage],
                                              first_col);
        }
    }

    __device__ void write(const BackwardParams& params, const QueryTile& own,
                          const Place& place) const {
        const auto rows = own.sequence.queries<scalar_t>(params.dq, own.head);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = own.first_row + place.row(m, half);
                if (row >= own.sequence.seqlen_q) continue;
                store_row<kHeadDim>(rows.row(row), dq[m], half, params.softmax_scale,
                                    place.part * kHeadPart);
            }
    }
};
