// fwd_5_mma: FlashAttention-2 on tensor cores (Dao 2023, Algorithm 1).
//
// Change from fwd_4_flash_v2: mma.sync instead of multiply-adds, on 16-bit operands with float32
// sums, float32 as one or two parts of tf32, or float64 (operands_*.cuh). A warp owns whole rows; S
// and O are accumulators, and P goes from the registers of S straight into the second product. K
// and V come by cp.async during the product before the one that needs them. O is rescaled only when
// a maximum has grown by more than what float32 sums can hold anyway.
//
// float64 has one pipe for products and for all other sums: there Q is multiplied with the scale
// beforehand, and products begin with minus the maxima. Where there are barriers to wait at for
// parts of a block's work (HANDS_OVER), its warps hand K and V on instead of meeting: one may be at
// its softmax while others multiply.
//
// To read it, begin with 16 bits and no mask, where kFolded, kHandsOver, kLongSteps, kCutTiles and
// kKeyMask are false.
//
// Launches: with a mask or a mask_mod seen_tiles, which finds out what it shows of each tile of
// scores, so that tiles of which that is nothing are left out; fwd_5_mma.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim),
//          V (batch, seqlen_k, kv_heads, value_dim); packed sequences: (tokens, heads, dim); K and
//          V in pages: (pages, page_size, kv_heads, dim)
// Owns     block: BLOCK_M queries of one head; warp: kTiles 16-row tiles of them, of which SPLIT
//          warps share the scores and part the output's columns
// Shared   Q tile, K tile, V tile
// Global   workspace: with a mask or a mask_mod, which tiles of scores it shows
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key, unless
//          there is a sink
#include "call/key_tiles.cuh"
#include "mma/fwd_5_scores.cuh"
#include "mma/handover.cuh"
#include "mma/key_pages.cuh"
#include "mma/mma_softmax.cuh"
#include "scores/seen_tiles.cuh"
#include "softmax/exp2_table.cuh"

constexpr bool kHandsOver = HANDS_OVER;
constexpr int kRootBits = 10;
// Of what a block of float64 begins with, how much a thread computes at once: powers, if all
// threads have as many, and numbers of Q in chunks. One by one each would wait for the one before,
// and for a pipe that other warps have.
constexpr int kRootsAtOnce = (1 << kRootBits) % (4 * THREADS) == 0 ? 4 : 1;
constexpr int kChunksAtOnce = 8;

// K and V as the warps hand them on, if they do.
template <bool Used>
struct KeyHandovers {
    Handover keys, values;

    __device__ void init() {
        if (threadIdx.x % 32 == 0) nonfinite[threadIdx.x / 32] = 0;
        if (threadIdx.x > 0) return;
        keys.init(THREADS, THREADS / 32);
        values.init(THREADS, THREADS / 32);
    }
    // Whether NaN or infinity has been taken out of values: said by each thread of its part before
    // it announces it, and known of all tiles that are whole.
    __device__ void note_nonfinite(bool found) {
        if (__any_sync(0xffffffffu, found) && threadIdx.x % 32 == 0)
            nonfinite[threadIdx.x / 32] = 1;
    }
    __device__ bool noted_nonfinite() const {
        unsigned int noted = 0;
        for (const unsigned int by_warp : nonfinite) noted |= by_warp;
        return noted != 0;
    }

  private:
    unsigned int nonfinite[THREADS / 32];
};
template <>
struct KeyHandovers<false> {
    static constexpr NoHandover keys{}, values{};

    __device__ void init() {}
    __device__ void note_nonfinite(bool) {}
    __device__ bool noted_nonfinite() const { return false; }
};

struct Smem : Exp2Table<acc_t, kRootBits>, KeyHandovers<kHandsOver> {
    MmaTile<kBlockM, kHeadDim> q;
    MmaTile<kBlockN, kHeadDim> k;
    MmaTile<kBlockN, kDims * kSplit> v;

    __device__ void init() {
        Exp2Table<acc_t, kRootBits>::template init<kRootsAtOnce>();
        KeyHandovers<kHandsOver>::init();
    }
};

using Seen = SeenTiles<kBlockM, kBlockN>;
// Whether the accumulators leave so few registers that ptxas, which loads operands ahead of all
// steps that are unrolled, spills others. Where a mask cuts tiles P is rounded early, and it does
// not.
constexpr int kSumRegisters = sizeof(Fragment) / 4 * kTiles * (kBlockN + kDims) / kMmaN;
constexpr bool kFewRegisters = sizeof(scalar_t) == 2 && !kCutTiles && kSumRegisters >= 192;
// Steps of Q K^T that are unrolled: for float64, too, there are registers for some here.
constexpr int kHeadSteps = decltype(Smem::q)::kCols / kMmaK;
constexpr int kFewSteps = ptx::kBlackwell ? ceil_div(kHeadSteps, 2) : 4;
constexpr int kScoreSteps = sizeof(scalar_t) == 8 ? 8 : kFewRegisters ? kFewSteps : kStepsAtOnce;
// Whether a step of a product takes so long that nothing of the next need be loaded beside it. If
// it has twice as many sums, Blackwell's ptxas would spill those.
constexpr bool kLongSteps =
    sizeof(scalar_t) == 4 && !kTf32 && !(ptx::kBlackwell && kTiles * kDims > 128);
// Whether what takes few instructions is worked out for each tile, and no register in between: the
// scale, and the thread's part of copies, unless a mask cuts tiles, where that takes longer.
constexpr bool kScaleAnew = kLongSteps || sizeof(scalar_t) == 2;
constexpr bool kCopiesAnew = kLongSteps || (sizeof(scalar_t) == 2 && !kCutTiles);

// Whether products are scores of log 2 less their row's maximum.
constexpr bool kFolded = sizeof(acc_t) == 8 && !kShapedScores;

// A maximum is raised only when scores pass it by more than this, in log 2. Until then
// probabilities reach up to 2^8, which float32 sums and 16-bit weights hold as precisely as those
// up to 1.
constexpr acc_t kSlack = 8;

// What products are multiplied with before exp2, unless they are scores of log 2 already.
// It is positive, so that the largest score is that of the largest product and -inf stays the
// least: Q takes the sign, and instead of 0 it is a number that makes 0 of every product.
__device__ inline acc_t scale_log2(const ScoreRules& rules) {
    if constexpr (kShapedScores || kFolded) return 1;
    constexpr acc_t kLeastScale = 0x1p-126;
    acc_t scale = rules.scale;
    if constexpr (kScaleAnew) scale = ptx::anew_float(scale);
    scale *= acc_t(kLog2E);
    return max(scale < 0 ? -scale : scale, kLeastScale);
}

// Gives Q the sign of the scale, or all of it.
__device__ inline void take_scale(Smem& smem, const ScoreRules& rules) {
    if (kShapedScores || (!kFolded && rules.scale >= 0)) return;
    using Tile = decltype(smem.q);
    constexpr int kChunkCols = Tile::kMatrixCols, kRowChunks = Tile::kCols / kChunkCols;
    constexpr int kChunks = kBlockM * kRowChunks;
    constexpr int kAtOnce = kFolded ? kChunksAtOnce : 1;  // few calls come here, or all
    using Chunk = Pack<scalar_t, kChunkCols>;
    const acc_t factor = kFolded ? rules.scale * acc_t(kLog2E) : acc_t(-1);
    ptx::wait_copies();
    __syncthreads();
#pragma unroll 1
    for (int first = threadIdx.x; first < kChunks; first += kAtOnce * THREADS) {
        const auto inside = [&](int i) {
            return kChunks % (kAtOnce * THREADS) == 0 || first + i * THREADS < kChunks;
        };
        const auto place = [&](int i) {
            const int chunk = first + i * THREADS, col = chunk % kRowChunks * kChunkCols;
            return reinterpret_cast<Chunk*>(smem.q.at(chunk / kRowChunks, col));
        };
        Chunk chunks[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (inside(i)) chunks[i] = *place(i);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (!inside(i)) break;
#pragma unroll
            for (int e = 0; e < kChunkCols; ++e)
                chunks[i][e] = from_acc<scalar_t>(to_acc(chunks[i][e]) * factor);
            *place(i) = chunks[i];
        }
    }
}

// A warp's rows of the output tile.
struct Output {
    OnlineSoftmax softmax[kTiles][2];
    Accumulators<kTiles, kDims> o;

    // What products begin with.
    __device__ void begin(Scores& s) const {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    s[m][n][e] = kFolded ? -softmax[m][e / 2].shift() : acc_t(0);
    }

    // Takes in one tile of scores and turns them into P.
    __device__ void exponentiate(Scores& s, acc_t scale_log2,
                                 const Exp2Table<acc_t, kRootBits>& exp2) {
        bool raised = false;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                raised |= may_pass(s[m], half, scale_log2, limit(softmax[m][half]));
        if (__any_sync(0xffffffffu, raised)) {
            acc_t largest[kTiles][2];
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    largest[m][half] = largest_of(s[m], half) * scale_log2;
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                if constexpr (kFolded) {
                    raise_folded(m, s[m], largest[m]);
                } else {
                    raise_maxima(softmax[m], o[m], largest[m]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const acc_t shift = kFolded ? acc_t(0) : softmax[m][half].shift();
                acc_t sum = 0;
#pragma unroll
                for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        s[m][n][e] = exp2.power(s[m][n][e] * scale_log2 - shift);
                        sum += s[m][n][e];
                    }
                softmax[m][half].sum += sum;
            }
    }

  private:
    // What a score may not pass before the maximum is raised.
    __device__ static acc_t limit(const OnlineSoftmax& row) {
        if constexpr (!kFolded) return row.max + kSlack;
        return row.max == negative_infinity() ? row.max : kSlack;
    }

    // Raises maxima where scores, and the largest of them, are less those there were.
    __device__ void raise_folded(int m, Fragment (&s)[kBlockN / kMmaN], acc_t (&largest)[2]) {
        const acc_t before[] = {softmax[m][0].shift(), softmax[m][1].shift()};
#pragma unroll
        for (int half = 0; half < 2; ++half) largest[half] += before[half];
        raise_maxima(softmax[m], o[m], largest);
#pragma unroll
        for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] -= softmax[m][e / 2].shift() - before[e / 2];
    }
};

// Where a mask cuts through a tile, a value that is NaN or infinite must reach the rows that see
// its key and no other; but in the product 0 * NaN is NaN. Such values are added here to the
// outputs of the rows that see them, whatever their weight, and are zero in the product.
__device__ inline void take_out_nonfinite(Output& out, Smem& smem, const ScoreRules& rules,
                                          int first_row, int first_key) {
    if (!__syncthreads_or(finds_nonfinite<THREADS>(smem.v))) return;

    for (int key = 0; key < kBlockN; ++key)
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!rules.sees(first_row + row_of(m, half), first_key + key)) continue;
#pragma unroll
                for (int n = 0; n < kDims / kMmaN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const scalar_t value = *smem.v.at(key, fragment_col(warp_col(), n) + e);
                        if (!is_finite(value)) out.o[m][n][2 * half + e] += to_acc(value);
                    }
            }
    __syncthreads();
    constexpr int kCols = kDims * kSplit;
    for (int i = threadIdx.x; i < kBlockN * kCols; i += THREADS) {
        scalar_t& value = *smem.v.at(i / kCols, i % kCols);
        if (!is_finite(value)) value = scalar_t{};
    }
    __syncthreads();
}

// The same where who copied a part of V made such values zero before announcing it: in the end they
// are added, of all keys, since what comes twice, through the product of a whole tile too, is the
// same.
__device__ inline void add_nonfinite(Output& out, const KeyMatrix<const scalar_t>& v,
                                     const ScoreRules& rules, int first_row) {
    const KeyTiles<kBlockN> tiles(rules.mask, first_row, kBlockM);
#pragma unroll 1
    for (int key = tiles.begin; key < tiles.end; ++key)
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!rules.sees(first_row + row_of(m, half), key)) continue;
#pragma unroll
                for (int n = 0; n < kDims / kMmaN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int col = fragment_col(warp_col(), n) + e;
                        if (col >= kValueDim) continue;
                        const scalar_t value = v.row(key)[col];
                        if (!is_finite(value)) out.o[m][n][2 * half + e] += to_acc(value);
                    }
            }
}

// This thread, as copies take it. Without a sign it takes Blackwell's ptxas fewer registers, and
// Hopper's more.
__device__ inline auto copying_thread() {
    if constexpr (kCopiesAnew && ptx::kBlackwell) {
        return ptx::anew(threadIdx.x);
    } else if constexpr (kCopiesAnew) {
        return ptx::anew(static_cast<int>(threadIdx.x));
    } else {
        return threadIdx.x;
    }
}

// Where the keys and values of a head lie, and which of them the block's rows see.
struct Source {
    KeyMatrix<const scalar_t> k, v;
    KeyTiles<kBlockN> tiles;
    TilePages<kBlockN> pages;  // of the next tile to be copied

    // `thread` is this one, as copies take it.
    template <class Thread>
    __device__ void copy_k(Smem& smem, int first_key, Thread thread) const {
        copy_keys<THREADS, kHeadDim>(smem.k, k, pages, first_key, tiles.end, thread);
    }
    template <class Thread>
    __device__ void copy_v(Smem& smem, int first_key, Thread thread) const {
        copy_keys<THREADS, kValueDim>(smem.v, v, pages, first_key, tiles.end, thread);
    }
    __device__ void look_up_pages(int first_key) { pages = {k, first_key, tiles.end}; }
};

// Turns what is left of scores into weights, and adds the values so weighted.
__device__ inline void weigh_values(Output& out, Scores& p, Smem& smem, const ScoreRules& rules,
                                    int first_row, int first_key, int keys_end, bool masked) {
    if constexpr (kDropout) drop(rules, p, first_row, first_key);
    if constexpr (kCutTiles && sizeof(scalar_t) == 2) {
        // Rounded, P takes half the registers, and who looks for NaN needs some.
        const LeftStrip<kTiles, kBlockN> rounded(p);
        if (masked) take_out_nonfinite(out, smem, rules, first_row, first_key);
        rounded.template add_product_with<kDims>(out.o, smem.v, warp_col());
    } else {
        if (kCutTiles && masked) take_out_nonfinite(out, smem, rules, first_row, first_key);
        // Keys past the end are left out, which also keeps ptxas from splitting the operands of
        // all steps ahead.
        const int keys = kLongSteps ? keys_end - first_key : kBlockN;
        add_product_pn<kTiles, kBlockN, kDims>(out.o, p, smem.v, warp_col(), keys);
    }
}

// One tile of keys, the next of which is `step` keys further on. K is on its way when this begins,
// and the next K when it ends, whose pages are looked up while products run. Whether the tile is
// masked is decided as it runs: a second copy of this code for tiles that are not would cost
// registers.
__device__ inline void attend(Output& out, Smem& smem, const ScoreRules& rules, Source& source,
                              int first_row, int first_key, int step, bool cut) {
    const int keys_end = source.tiles.end;
    const bool masked = source.tiles.masked(first_key, cut);
    ptx::wait_copies();
    __syncthreads();  // K is there, and every warp is done with the V before
    source.copy_v(smem, first_key, copying_thread());
    source.look_up_pages(first_key + step);
    const SeenScores seen(rules, first_row, first_key, masked);
    Scores s;
    out.begin(s);
    add_product_nt<kTiles, kBlockN, kScoreSteps>(s, smem.q, warp_row(), smem.k);
    apply(rules, s, seen, first_row, first_key, masked);

    ptx::wait_copies();
    __syncthreads();  // V is there, and every warp is done with this K
    if (first_key + step < keys_end) source.copy_k(smem, first_key + step, copying_thread());
    out.exponentiate(s, scale_log2(rules), smem);
    weigh_values(out, s, smem, rules, first_row, first_key, keys_end, masked);
}

// The same where warps hand K and V on: of the tile of that number. V is on its way when it is
// likely that the others are done with the V before, and the next K when they are with this one.
// Where a mask cuts, who has copied a part of V takes NaN out of it before announcing it.
__device__ inline void attend_in_turn(Output& out, Smem& smem, const ScoreRules& rules,
                                      Source& source, int first_row, int first_key, int step,
                                      bool cut, int number) {
    constexpr int kHalf = decltype(smem.q)::kCols / kMmaK / 2 * kMmaK;
    const int next_key = first_key + step, keys_end = source.tiles.end;
    const bool masked = source.tiles.masked(first_key, cut);
    const SeenScores seen(rules, first_row, first_key, masked);
    Scores s;
    out.begin(s);
    smem.keys.wait_whole(number);
    add_product_nt<kTiles, kBlockN, kScoreSteps>(s, smem.q, warp_row(), smem.k, 0, 0, kHalf);

    smem.values.wait_free(number);
    source.copy_v(smem, first_key, copying_thread());
    if (!kCutTiles || !masked) smem.values.announce_copies();
    source.look_up_pages(next_key);

    add_product_nt<kTiles, kBlockN, kScoreSteps>(s, smem.q, warp_row(), smem.k, 0, kHalf);
    smem.keys.release();
    if (kCutTiles && masked) {
        ptx::wait_copies();
        smem.note_nonfinite(clear_copied_nonfinite<THREADS, kValueDim>(smem.v));
        smem.values.announce_copied();
    }
    apply(rules, s, seen, first_row, first_key, masked);
    out.exponentiate(s, scale_log2(rules), smem);

    if (next_key < keys_end) {
        smem.keys.wait_free(number + 1);
        source.copy_k(smem, next_key, copying_thread());
        smem.keys.announce_copies();
    }

    smem.values.wait_whole(number);
    // Not masked: nothing is left to be taken out.
    weigh_values(out, s, smem, rules, first_row, first_key, keys_end, false);
    smem.values.release();
}

// The tile that a block owns. Blocks of float64 take so long that in the last section, if no more
// ran than do at once, the longest would end last.
__device__ inline QueryTile tile_of_block(const ForwardParams& params, int block = blockIdx.x) {
    constexpr int kRounds = sizeof(scalar_t) == 8 ? 2 : 1;
    return query_tile_of_block<kBlockM, kRounds * kSectionTiles>(params, block);
}

// Writes the block's rows of O and LSE.
__device__ inline void write_output(Output& out, const Smem& smem, const ForwardParams& params,
                                    const QueryTile& tile) {
    const ScoreRules rules(params, tile.sequence, tile.head);
    if (kCutTiles && smem.noted_nonfinite()) {
        const auto v = tile.sequence.keys<const scalar_t>(params.v, tile.kv_head);
        add_nonfinite(out, v, rules, tile.first_row);
    }
    const auto o = tile.sequence.queries<scalar_t>(params.o, tile.head);
    acc_t* lse = static_cast<acc_t*>(params.lse);
    if (lse) lse += tile.sequence.first_row(tile.head, params.sizes);
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& softmax = out.softmax[m][half];
            const acc_t factor = end_row<4>(softmax, rules);
            const int row = tile.first_row + row_of(m, half);
            if (row >= tile.sequence.seqlen_q) continue;
            if (lse && threadIdx.x % 4 == 0 && warp_col() == 0) lse[row] = softmax.lse();
            store_row<kValueDim>(o.row(row), out.o[m], half, factor, warp_col());
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    seen_tiles(const __grid_constant__ ForwardParams params) {
    const long long tile = warp_of_grid<THREADS>();
    if (kKeyMask && tile < Seen::count(params))
        Seen::find(static_cast<SeenPart*>(params.workspace), params, tile);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    fwd_5_mma(const __grid_constant__ ForwardParams params) {
    Smem& smem = shared_memory<Smem>();
    const auto [sequence, head, kv_head, first_row] = tile_of_block(params);
    const int seqlen_q = sequence.seqlen_q;
    if (kPacked && first_row >= seqlen_q) return;  // it is none of the sequence's tiles

    const ScoreRules rules(params, sequence, head);
    const auto q = sequence.queries<const scalar_t>(params.q, head);
    const auto k = sequence.keys<const scalar_t>(params.k, kv_head);
    const auto v = sequence.keys<const scalar_t>(params.v, kv_head);

    clear_padding<THREADS, kHeadDim>(smem.q);
    clear_padding<THREADS, kHeadDim>(smem.k);
    clear_padding<THREADS, kValueDim>(smem.v);
    copy_tile<THREADS, kHeadDim>(smem.q, q, first_row, seqlen_q);
    if constexpr (!kFolded) take_scale(smem, rules);  // later, ptxas would spill for Blackwell
    Source source{k, v, KeyTiles<kBlockN>(rules.mask, first_row, kBlockM)};
    const int keys_end = source.tiles.end;
    const Seen seen(static_cast<SeenPart*>(params.workspace), params, sequence, head);
    int begin = source.tiles.begin, step = kBlockN;
    if constexpr (kKeyMask) begin = seen.next_key(first_row, begin, keys_end);
    source.look_up_pages(begin);
    source.copy_k(smem, begin, threadIdx.x);
    smem.init();  // while Q and K are on their way
    if constexpr (kFolded) take_scale(smem, rules);
    if constexpr (kHandsOver) {
        __syncthreads();  // the barriers are set up
        smem.keys.announce_copies();
    }

    Output out = {};
    int number = 0;
    for (int key = begin; key < keys_end; key += step) {
        if constexpr (kKeyMask) step = seen.next_key(first_row, key + kBlockN, keys_end) - key;
        const bool cut = seen.cuts(first_row, key);
        if constexpr (kHandsOver) {
            attend_in_turn(out, smem, rules, source, first_row, key, step, cut, number++);
        } else {
            attend(out, smem, rules, source, first_row, key, step, cut);
        }
    }
    ptx::wait_copies();

    write_output(out, smem, params, tile_of_block(params, ptx::anew(blockIdx.x)));
}
