// bias_gradient: the gradient of the bias, launched with the backwards on tensor cores.
//
// The gradient of an element of the bias is the sum of dS over all scores that share it: over
// batch, heads or rows, if the bias is broadcast along them. The backwards process these scores in
// many blocks. They would have to add atomically, or write out all of dS. Here a block owns a tile
// of the bias and recomputes the dS of all scores that share it: two more products besides the
// backward's five, in a fixed order, with the sums in registers.
//
// Launches: with a mask or a mask_mod, seen_tiles, as in fwd_5_mma; row_sums (LSE and D);
// bias_gradient; add_parts, if blocks share a tile, or warps a row.
//
// Shapes   dO, O as Q with value_dim; dbias as the bias: (batch or 1, heads or 1, rows or 1, keys)
// Owns     block: BLOCK_N rows and BLOCK_M keys of one head's bias, and one of PARTS parts of the
//          scores that share them; warp: kTiles 16-row tiles of them
// Shared   STAGES tiles of Q and dO with LSE and D, of K and V; the tile of the bias
//          unless ROWS_SHARE
// Global   workspace: LSE and D (batch, heads, seqlen_q, 2); parts of dbias, if there are parts;
//          with a mask or a mask_mod, what it shows of each tile of scores
// Writes   dbias
#include "call/grid.cuh"
#include "call/key_tiles.cuh"
#include "mma/mma_score_tiles.cuh"
#include "scores/seen_tiles.cuh"

constexpr int kStages = STAGES, kParts = PARTS;
constexpr bool kRowsShare = ROWS_SHARE;  // whether all rows have the same bias
constexpr int kPartsOfTile = kParts * (kRowsShare ? kWarps : 1);
constexpr bool kInParts = kRowsShare || kParts != 1;  // which are added up at the end
static_assert(kSplit == 1, "no two warps have the same rows");
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "the host passes a different struct");

constexpr int kHead = round_up(kHeadDim, kMmaK), kValue = round_up(kValueDim, kMmaK);

// The block's tile of the bias, which all scores that share it read from shared memory. The eight
// rows that a warp reads together are in different banks.
struct BiasRows {
    static constexpr int kChunk = 16 / sizeof(bias_t), kPitch = kBlockM + kChunk;
    alignas(16) bias_t data[kBlockN][kPitch];

    // Copies its first rows and keys, as many as there are.
    __device__ void copy(const Matrix<const bias_t>& from, int rows, int keys) {
        const auto steps = reinterpret_cast<unsigned long long>(from.data) / sizeof(bias_t) |
                           static_cast<unsigned long long>(from.row_stride);
        if (steps % kChunk == 0 && keys >= kBlockM) {
            copy_packs<kChunk>(from, rows, kBlockM);
        } else {
            copy_packs<1>(from, rows, min(keys, kBlockM));
        }
    }
    // A matrix over this tile, of which (row, key) is the first element.
    __device__ Matrix<const bias_t> from(int row, int key) const {
        return {&data[0][0] - (static_cast<long long>(row) * kPitch + key), kPitch};
    }

  private:
    // Copies Count elements at once, and starts several such loads before it waits for the first.
    template <int Count>
    __device__ void copy_packs(const Matrix<const bias_t>& from, int rows, int keys) {
        constexpr int kRowPacks = kBlockM / Count, kPacks = kBlockN * kRowPacks / kThreads;
        constexpr int kTogether = min_of(kPacks, Count == 1 ? 16 : 4);
        using Packed = Pack<bias_t, Count>;
#pragma unroll 1
        for (int first = 0; first < kPacks; first += kTogether) {
            const int key = threadIdx.x % kRowPacks * Count;
            const auto row = [&](int i) {
                return static_cast<int>(((first + i) * kThreads + threadIdx.x) / kRowPacks);
            };
            Packed packs[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const bias_t* const of_row = from.row(min(row(i), rows - 1));
                packs[i] = *reinterpret_cast<const Packed*>(of_row + min(key, keys - 1));
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
                *reinterpret_cast<Packed*>(&data[row(i)][key]) = packs[i];
        }
    }
};
template <bool RowsShare>
struct BiasOfBlock {
    BiasRows bias;
};
template <>
struct BiasOfBlock<true> {};  // one row for all queries is read from global memory

struct Smem : Powers, BiasOfBlock<kRowsShare> {
    MmaTile<kBlockN, kHead> q[kStages];
    MmaTile<kBlockN, kValue> dout[kStages];
    MmaTile<kBlockM, kHead> k[kStages];
    MmaTile<kBlockM, kValue> v[kStages];
    alignas(16) RowStats rows[kStages][kBlockN];
};

using Seen = SeenTiles<kBlockN, kBlockM>;

struct Workspace {
    RowStats* stats;
    acc_t* parts;
    SeenPart* seen;

    __device__ explicit Workspace(const BackwardParams& params)
        : stats(static_cast<RowStats*>(params.workspace)),
          parts(reinterpret_cast<acc_t*>(stats + rows_of_heads(params.sizes))) {
        const long long elements = kInParts ? kPartsOfTile * params.dbias.elements() : 0;
        seen = reinterpret_cast<SeenPart*>(parts + elements);
    }
};

// A block's work: a tile of the bias. Its place is 0 along broadcast axes.
struct BiasTile {
    int part, batch, head, first_row, first_key;

    __device__ BiasTile(const BiasGradient& bias, unsigned int block) {
        const auto take = [&](int count) {
            const int place = block % count;
            block /= count;
            return place;
        };
        first_key = take(ceil_div(bias.keys, kBlockM)) * kBlockM;
        first_row = take(ceil_div(bias.rows, kBlockN)) * kBlockN;
        head = take(bias.heads);
        batch = take(bias.batch);
        part = block;
    }
};

// A walk over the tiles of scores that share a tile of the bias and of which something is seen.
// Every kParts-th of them belongs to the block.
struct SharingWalk {
    const BackwardParams& params;
    const BiasTile& own;
    int batch, head, first_row;
    Sequence sequence;
    bool masked;

    __device__ SharingWalk(const BackwardParams& params, const BiasTile& own)
        : params(params),
          own(own),
          batch(own.batch),
          head(own.head),
          first_row(own.first_row),
          sequence(params, batch) {
        if (!is_seen()) find_next();
        for (int passed = 0; passed < own.part && !at_end(); ++passed) find_next();
    }

    __device__ bool at_end() const { return batch == batch_end(); }
    __device__ void advance() {
        for (int passed = 0; passed < kParts && !at_end(); ++passed) find_next();
    }

  private:
    __device__ int batch_end() const {
        return params.dbias.batch > 1 ? own.batch + 1 : params.sizes.batch;
    }
    __device__ int head_end() const {
        return params.dbias.heads > 1 ? own.head + 1 : params.sizes.heads;
    }
    __device__ void find_next() {
        do {
            step();
        } while (!at_end() && !is_seen());
    }
    __device__ void step() {
        if (kRowsShare && (first_row += kBlockN) < sequence.seqlen_q) return;
        first_row = own.first_row;
        if (++head < head_end()) return;
        head = own.head;
        if (++batch < batch_end()) sequence = Sequence(params, batch);
    }
    // Whether some row sees some key. Also sets `masked`, if some row may not see all keys.
    __device__ bool is_seen() {
        if (first_row >= sequence.seqlen_q) return false;
        const KeyTiles<kBlockM> tiles(sequence.mask(params.features), first_row, kBlockN);
        if (own.first_key < tiles.begin || own.first_key >= tiles.end) return false;
        bool cut = first_row + kBlockN > sequence.seqlen_q;
        if constexpr (kKeyMask) {
            const Seen seen(Workspace(params).seen, params, sequence, head);
            if (!seen.shows_any(first_row, own.first_key)) return false;
            cut |= seen.cuts(first_row, own.first_key);
        }
        masked = tiles.masked(own.first_key, cut);
        return true;
    }
};

__device__ inline void start_copy(Smem& smem, int stage, const SharingWalk& at) {
    const BackwardParams& params = at.params;
    const Sequence& sequence = at.sequence;
    const int kv_head = kv_head_of(at.head, params.sizes), row = at.first_row;
    const int key = at.own.first_key;
    copy_tile<kThreads, kHeadDim>(
        smem.q[stage], sequence.queries<const scalar_t>(params.q, at.head), row, sequence.seqlen_q);
    copy_tile<kThreads, kHeadDim>(smem.k[stage], sequence.keys<const scalar_t>(params.k, kv_head),
                                  key, sequence.seqlen_k);
    copy_tile<kThreads, kValueDim>(smem.dout[stage],
                                   sequence.queries<const scalar_t>(params.dout, at.head), row,
                                   sequence.seqlen_q);
    copy_tile<kThreads, kValueDim>(smem.v[stage], sequence.keys<const scalar_t>(params.v, kv_head),
                                   key, sequence.seqlen_k);
    const RowStats* const stats =
        Workspace(params).stats + sequence.first_row(at.head, params.sizes) + row;
    for (int i = threadIdx.x; i < kBlockN; i += kThreads)
        ptx::copy_async<sizeof(RowStats)>(&smem.rows[stage][i], stats + i,
                                          row + i < sequence.seqlen_q);
}

// Copies the block's tile of the bias, if it has one. A template, because Smem may have none.
template <class Smem>
__device__ inline void copy_bias(Smem& smem, const BackwardParams& params, const BiasTile& own) {
    if constexpr (!kRowsShare) {
        auto bias = matrix_of<const bias_t>(params.features.bias, own.batch, own.head);
        bias.data = bias.row(own.first_row) + own.first_key;
        smem.bias.copy(bias, params.dbias.rows - own.first_row, params.dbias.keys - own.first_key);
    }
}
template <class Smem>
__device__ inline ScoreRules rules_of(const Smem& smem, const SharingWalk& at) {
    ScoreRules rules(at.params, at.sequence, at.head);
    if constexpr (!kRowsShare) rules.bias = smem.bias.from(at.first_row, at.own.first_key);
    return rules;
}

// Adds dS of a tile of scores.
__device__ inline void attend(Scores& sums, const Smem& smem, int stage, const Place& place,
                              const SharingWalk& at) {
    const ScoreRules rules = rules_of(smem, at);
    const QueryRows tile{smem, rules, place, at.first_row, at.own.first_key};
    const SeenScores<QueryRows> seen(tile, at.masked);
    Scores s = {}, dp = {};
    product_of(s, smem.q[stage], smem.k[stage], place);
    product_of(dp, smem.dout[stage], smem.v[stage], place);
    const auto stats_of = [&](Element score) {
        return smem.rows[stage][place.row(score.m, score.half)];
    };
    const auto add_up = [&](Element score, acc_t, const ScoreGradient& gradient) {
        sums[score.m][score.n][2 * score.half + score.e] += gradient.score;
    };
    if (at.masked) {
        differentiate<true>(s, dp, tile, seen, stats_of, add_up);
    } else {
        differentiate<false>(s, dp, tile, seen, stats_of, add_up);
    }
}

// Calls store(row of the tile, key of the tile, sum of that key, sum of the next) for a lane's
// sums.
template <class Store>
__device__ inline void for_pairs(const Scores& sums, const Place& place, const Store& store) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < kColumns / kMmaN; ++n) {
                const auto* const two = &sums[m][n][2 * half];
                store(place.row(m, half), place.col(n), two[0], two[1]);
            }
}

// Writes two neighbours of a row of `keys` elements. The first has an even number.
template <class T>
__device__ inline void store_pair(T* row, int key, int keys, acc_t first, acc_t second) {
    using Pair = Pack<T, 2>;
    const auto rounded = [](acc_t sum) { return from_acc<T>(static_cast<accumulator_t<T>>(sum)); };
    if (key + 1 < keys && reinterpret_cast<unsigned long long>(row) % sizeof(Pair) == 0) {
        *reinterpret_cast<Pair*>(row + key) = {rounded(first), rounded(second)};
        return;
    }
    if (key < keys) row[key] = rounded(first);
    if (key + 1 < keys) row[key + 1] = rounded(second);
}

// Writes a block's sums, if they are the whole gradient.
template <class Bias>
__device__ inline void write_gradient(const Scores& sums, const Place& place, const BiasTile& own,
                                      const BiasGradient& bias) {
    Bias* const matrix = matrix_of<Bias>(bias.out, own.batch, own.head).data;
    for_pairs(sums, place, [&](int row, int key, acc_t first, acc_t second) {
        if (own.first_row + row >= bias.rows) return;
        Bias* const to = matrix + (own.first_row + row) * bias.out.row_stride;
        store_pair(to, own.first_key + key, bias.keys, first, second);
    });
}

// The address of a row in a part of the gradient.
__device__ inline acc_t* row_of_part(const BackwardParams& params, const BiasTile& own, int part,
                                     int row) {
    const BiasGradient& bias = params.dbias;
    const long long heads = static_cast<long long>(part * bias.batch + own.batch) * bias.heads;
    return Workspace(params).parts + ((heads + own.head) * bias.rows + row) * bias.keys;
}
__device__ inline void write_part(const Scores& sums, const Place& place, const BiasTile& own,
                                  const BackwardParams& params) {
    for_pairs(sums, place, [&](int row, int key, acc_t first, acc_t second) {
        if (own.first_row + row >= params.dbias.rows) return;
        acc_t* const to = row_of_part(params, own, own.part, own.first_row + row);
        store_pair(to, own.first_key + key, params.dbias.keys, first, second);
    });
}
// The same where rows share the bias: each warp adds up its rows.
__device__ inline void write_row_of_part(const Scores& sums, const Place& place,
                                         const BiasTile& own, const BackwardParams& params) {
    acc_t* const to = row_of_part(params, own, own.part * kWarps + threadIdx.x / 32, own.first_row);
#pragma unroll
    for (int n = 0; n < kColumns / kMmaN; ++n) {
        acc_t of_keys[2] = {};
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) of_keys[i % 2] += sums[m][n][i];
#pragma unroll
        for (int lane = 4; lane < 32; lane *= 2)
#pragma unroll
            for (acc_t& sum : of_keys) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
        if (place.g == 0)
            store_pair(to, own.first_key + place.col(n), params.dbias.keys, of_keys[0], of_keys[1]);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    seen_tiles(const __grid_constant__ BackwardParams params) {
    const long long tile = warp_of_grid<kThreads>();
    if (kKeyMask && tile < Seen::count(params)) Seen::find(Workspace(params).seen, params, tile);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    row_sums(const __grid_constant__ BackwardParams params) {
    write_row_stats<kThreads>(params, Workspace(params).stats);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    bias_gradient(const __grid_constant__ BackwardParams params) {
    Smem& smem = shared_memory<Smem>();
    const Place place;
    for (int stage = 0; stage < kStages; ++stage) {
        clear_padding<kThreads, kHeadDim>(smem.q[stage]);
        clear_padding<kThreads, kHeadDim>(smem.k[stage]);
        clear_padding<kThreads, kValueDim>(smem.dout[stage]);
        clear_padding<kThreads, kValueDim>(smem.v[stage]);
    }
    smem.init();

    const BiasTile own(params.dbias, blockIdx.x);
    Scores sums = {};
    SharingWalk next(params, own);
    if (!next.at_end()) {
        start_copy(smem, 0, next);
        copy_bias(smem, params, own);
    }
    for (int stage = 0; !next.at_end(); stage = (stage + 1) % kStages) {
        const SharingWalk at = next;
        next.advance();
        ptx::wait_copies();
        __syncthreads();  // the tile is there, and every warp is done with the stage before
        if (kStages > 1 && !next.at_end()) start_copy(smem, (stage + 1) % kStages, next);
        attend(sums, smem, stage, place, at);
        if (kStages == 1 && !next.at_end()) {
            __syncthreads();  // every warp is done with the tile
            start_copy(smem, stage, next);
        }
    }
    if constexpr (kRowsShare) {
        write_row_of_part(sums, place, own, params);
    } else if constexpr (kInParts) {
        write_part(sums, place, own, params);
    } else {
        write_gradient<bias_t>(sums, place, own, params.dbias);
    }
}

// One thread per element of the bias.
template <class Bias>
__device__ inline void write_sum_of_parts(const BackwardParams& params) {
    const long long index = thread_of_grid<kThreads>();
    const long long elements = params.dbias.elements();
    if (index >= elements) return;
    const acc_t* const parts = Workspace(params).parts;
    acc_t sum = 0;
    for (int part = 0; part < kPartsOfTile; ++part) sum += parts[part * elements + index];
    static_cast<Bias*>(params.dbias.out.data)[index] =
        from_acc<Bias>(static_cast<accumulator_t<Bias>>(sum));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    add_parts(const __grid_constant__ BackwardParams params) {
    if constexpr (kInParts) write_sum_of_parts<bias_t>(params);
}
