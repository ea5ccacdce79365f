// bwd_3_mma: FlashAttention-2's backward on tensor cores (Dao 2023, Algorithm 2).
//
// Change from bwd_2_flash_v2: mma.sync as in fwd_5_mma, and S and dP are computed transposed, S^T =
// K Q^T and dP^T = V dO^T. A warp owns rows of keys; P^T and dS^T are then left operands of dV +=
// P^T dO and dK += dS^T Q straight from the registers. Only dS^T goes to shared memory, for dQ = dS
// K. Where dK and dV are too wide for a warp's registers (SPLIT 2), two warps share the rows of
// keys: each computes half of the queries' columns of S^T and dP^T and owns half of the head dims
// of dK and dV. Blocks that own queries, where every run must give the same bits, do all of this
// with the parts of keys and queries exchanged. Where there are barriers to wait at for parts of a
// block's work (HANDS_OVER), warps hand Q, dO and dS on, and none waits for the slowest.
//
// Launches: row_sums (LSE and D, and the sums in the workspace set to zero), key_tiles, round_keys
// if heads are in parts, round_queries or, if deterministic, query_tiles; bias_gradient,
// array_gradients and sink_gradient if those are wanted.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     block: BLOCK_N keys of one KV head, for one of PARTS parts of the query heads that share
//          them, or as many queries of one head; warp: kTiles 16-row tiles of them
// Shared   K, V, STAGES Q and dO tiles with LSE and D, dS^T and, if SPLIT, P^T; or Q, dO, STAGES K
//          and V tiles and dS
// Global   workspace: sums of dQ in fragments (heads, tiles of queries, BLOCK_M, head_dim rounded
//          up), unless deterministic; sums of dK and dV (batch, seqlen_k, kv_heads, PARTS, dims in
//          eights), if there are parts; LSE and D (batch, heads, seqlen_q, 2); with a
//          mask or a mask_mod, which tiles of scores it shows; sums of the gradients of score_mod's
//          arrays and of the bias's, if those are wanted
// Writes   dQ, dK, dV
#include "array_gradients.cuh"
#include "bias_gradient.cuh"
#include "handover.cuh"
#include "key_sums.cuh"
#include "mma_nonfinite.cuh"
#include "mma_query_sums.cuh"
#include "mma_score_tiles.cuh"
#include "query_tiles.cuh"
#include "seen_tiles.cuh"
#include "sink_gradient.cuh"

constexpr int kStages = STAGES;
// How the warps share dQ: rows of queries first, then columns. Where all operands come from shared
// memory, which is then what there is least of, two 16-row tiles a warp load less for each product.
constexpr int kQueryRows =
    min_of(kWarps, kSplit > 1 && kBlockM > kMmaM ? kBlockM / (2 * kMmaM) : kBlockM / kMmaM);
constexpr int kQueryTiles = kBlockM / kMmaM / kQueryRows;
constexpr int kQueryParts = kWarps / kQueryRows;
// Head dims, padded so that all who share them have whole fragments; a warp's part of those of dK,
// dV and dQ.
constexpr int kHead = round_up(kHeadDim, kMmaK*(kSplit > kQueryParts ? kSplit : kQueryParts));
constexpr int kValue = round_up(kValueDim, kMmaK* kSplit);
constexpr int kHeadPart = kHead / kSplit, kValuePart = kValue / kSplit;
constexpr int kQueryCols = kHead / kQueryParts;
// Steps of dQ that are unrolled. While a warp has whole rows of dK and dV there are no registers
// for operands loaded far ahead: ptxas would spill others.
constexpr int kQuerySteps = kSplit == 1 ? min_of(kSteps, 4) : kStepsAtOnce;
// Where there is room for one tile of queries, the next one is copied as soon as the last product
// that needs a part of this one is done, if a barrier says when.
constexpr bool kEarlyCopies = kStages == 1 && (kSplit > 1 || !kDeterministic);
static_assert(kQueryRows * kQueryTiles * kMmaM == kBlockM,
              "the warps must share out the rows of dQ");
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "the host passes a different struct");

constexpr bool kHandsOver = HANDS_OVER;
static_assert(!kHandsOver || (kSplit == 1 && kStages == 2 && !kDeterministic),
              "warps hand on two tiles of queries, and dS where they do not share rows");

// Q with dO, and dS, as the warps hand them on, if they do.
template <bool Used>
struct QueryHandovers {
    Handover queries[kStages], gradients;

    __device__ void init() {
        if (threadIdx.x > 0) return;
        for (Handover& stage : queries) stage.init(THREADS, kWarps);
        gradients.init(kWarps, kWarps);
    }
};
template <>
struct QueryHandovers<false> {
    static constexpr NoHandover queries[kStages]{}, gradients{};

    __device__ void init() {}
};

struct KeySmem : Powers, QueryHandovers<kHandsOver> {
    MmaTile<kBlockN, kHead> k;
    MmaTile<kBlockN, kValue> v;
    MmaTile<kBlockM, kHead> q[kStages];
    MmaTile<kBlockM, kValue> dout[kStages];
    MmaTile<kBlockN, kBlockM> weights[kSplit > 1 && !kEarlyCopies ? 2 : 1];
    alignas(16) RowStats rows[kStages][kBlockM];

    __device__ void init() {
        Powers::init();
        QueryHandovers<kHandsOver>::init();
    }
    __device__ auto& ds() { return weights[0]; }  // dS^T
    // P^T, if it is shared: where there is one stage, until dS^T takes its place.
    __device__ auto& p() { return weights[sizeof(weights) / sizeof(weights[0]) - 1]; }
};

struct QuerySmem : Powers {
    MmaTile<kBlockN, kHead> q;
    MmaTile<kBlockN, kValue> dout;
    MmaTile<kBlockM, kHead> k[kStages];
    MmaTile<kBlockM, kValue> v[kStages];
    MmaTile<kBlockN, kBlockM> ds;
};

union Smem {
    KeySmem keys;
    QuerySmem queries;
    WarpSums<THREADS> warps;
};

using DqSums = QuerySums<kBlockM, kHead>;
// For blocks that own keys, and for those that own queries.
using SeenOfKeys = SeenTiles<kBlockM, kBlockN>;
using SeenOfQueries = SeenTiles<kBlockN, kBlockM>;

// The workspace's parts, each for all heads.
struct Workspace {
    acc_t* dq;
    KeySums key_sums;
    RowStats* stats;
    acc_t *arrays, *bias;
    SeenPart* seen;

    __device__ explicit Workspace(const BackwardParams& params) {
        dq = static_cast<acc_t*>(params.workspace);
        key_sums = {dq + (kDeterministic ? 0 : DqSums::rows(params.sizes) * kHead), params.sizes};
        stats = reinterpret_cast<RowStats*>(key_sums.data + KeySums::count(params.sizes));
        arrays = reinterpret_cast<acc_t*>(stats + rows_of_heads(params.sizes));
        seen = reinterpret_cast<SeenPart*>(arrays);
        constexpr int kTiles = sizeof(acc_t) / sizeof(SeenPart);
        arrays += (seen_tiles(params) + kTiles - 1) / kTiles;
        bias = arrays + array_sums(params.features);
    }

    __device__ SeenPart* seen_of_queries(const BackwardParams& params) const {
        return seen + SeenOfKeys::count(params);
    }
    // How many there are for either kind of blocks.
    __device__ static long long seen_tiles(const BackwardParams& params) {
        return SeenOfKeys::count(params) + (kDeterministic ? SeenOfQueries::count(params) : 0);
    }
};

// As copy_tile. Which rows and columns are a thread's, it works out anew for each copy, and needs
// no registers for them in between.
template <int Cols, class Tile>
__device__ inline void copy_rows(Tile& tile, Matrix<const scalar_t> source, int first_row,
                                 int end_row) {
    copy_tile<THREADS, Cols>(tile, source, first_row, end_row, ptx::anew(threadIdx.x));
}

// A query head of a sequence, as the loop over tiles of queries reads it.
struct QueryHead {
    const BackwardParams& params;
    ScoreRules rules;
    Matrix<const scalar_t> q, dout;
    const RowStats* stats;
    DqSums dq;
    acc_t* arrays;
    BiasSums bias;
    SeenOfKeys seen;

    __device__ QueryHead(const BackwardParams& params, const Sequence& sequence, int head)
        : params(params),
          rules(params, sequence, head),
          q(sequence.queries<const scalar_t>(params.q, head)),
          dout(sequence.queries<const scalar_t>(params.dout, head)),
          stats(Workspace(params).stats + sequence.first_row(head, params.sizes)),
          dq(Workspace(params).dq, params.sizes, sequence, head),
          arrays(Workspace(params).arrays),
          bias(params, sequence, head, Workspace(params).bias),
          seen(Workspace(params).seen, params, sequence, head) {}

    __device__ void start_copy(KeySmem& smem, int stage, int first_row) const {
        copy_queries(smem, stage, first_row);
        copy_gradients(smem, stage, first_row);
    }
    // The tile of that number, once all are done with the one before it in its place.
    __device__ void hand_on(KeySmem& smem, int number, int first_row) const {
        const int stage = number % kStages;
        smem.queries[stage].wait_free(number / kStages);
        start_copy(smem, stage, first_row);
        smem.queries[stage].announce_copies();
    }
    __device__ void copy_queries(KeySmem& smem, int stage, int first_row) const {
        copy_rows<kHeadDim>(smem.q[stage], q, first_row, rules.mask.seqlen_q);
    }
    // dO, and what else is not needed any more once P and dS are there.
    __device__ void copy_gradients(KeySmem& smem, int stage, int first_row) const {
        const int seqlen_q = rules.mask.seqlen_q;
        copy_rows<kValueDim>(smem.dout[stage], dout, first_row, seqlen_q);
#pragma unroll
        for (int rows = 0; rows < kBlockM; rows += THREADS) {
            const int i = rows + threadIdx.x, row = first_row + i;
            if (i < kBlockM)
                ptx::copy_async<sizeof(RowStats)>(&smem.rows[stage][i], stats + row,
                                                  row < seqlen_q);
        }
    }
};

// Walks over tiles of kBlockM rows from `begin` to `end`, with a mask those that next_seen
// finds, the copy of one under way while the one before is attended to. With EarlyCopies `attend`
// starts the next copy itself.
template <bool EarlyCopies, class NextSeen, class StartCopy, class Attend>
__device__ inline void walk(int begin, int end, const NextSeen& next_seen,
                            const StartCopy& start_copy, const Attend& attend) {
    int stage = 0, step = kBlockM;
    if constexpr (kKeyMask) begin = next_seen(begin);
    for (int row = begin; row < end; row += step) {
        if constexpr (kKeyMask) step = next_seen(row + kBlockM) - row;
        if (row == begin || (kStages == 1 && !EarlyCopies)) {
            __syncthreads();  // every warp is done with the tile before
            start_copy(stage, row);
        }
        ptx::wait_copies();
        __syncthreads();  // the tile is there, and every warp is done with the stage before and
                          // with dS
        if (kStages > 1 && row + step < end) start_copy((stage + 1) % kStages, row + step);
        attend(stage, row, step);
        stage = (stage + 1) % kStages;
    }
}

// The same where tiles are handed on: two are there or on their way, and attending to one starts
// the copy of the next but one. `number` counts the tiles of all heads.
template <class NextSeen, class HandOn, class Attend>
__device__ inline void walk_in_turn(int begin, int end, int& number, const NextSeen& next_seen,
                                    const HandOn& hand_on, const Attend& attend) {
    const auto seen_from = [&](int row) { return kKeyMask ? next_seen(row) : row; };
    int row = seen_from(begin), next = seen_from(row + kBlockM);
    if (row < end) hand_on(number, row);
    if (next < end) hand_on(number + 1, next);
    while (row < end) {
        const int next_but_one = seen_from(next + kBlockM);
        attend(number++, row, next_but_one - row);
        row = next;
        next = next_but_one;
    }
}

// A tile of queries in shared memory, of those before `end`; the next to be copied is `step`
// further on. `number` counts tiles where they are handed on.
struct QueriesAt {
    int stage, first, step, end, number;
};

// The part of a tile of dQ that a warp computes.
struct QueryPlace {
    int first_row = threadIdx.x / 32 % kQueryRows * kQueryTiles * kMmaM;
    int first_col = threadIdx.x / 32 / kQueryRows * kQueryCols;
};

// The keys that a block owns, and for which part of the query heads it works, of those of all KV
// heads. Blocks that own the same keys follow each other.
__device__ inline KeyTile keys_of_block(const BackwardParams& params, int block = blockIdx.x) {
    return key_tile_of_block<kBlockN>(params, block / kParts);
}
__device__ inline int part_of_block(const KeyTile& own) {
    return own.kv_head * kParts + blockIdx.x % kParts;
}

// The gradients of a warp's keys, in its part of the head dims.
struct KeyGradients {
    Accumulators<kTiles, kHeadPart> dk;
    Accumulators<kTiles, kValuePart> dv;
    PendingSums<2 * kTiles> of_arrays;

    // Takes in one tile of queries.
    __device__ void attend(KeySmem& smem, const QueryHead& head, const Place& place,
                           const QueriesAt& at, int first_key, bool masked) {
        // Where a mask cuts tiles, the numbers of their keys are kept in no registers in between.
        const int first_row = kCutTiles ? ptx::anew(first_key) : first_key;
        const KeyRows tile{smem, head.rules, place, first_row, at.first};
        const SeenScores<KeyRows> seen(tile, masked);
        Scores s = {}, dp = {};
        if constexpr (kHandsOver) smem.queries[at.stage].wait_whole(at.number / kStages);
        product_of(s, smem.k, smem.q[at.stage], place);
        product_of(dp, smem.v, smem.dout[at.stage], place);
        const bool nonfinite =
            kCutTiles && masked &&
            (has_nonfinite<kTiles, kColumns>(s) || has_nonfinite<kTiles, kColumns>(dp));
        const auto stats_of = [&](Element score) {
            return smem.rows[at.stage][place.col(score.n) + score.e];
        };
        const auto add_up = [&](Element score, acc_t product, const ScoreGradient& gradient) {
            const int query = tile.query(score), key = tile.key(score);
            if constexpr (kBiasGradient) head.bias.add(query, key, gradient.score);
            if constexpr (kArrayGradients) {
                ElementSlopes slopes;
                head.rules.element_slopes_at(product, query, key, slopes);
                of_arrays.add(head.arrays, 2 * score.m + score.e, 2 * score.m + score.half, slopes,
                              gradient.modified);
            }
        };
        if (masked) {
            differentiate<true>(s, dp, tile, seen, stats_of, add_up);
        } else {
            differentiate<false>(s, dp, tile, seen, stats_of, add_up);
        }
        const auto& p = weights_of(s);
        const auto& ds = weights_of(dp);
        const bool found = kCutTiles && masked && __syncthreads_or(nonfinite);
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

    __device__ void write(KeySmem& smem, const BackwardParams& params, const KeyTile& own) {
        const Place place(ptx::anew(threadIdx.x));  // which no registers are kept for until now
        scale<kTiles, kHeadPart>(dk, params.softmax_scale);
        store_tile<kTiles, kHeadPart>(smem.k, dk, place.first_row, place.part * kHeadPart);
        store_tile<kTiles, kValuePart>(smem.v, dv, place.first_row, place.part * kValuePart);
        __syncthreads();
        const auto to_dk = own.sequence.keys<scalar_t>(params.dk, own.kv_head);
        const auto to_dv = own.sequence.keys<scalar_t>(params.dv, own.kv_head);
        const int end = end_of_keys(params, own.sequence);
        write_tile<THREADS, kHeadDim>(smem.k, to_dk, own.first_key, end);
        write_tile<THREADS, kValueDim>(smem.v, to_dv, own.first_key, end);
    }

    // Writes them to the workspace, as those of a part of the heads.
    __device__ void write_part(const KeySums& sums, const BackwardParams& params,
                               const KeyTile& own) const {
        const Place place;
        const int end = end_of_keys(params, own.sequence);
        const int first = sums.first_row(own.sequence.batch, own.sequence.first_k);
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
    // What is NaN or infinite is zero in the products; those who see it have NaN from S or dP
    // already, but for dV, and are given it afterwards.
    __device__ static void take_out(KeySmem& smem, int stage) {
        clear_nonfinite<THREADS>(smem.q[stage]);
        clear_nonfinite<THREADS>(smem.dout[stage]);
        clear_nonfinite<THREADS>(smem.k);
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
        copy_rows<kHeadDim>(smem.k, k, tile.first_row, own.sequence.seqlen_k);
    }
    // The same where tiles are handed on. All that it needs it works out anew: it runs for few
    // tiles, and what is kept for it would be registers that the others lack.
    __device__ void put_back_anew(KeySmem& smem, const QueryHead& head, const KeyRows& tile,
                                  int first_query) {
        const Sequence sequence(head.params, ptx::anew(head.rules.batch));
        const QueryHead again(head.params, sequence, ptx::anew(head.rules.head));
        Place place;
        place.first_row = ptx::anew(place.first_row);
        place.part = ptx::anew(place.part);
        put_back(smem, again, {tile.exp2, again.rules, place, tile.first_row, tile.first_col},
                 first_query);
        ptx::wait_copies();
        __syncthreads();  // K is there again
    }

    // dV += P^T dO, dK += dS^T Q and dQ += dS K, where warps hand Q, dO and dS on.
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
        add_to_queries(smem, head.dq, at.first);
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
            if (!kDeterministic) store_scores(smem.ds(), ds, place);
            add_product_pn<kTiles, kColumns, kValuePart>(dv, p, smem.dout[stage]);
            add_product_pn<kTiles, kColumns, kHeadPart>(dk, ds, smem.q[stage]);
            if (!kDeterministic) __syncthreads();  // dS^T is whole, every warp is done with Q, dO
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
        if constexpr (!kDeterministic) add_to_queries(smem, head.dq, at.first);
    }

    // dQ += dS K. Where dS^T takes fewer registers than the sums, all of it is loaded, and there
    // are sums of a few columns at a time, which are added while the next are computed.
    __device__ static void add_to_queries(KeySmem& smem, const DqSums& sums, int first_query) {
        constexpr bool kInSlices = kBlockN < kQueryCols * 2;
        constexpr int kSliceCols = kInSlices ? kMmaK : kQueryCols;
        const QueryPlace to;
        if constexpr (kInSlices) {
            // Beside wide heads and all of dS^T there are registers for one slice at a time, unless
            // a slice is one step; float64 spills anyway.
            constexpr bool kOneSlice = sizeof(scalar_t) != 8 && kHead > 128 && kBlockN > kMmaK;
            constexpr int kSlicesAtOnce = kOneSlice ? 1 : kQueryCols / kSliceCols;
            const LeftStrip<kQueryTiles, kBlockN> ds(smem.ds(), to.first_row);
#pragma unroll(kSlicesAtOnce)
            for (int col = 0; col < kQueryCols; col += kSliceCols) {
                Accumulators<kQueryTiles, kSliceCols> dq = {};
                ds.add_product_with<kSliceCols>(dq, smem.k, to.first_col + col);
                sums.add<kQueryTiles, kSliceCols>(dq, first_query + to.first_row,
                                                  to.first_col + col);
            }
        } else {
            Accumulators<kQueryTiles, kSliceCols> dq = {};
            add_product_tn<kQueryTiles, kSliceCols, kQuerySteps>(dq, smem.ds(), to.first_row,
                                                                 smem.k, to.first_col);
            sums.add<kQueryTiles, kSliceCols>(dq, first_query + to.first_row, to.first_col);
        }
    }
};

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

    // Takes in one tile of keys: dQ += dS K.
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
            kCutTiles && masked && __syncthreads_or(finds_nonfinite<THREADS>(smem.k[stage]));
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
};

// Of the block's part of the query heads that share its keys the h-th. Which keys those are is
// found out anew, so that it takes no registers while the block works on a head.
__device__ inline QueryHead query_head_of_block(const BackwardParams& params, int h) {
    const KeyTile own = keys_of_block(params, ptx::anew(blockIdx.x));
    const int first = part_of_block(own) * heads_of_part(params.sizes);
    return QueryHead(params, own.sequence, first + h);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    row_sums(const __grid_constant__ BackwardParams params) {
    const Workspace workspace(params);
    write_row_stats<THREADS>(params, workspace.stats);
    const long long row = warp_of_grid<THREADS>();
    if (!kDeterministic && row < DqSums::rows(params.sizes)) {
        DqSums::clear_row(workspace.dq, row);
    }
    if constexpr (kBiasGradient) clear_bias_sums<THREADS>(params, workspace.bias);
    if constexpr (kArrayGradients)
        clear_sums<THREADS>(workspace.arrays, array_sums(params.features));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    seen_tiles(const __grid_constant__ BackwardParams params) {
    if constexpr (kKeyMask) {
        const Workspace workspace(params);
        const long long tile = warp_of_grid<THREADS>();
        const long long of_keys = SeenOfKeys::count(params);
        if (tile < of_keys) {
            SeenOfKeys::find(workspace.seen, params, tile);
        } else if (tile < Workspace::seen_tiles(params)) {
            SeenOfQueries::find(workspace.seen_of_queries(params), params, tile - of_keys);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    key_tiles(const __grid_constant__ BackwardParams params) {
    KeySmem& smem = shared_memory<Smem>().keys;
    const Place place;
    const KeyTile own = keys_of_block(params);
    const Sequence& sequence = own.sequence;
    const int kv_head = own.kv_head, first_key = own.first_key;
    const int keys_end = end_of_keys(params, sequence);
    if (kPacked && first_key >= keys_end) return;  // it is none of the sequence's tiles

    clear_padding<THREADS, kHeadDim>(smem.k);
    clear_padding<THREADS, kValueDim>(smem.v);
    for (int stage = 0; stage < kStages; ++stage) {
        clear_padding<THREADS, kHeadDim>(smem.q[stage]);
        clear_padding<THREADS, kValueDim>(smem.dout[stage]);
    }
    copy_rows<kHeadDim>(smem.k, sequence.keys<const scalar_t>(params.k, kv_head), first_key,
                        sequence.seqlen_k);
    copy_rows<kValueDim>(smem.v, sequence.keys<const scalar_t>(params.v, kv_head), first_key,
                         sequence.seqlen_k);
    smem.init();

    KeyGradients gradients = {};
    const QueryTiles<kBlockM> tiles(sequence.mask(params.features), first_key, kBlockN);
    if constexpr (kHandsOver) __syncthreads();  // the barriers are set up, and the powers there
    int number = 0;
    for (int h = 0; h < heads_of_part(params.sizes); ++h) {
        const QueryHead head = query_head_of_block(params, h);
        const auto next_seen = [&](int row) {
            return head.seen.next_row(row, tiles.end, first_key);
        };
        const auto attend = [&](const QueriesAt& at) {
            gradients.attend(smem, head, place, at, first_key,
                             tiles.masked(at.first, head.seen.cuts(at.first, first_key)));
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
    if constexpr (kArrayGradients) gradients.of_arrays.flush(Workspace(params).arrays);
    ptx::wait_copies();
    __syncthreads();  // every warp is done with K, and dK and dV can go out through its place
    const KeyTile done = keys_of_block(params, ptx::anew(blockIdx.x));
    if constexpr (kParts > 1) {
        gradients.write_part(Workspace(params).key_sums, params, done);
    } else {
        gradients.write(smem, params, done);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    round_keys(const __grid_constant__ BackwardParams params) {
    if constexpr (kParts > 1) add_parts<THREADS>(params, Workspace(params).key_sums);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    query_tiles(const __grid_constant__ BackwardParams params) {
    if constexpr (kDeterministic) {
        QuerySmem& smem = shared_memory<Smem>().queries;
        const Place place;
        const QueryTile own = query_tile_of_block<kBlockN>(params);
        const Sequence& sequence = own.sequence;
        const int first_row = own.first_row, seqlen_q = sequence.seqlen_q;
        if (kPacked && first_row >= seqlen_q) return;  // it is none of the sequence's tiles

        clear_padding<THREADS, kHeadDim>(smem.q);
        clear_padding<THREADS, kValueDim>(smem.dout);
        for (int stage = 0; stage < kStages; ++stage) {
            clear_padding<THREADS, kHeadDim>(smem.k[stage]);
            clear_padding<THREADS, kValueDim>(smem.v[stage]);
        }
        const QueryHead queries(params, sequence, own.head);
        copy_rows<kHeadDim>(smem.q, queries.q, first_row, seqlen_q);
        copy_rows<kValueDim>(smem.dout, queries.dout, first_row, seqlen_q);
        smem.init();

        QueryGradients gradients = {};
        gradients.load_stats(queries, place, first_row);
        const KeyTiles<kBlockM> tiles(queries.rules.mask, first_row, kBlockN);
        const SeenOfQueries seen(Workspace(params).seen_of_queries(params), params, sequence,
                                 own.head);
        const auto k = sequence.keys<const scalar_t>(params.k, own.kv_head);
        const auto v = sequence.keys<const scalar_t>(params.v, own.kv_head);
        walk<false>(
            tiles.begin, tiles.end,
            [&](int key) { return seen.next_key(first_row, key, tiles.end); },
            [&](int stage, int key) {
                copy_rows<kHeadDim>(smem.k[stage], k, key, tiles.end);
                copy_rows<kValueDim>(smem.v[stage], v, key, tiles.end);
            },
            [&](int stage, int key, int) {
                gradients.attend(smem, stage, queries.rules, place, first_row, key,
                                 tiles.masked(key, seen.cuts(first_row, key)));
            });
        ptx::wait_copies();

        const auto dq = sequence.queries<scalar_t>(params.dq, own.head);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + place.row(m, half);
                if (row >= seqlen_q) continue;
                store_row<kHeadDim>(dq.row(row), gradients.dq[m], half, params.softmax_scale,
                                    place.part * kHeadPart);
            }
    }
}

// A warp has 16 rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    round_queries(const __grid_constant__ BackwardParams params) {
    if constexpr (!kDeterministic) {
        const Sizes& sizes = params.sizes;
        const int strips = row_tiles<kMmaM>(sizes.batch, sizes.seqlen_q);
        const long long index = warp_of_grid<THREADS>();
        if (index >= static_cast<long long>(sizes.heads) * strips) return;
        const int head = index / strips;
        const auto [batch, first_row] = row_tile<kMmaM>(index % strips, sizes.batch, sizes.seqlen_q,
                                                        params.features.cu_seqlens_q);
        const Sequence sequence(params, batch);
        const DqSums sums(Workspace(params).dq, sizes, sequence, head);
        if (first_row >= sequence.seqlen_q) return;  // it is none of the sequence's
        sums.round_rows<kHeadDim>(sequence.queries<scalar_t>(params.dq, head), first_row,
                                  sequence.seqlen_q, params.softmax_scale);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    bias_gradient(const __grid_constant__ BackwardParams params) {
    if constexpr (kBiasGradient)
        write_bias_gradient<bias_t, THREADS>(params, Workspace(params).bias);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    array_gradients(const __grid_constant__ BackwardParams params) {
    if constexpr (kArrayGradients) round_array_sums<THREADS>(params, Workspace(params).arrays);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sink_gradient(const __grid_constant__ BackwardParams params) {
    if constexpr (kSink)
        write_sink_gradient<THREADS>(params, StatsInOrder{params, Workspace(params).stats},
                                     shared_memory<Smem>().warps);
}
