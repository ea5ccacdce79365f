// The blocks of bwd_3_mma that own keys: dK, dV and their part of dQ.
#pragma once

#include "call/query_tiles.cuh"
#include "gradients/array_gradients.cuh"
#include "mma/bwd_3_copies.cuh"
#include "mma/mma_nonfinite.cuh"

// A tile of queries in shared memory, among those before `end`. The next tile to copy is `step`
// further on. `number` counts tiles, for handovers.
struct QueriesAt {
    int stage, first, step, end, number;
};

// The part of a tile of dQ that a warp computes.
struct QueryPlace {
    int first_row = threadIdx.x / 32 % kQueryRows * kQueryTiles * kMmaM;
    int first_col = threadIdx.x / 32 / kQueryRows * kQueryCols;
};

// The keys that a block owns, and its part of the query heads, counted over all KV heads. Blocks
// that own the same keys are adjacent, as are those that own whole heads of a sequence.
__device__ inline KeyTile keys_of_block(const BackwardParams& params, int block = blockIdx.x) {
    if constexpr (kWholeHeads) {
        const int head = block / kParts, kv_heads = params.sizes.kv_heads;
        return {Sequence(params, head / kv_heads), head % kv_heads, 0};
    }
    return key_tile_of_block<kBlockN>(params, block / kParts);
}
__device__ inline int part_of_block(const KeyTile& own) {
    return own.kv_head * kParts + blockIdx.x % kParts;
}

// The mask of a block's keys, where all queries that share them see the same.
__device__ inline KeyMask mask_of_keys(const BackwardParams& params, const KeyTile& own) {
    const int first_head = part_of_block(own) * heads_of_part(params.sizes);
    return KeyMask(params.features, own.sequence.batch, first_head);
}

// Which of a block's keys it shows: of a lane's rows as in KeyRows, and whether some are shown to
// any query, and all to all.
struct ShownKeys {
    unsigned int of_lane = 0;
    bool some = true, all = !kKeyMask;

    __device__ ShownKeys(const BackwardParams& params, const KeyTile& own, const Place& place) {
        if constexpr (kHidesKeys) {
            constexpr unsigned int kWhole = (1ull << 2 * kTiles) - 1;
            const KeyMask mask = mask_of_keys(params, own);
            // Without queries there is nothing to read: nobody asks.
            const int end = own.sequence.seqlen_q > 0 ? own.sequence.seqlen_k : 0;
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int key = own.first_key + place.row(m, half);
                    if (key < end && mask.shows(0, key)) of_lane |= KeyRows::bit_of(m, half);
                }
            some = __syncthreads_or(of_lane != 0);
            all = !__syncthreads_or(of_lane != kWhole);
        }
    }
};

// The gradients of a warp's keys, in its part of the head dims.
struct KeyGradients {
    Accumulators<kTiles, kHeadPart> dk;
    Accumulators<kTiles, kValuePart> dv;
    PendingSums<2 * kTiles> of_arrays;

    // Processes one tile of queries.
    __device__ void attend(KeySmem& smem, const QueryHead& head, const Place& place,
                           const QueriesAt& at, int first_key, unsigned int shown_keys,
                           bool masked) {
        // Where a mask cuts tiles, key numbers are recomputed, not kept in registers in between.
        const int first_row = kCutTiles ? ptx::anew(first_key) : first_key;
        const KeyRows tile{smem, head.rules, place, first_row, at.first, shown_keys};
        const SeenScores<KeyRows> seen(tile, masked);
        Scores s = {}, dp = {};
        if constexpr (kHandsOver) smem.queries[at.stage].wait_whole(at.number / kStages);
        if constexpr (kWholeHeads) find_row_stats(smem, at.stage);
        product_of(s, smem.k, smem.q[at.stage], place);
        product_of(dp, smem.v, smem.dout[at.stage], place);
        if constexpr (kWholeHeads) __syncthreads();  // the statistics are there
        const bool nonfinite =
            kTakesOut && masked &&
            (has_nonfinite<kTiles, kColumns>(s) || has_nonfinite<kTiles, kColumns>(dp));
        const auto stats_of = [&](Element score) {
            return smem.rows[at.stage][place.col(score.n) + score.e];
        };
        if (masked) {
            differentiate<true>(s, dp, tile, seen, stats_of, AddToArrays<true>{*this, head, tile});
        } else {
            const AddToArrays<false> add_up{*this, head, tile};
            differentiate<false>(s, dp, tile, seen, stats_of, add_up);
            if constexpr (kSumsDiagonals) add_diagonals(dp, head, tile);
        }
        const auto& p = weights_of(s);
        const auto& ds = weights_of(dp);
        const bool found = kTakesOut && masked && __syncthreads_or(nonfinite);
        if (found) take_out(smem, at.stage);
        if constexpr (kHandsOver) {
            multiply_in_turn(s, dp, smem, head, place, at);
        } else {
            multiply(p, ds, smem, head, place, at);
        }
        if (!found) return;
        if constexpr (kHandsOver) {
            put_back_anew(smem, head, tile, at.first);
        } else {
            put_back(smem, head, tile, at.first);
        }
    }

    __device__ void write(KeySmem& smem, const BackwardParams& params, const KeyTile& own,
                          unsigned int shown_keys) {
        const Place place(ptx::anew(threadIdx.x));  // recomputed, so that no register keeps it
        if constexpr (kUsedKeys || kHidesKeys) clear_unused(place, own, shown_keys);
        scale<kTiles, kHeadPart>(dk, params.softmax_scale);
        store_tile<kTiles, kHeadPart>(smem.k, dk, place.first_row, place.part * kHeadPart);
        store_tile<kTiles, kValuePart>(smem.v, dv, place.first_row, place.part * kValuePart);
        __syncthreads();
        const auto to_dk = own.sequence.keys<scalar_t>(params.dk, own.kv_head);
        const auto to_dv = own.sequence.keys<scalar_t>(params.dv, own.kv_head);
        const int end = end_of_keys(params, own.sequence);
        write_tile<kThreads, kHeadDim>(smem.k, to_dk, own.first_key, end);
        write_tile<kThreads, kValueDim>(smem.v, to_dv, own.first_key, end);
    }

    // Writes dK and dV to the workspace, as a part of the heads.
    __device__ void write_part(const KeySums& sums, const BackwardParams& params,
                               const KeyTile& own, unsigned int shown_keys) {
        const Place place;
        if constexpr (kUsedKeys || kHidesKeys) clear_unused(place, own, shown_keys);
        const int end = end_of_keys(params, own.sequence);
        const long long first = sums.first_row(own.sequence.batch, own.sequence.first_k);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = own.first_key + place.row(m, half);
                if (key >= end) continue;
                acc_t* const row = sums.part_of(first, key, part_of_block(own));
                store_sums<KeySums::kKeyCols>(row, dk[m], half, place.part * kHeadPart);
                store_sums<KeySums::kValueCols>(row + KeySums::kKeyCols, dv[m], half,
                                                place.part * kValuePart);
            }
    }

  private:
    // Whether NaN and infinity must be kept from some of a tile's scores. If all queries see the
    // same keys, the others are zero, and so are their gradients at the end.
    static constexpr bool kTakesOut = kCutTiles && !kQueriesAlike;

    // Keys that are not used, or hidden, have no gradients, even if there is NaN in queries.
    __device__ void clear_unused(const Place& place, const KeyTile& own, unsigned int shown_keys) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool used = kHidesKeys
                                      ? shown_keys & KeyRows::bit_of(m, half)
                                      : own.first_key + place.row(m, half) < own.sequence.seqlen_k;
                if (used) continue;
                clear_rows(dk[m], half);
                clear_rows(dv[m], half);
            }
    }
    template <int Count>
    __device__ static void clear_rows(Fragment (&sums)[Count], int half) {
#pragma unroll
        for (Fragment& sum : sums) sum[2 * half] = sum[2 * half + 1] = 0;
    }

    // Whether elements that depend on distances alone get sums of diagonals. These are sums of dS,
    // which must be the gradient of the new scores.
    static constexpr bool kSumsDiagonals =
        kArrayGradients && any_of_distance() && !kScoreModSlopes && !kSoftcap;

    // Adds to the gradients of the arrays, score by score. With Masked, not all scores are seen.
    template <bool Masked>
    struct AddToArrays {
        KeyGradients& own;
        const QueryHead& head;
        const KeyRows& tile;

        __device__ void operator()(Element at, acc_t product, const ScoreGradient& gradient) const {
            if constexpr (kArrayGradients) {
                if (!tile.place.owns_scores()) return;
                ElementSlopes slopes;
                head.rules.template element_slopes_at<!Masked>(product, tile.query(at),
                                                               tile.key(at), slopes);
                own.of_arrays.template add<Masked || !kSumsDiagonals>(
                    head.arrays, 2 * at.m + at.e, 2 * at.m + at.half, slopes, gradient.modified);
            }
        }
    };

    __device__ void add_diagonals(const Scores& ds, const QueryHead& head, const KeyRows& tile) {
        if (!tile.place.owns_scores()) return;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
            const int first_query = tile.first_col + tile.place.first_col();
            const int first_key = tile.first_row + tile.place.first_row + m * kMmaM;
            add_to_elements_of_distances<kColumns>(
                of_arrays.of[2 * m], head.arrays, first_query, first_key,
                [&](int eight, int half, int e) { return ds[m][eight][2 * half + e]; },
                [&](ElementSlopes& slopes, SplitIndex q_idx, SplitIndex kv_idx) {
                    head.rules.template element_slopes_at<true>(0, q_idx, kv_idx, slopes);
                });
        }
    }

    // NaN and infinity are zero in the products. Rows and keys that see them already have NaN from
    // S or dP, except in dV, which gets it afterwards.
    __device__ static void take_out(KeySmem& smem, int stage) {
        clear_nonfinite<kThreads>(smem.q[stage]);
        clear_nonfinite<kThreads>(smem.dout[stage]);
        clear_nonfinite<kThreads>(smem.k);
        __syncthreads();
    }
    __device__ void put_back(KeySmem& smem, const QueryHead& head, const KeyRows& tile,
                             int first_query) {
        const int end = min(first_query + kBlockM, head.rules.mask.seqlen_q);
        const int part = tile.place.part;
        add_nonfinite<kHeadDim, kTiles, kHeadPart>(dk, head.q, first_query, end, part * kHeadPart,
                                                   tile);
        add_nonfinite<kValueDim, kTiles, kValuePart>(dv, head.dout, first_query, end,
                                                     part * kValuePart, tile);
        __syncthreads();  // every warp is done with K
        const KeyTile own = keys_of_block(head.params, ptx::anew(blockIdx.x));
        const auto k = own.sequence.keys<const scalar_t>(head.params.k, own.kv_head);
        copy_tile_anew<kHeadDim>(smem.k, k, tile.first_row, own.sequence.seqlen_k);
    }
    // The same with handovers. It recomputes all that it needs: it runs for few tiles, and values
    // kept for it would take registers that other tiles lack.
    __device__ void put_back_anew(KeySmem& smem, const QueryHead& head, const KeyRows& tile,
                                  int first_query) {
        const Sequence sequence(head.params, ptx::anew(head.rules.batch));
        const QueryHead again(head.params, sequence, ptx::anew(head.rules.head));
        Place place;
        place.first_row = ptx::anew(place.first_row);
        place.part = ptx::anew(place.part);
        put_back(smem, again,
                 {tile.exp2, again.rules, place, tile.first_row, tile.first_col, tile.shown_rows},
                 first_query);
        ptx::wait_copies();
        __syncthreads();  // K is there again
    }

    // dV += P^T dO, dK += dS^T Q and dQ += dS K, with handovers of Q, dO and dS.
    __device__ void multiply_in_turn(const Scores& p, const Scores& ds, KeySmem& smem,
                                     const QueryHead& head, const Place& place,
                                     const QueriesAt& at) {
        smem.gradients.wait_free(at.number);
        store_scores(smem.ds(), ds, place);
        smem.gradients.announce();
        add_product_pn<kTiles, kColumns, kValuePart>(dv, p, smem.dout[at.stage]);
        add_product_pn<kTiles, kColumns, kHeadPart>(dk, ds, smem.q[at.stage]);
        smem.queries[at.stage].release();

        smem.gradients.wait_whole(at.number);
        add_to_queries(smem, head, at);
        smem.gradients.release();
        const int next = at.first + at.step;
        if (next < at.end) head.hand_on(smem, at.number + kStages, next);
    }

    // dV += P^T dO, dK += dS^T Q and dQ += dS K.
    template <class Weights>
    __device__ void multiply(const Weights& p, const Weights& ds, KeySmem& smem,
                             const QueryHead& head, const Place& place, const QueriesAt& at) {
        const int stage = at.stage, next = at.first + at.step;
        const bool copies = kEarlyCopies && next < at.end;
        if constexpr (kSplit == 1) {
            if (!kOwnsQueries) store_scores(smem.ds(), ds, place);
            add_product_pn<kTiles, kColumns, kValuePart>(dv, p, smem.dout[stage]);
            add_product_pn<kTiles, kColumns, kHeadPart>(dk, ds, smem.q[stage]);
            if (!kOwnsQueries) __syncthreads();  // dS^T is whole, every warp is done with Q, dO
            if (copies) head.start_copy(smem, stage, next);
        } else {
            store_scores(smem.p(), p, place);
            if (!kEarlyCopies) store_scores(smem.ds(), ds, place);
            __syncthreads();  // P^T is whole
            add_product_nn<kTiles, kValuePart>(dv, smem.p(), place.first_row, smem.dout[stage],
                                               place.part * kValuePart);
            if constexpr (kEarlyCopies) {
                __syncthreads();  // every warp is done with P^T and dO
                if (copies) head.copy_gradients(smem, stage, next);
                store_scores(smem.ds(), ds, place);
                __syncthreads();  // dS^T is whole
            }
            add_product_nn<kTiles, kHeadPart>(dk, smem.ds(), place.first_row, smem.q[stage],
                                              place.part * kHeadPart);
            if (kEarlyCopies) __syncthreads();  // every warp is done with Q
            if (copies) head.copy_queries(smem, stage, next);
        }
        if constexpr (!kOwnsQueries) add_to_queries(smem, head, at);
    }

    // The columns of dQ that a warp computes at once.
    static constexpr bool kInSlices = kBlockN < kQueryCols * 2;
    static constexpr int kSliceCols = kInSlices ? kMmaK : kQueryCols;
    using QuerySlice = Accumulators<kQueryTiles, kSliceCols>;

    // dQ += dS K
    __device__ static void add_to_queries(KeySmem& smem, const QueryHead& head,
                                          const QueriesAt& at) {
        if (!kWholeHeads || head.sums_dq) {
            multiply_keys(smem, [&](QuerySlice& dq, int row, int col) {
                head.dq.template add<kQueryTiles, kSliceCols>(dq, at.first + row, col);
            });
            return;
        }
        auto& rounded = smem.q[at.stage];  // every warp is done with Q
        multiply_keys(smem, [&](QuerySlice& dq, int row, int col) {
            scale<kQueryTiles, kSliceCols>(dq, head.params.softmax_scale);
            store_tile<kQueryTiles, kSliceCols>(rounded, dq, row, col);
        });
        __syncthreads();
        const Sequence sequence(head.params, head.rules.batch);
        write_tile<kThreads, kHeadDim>(rounded,
                                       sequence.queries<scalar_t>(head.params.dq, head.rules.head),
                                       at.first, sequence.seqlen_q);
        // It may have NaN, by which the next queries would be multiplied.
        clear_padding<kThreads, kHeadDim>(rounded);
    }

    // dS K, of which `take` gets each slice and its place in the tile. Where dS^T takes fewer
    // registers than the sums, all of it is loaded, and sums are computed a few columns at a time.
    // They are taken while the next are computed.
    template <class Take>
    __device__ static void multiply_keys(KeySmem& smem, const Take& take) {
        const QueryPlace to;
        if constexpr (kInSlices) {
            // Wide heads and all of dS^T leave registers for one slice at a time. If a slice is one
            // step, they leave enough for four with 16-bit types; float64 spills anyway.
            constexpr bool kOneSlice = sizeof(scalar_t) != 8 && kHead > 128 && kBlockN > kMmaK;
            constexpr int kSlices = kQueryCols / kSliceCols;
            constexpr int kManySlices = sizeof(scalar_t) == 2 ? min_of(kSlices, 4) : kSlices;
            constexpr int kSlicesAtOnce = kOneSlice ? 1 : kManySlices;
            const LeftStrip<kQueryTiles, kBlockN> ds(smem.ds(), to.first_row);
#pragma unroll(kSlicesAtOnce)
            for (int col = 0; col < kQueryCols; col += kSliceCols) {
                QuerySlice dq = {};
                ds.template add_product_with<kSliceCols>(dq, smem.k, to.first_col + col);
                take(dq, to.first_row, to.first_col + col);
            }
        } else {
            QuerySlice dq = {};
            add_product_tn<kQueryTiles, kSliceCols, kQuerySteps>(dq, smem.ds(), to.first_row,
                                                                 smem.k, to.first_col);
            take(dq, to.first_row, to.first_col);
        }
    }
};

// The h-th query head of the block's part. The block's keys are looked up again, so that they take
// no registers while the block processes a head.
__device__ inline QueryHead query_head_of_block(const BackwardParams& params, int h) {
    const KeyTile own = keys_of_block(params, ptx::anew(blockIdx.x));
    const int first = part_of_block(own) * heads_of_part(params.sizes);
    return QueryHead(params, own.sequence, first + h);
}

// Sets rows [first, end) of dQ to zero: they see no key.
__device__ inline void clear_query_gradients(const QueryHead& head, int first, int end) {
    constexpr int kChunk = kChunkOfRow<scalar_t, kHeadDim>, kRowChunks = kHeadDim / kChunk;
    constexpr int kRowsAtOnce = 1 << 14;  // whose chunks 32 bits can count
    const Sequence sequence(head.params, head.rules.batch);
    const auto dq = sequence.queries<scalar_t>(head.params.dq, head.rules.head);
    do {
#pragma unroll 1
        for (int i = threadIdx.x; i < min(end - first, kRowsAtOnce) * kRowChunks; i += kThreads)
            *reinterpret_cast<Pack<scalar_t, kChunk>*>(dq.row(first + i / kRowChunks) +
                                                       i % kRowChunks * kChunk) = {};
        first += kRowsAtOnce;
    } while (first < end);
}

// The same for all rows outside of the tiles of queries, which see a key.
__device__ inline void clear_unseen_rows(const QueryHead& head, const QueryTiles<kBlockM>& tiles,
                                         int seqlen_q) {
    const int seeing = max(tiles.end - tiles.begin, 0);
    clear_query_gradients(head, 0, min(tiles.begin, seqlen_q));
    clear_query_gradients(head, tiles.begin + round_up(seeing, kBlockM), seqlen_q);
}

// What a head's tiles of queries add to the gradients, and what its dQ gets from the block's keys.
// `number` counts tiles over all heads.
__device__ inline void attend_head(KeyGradients& gradients, KeySmem& smem, const QueryHead& head,
                                   const Place& place, const QueryTiles<kBlockM>& tiles,
                                   int first_key, const ShownKeys& shown, int& number) {
    const auto next_seen = [&](int row) {
        return kSkipsQueries ? head.seen.next_row(row, tiles.end, first_key) : row;
    };
    const auto attend = [&](const QueriesAt& at) {
        const bool cut = kSkipsQueries ? head.seen.cuts(at.first, first_key) : !shown.all;
        gradients.attend(smem, head, place, at, first_key, shown.of_lane,
                         tiles.masked(at.first, cut));
    };
    if constexpr (kHandsOver) {
        walk_in_turn(
            tiles.begin, tiles.end, number, next_seen,
            [&](int number, int row) { head.hand_on(smem, number, row); },
            [&](int number, int row, int step) {
                attend({number % kStages, row, step, tiles.end, number});
            });
    } else {
        walk<kEarlyCopies>(
            tiles.begin, tiles.end, next_seen,
            [&](int stage, int row) { head.start_copy(smem, stage, row); },
            [&](int stage, int row, int step) { attend({stage, row, step, tiles.end}); });
    }
}

// Writes the gradients, or the block's part of them.
__device__ inline void write_gradients(KeyGradients& gradients, KeySmem& smem,
                                       const BackwardParams& params, int first_key,
                                       unsigned int shown_keys) {
    if constexpr (kArrayGradients) gradients.of_arrays.flush(Workspace(params).arrays);
    ptx::wait_copies();
    __syncthreads();  // every warp is done with K: dK and dV can go out through its memory
    KeyTile own = keys_of_block(params, ptx::anew(blockIdx.x));
    if constexpr (kWholeHeads) own.first_key = first_key;
    if constexpr (kParts > 1) {
        gradients.write_part(Workspace(params).key_sums, params, own, shown_keys);
    } else {
        gradients.write(smem, params, own, shown_keys);
    }
}

// Waits for K and V, and zeroes what each thread itself has copied of keys that the mask hides.
__device__ inline void clear_hidden_keys(KeySmem& smem, const BackwardParams& params,
                                         const KeyTile& own) {
    const KeyMask mask = mask_of_keys(params, own);
    const int last = own.sequence.seqlen_k - 1;
    const auto shown = [&](int row) { return mask.shows(0, min(own.first_key + row, last)); };
    ptx::wait_copies();
    clear_copied_rows<kThreads, kHeadDim>(smem.k, shown);
    clear_copied_rows<kThreads, kValueDim>(smem.v, shown);
}

// Of a block's keys: dK and dV, and what they add to dQ.
__device__ inline void attend_keys(KeySmem& smem, const BackwardParams& params,
                                   const KeyTile& own) {
    const Place place;
    const Sequence& sequence = own.sequence;
    const int kv_head = own.kv_head, first_key = own.first_key;
    copy_tile_anew<kHeadDim>(smem.k, sequence.keys<const scalar_t>(params.k, kv_head), first_key,
                             sequence.seqlen_k);
    copy_tile_anew<kValueDim>(smem.v, sequence.keys<const scalar_t>(params.v, kv_head), first_key,
                              sequence.seqlen_k);
    smem.init();

    KeyGradients gradients = {};
    QueryTiles<kBlockM> tiles(sequence.mask(params.features), first_key, kBlockN);
    const ShownKeys shown(params, own, place);
    if ((kWholeHeads && sequence.seqlen_k <= first_key) || !shown.some)
        tiles.end = 0;  // no query sees a key
    if (kQueriesAlike && shown.some && !shown.all) clear_hidden_keys(smem, params, own);
    if constexpr (kHandsOver) __syncthreads();  // the barriers are set up, and the powers are there
    int number = 0;
    for (int h = 0; h < heads_of_part(params.sizes); ++h) {
        const QueryHead head = query_head_of_block(params, h);
        if (kWholeHeads && !head.sums_dq) clear_unseen_rows(head, tiles, sequence.seqlen_q);
        attend_head(gradients, smem, head, place, tiles, first_key, shown, number);
    }
    write_gradients(gradients, smem, params, first_key, shown.of_lane);
}
