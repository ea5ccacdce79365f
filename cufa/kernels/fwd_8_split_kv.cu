// fwd_8_split_kv: few queries and many keys, as in decoding (flash-decoding: Dao et al. 2023).
//
// Change from fwd_5_mma: what takes time is to read K and V, so they are read once, by all SMs. The
// rows of a tile are the queries of all heads that share a KV head. The keys are parted: among
// blocks, so that there are enough of them, and among the teams of a block, a warp for each 16 or
// 32 rows, each of which has a ring of tiles of its own and waits for nobody else. What the teams
// found is merged in shared memory, and what the blocks found by a second launch. Sequences that
// may be of many lengths are shared out among the blocks all together (key_shares.cuh). Those of
// more queries than kMostQueries are left to fwd_6_wgmma, which then runs beside this kernel.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim),
//          V (batch, seqlen_k, kv_heads, value_dim); packed sequences: (tokens, heads, dim); K and
//          V in pages: (pages, page_size, kv_heads, dim). K and V in 8 bits, Q too or in 16, and
//          O in 16: q_descale, k_descale and v_descale (batch, kv_heads), what Q, K and V are to
//          be multiplied with
// Owns     block: BLOCK_M rows of one KV head and a part of its keys, with EVEN_SHARES several
//          such one after the other; team: each kTeams-th tile of BLOCK_N of those keys; warp:
//          WARP_ROWS rows
// Shared   Q tile; STAGES tiles of K and of V for each team, where later its part is
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key, unless
//          there is a sink. Where blocks part the keys of a tile, parts of rows into the
//          workspace, which merge_splits makes that of.
#include "call/descales.cuh"
#include "call/key_shares.cuh"
#include "call/key_tiles.cuh"
#include "mma/half_queries.cuh"
#include "mma/key_pages.cuh"
#include "mma/mma_softmax.cuh"
#include "ptx/ptx_sm90.cuh"
#include "scores/score_rules.cuh"
#include "softmax/row_parts.cuh"

using out_t = OUT_SCALAR;
constexpr bool kDescaled = is_same<key_t, float8_e4m3fn>;
constexpr bool kMixed = !is_same<scalar_t, key_t>;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kStages = STAGES;
constexpr bool kSplitKeys = SPLIT_KEYS;    // as many blocks part the keys of each tile
constexpr bool kEvenShares = EVEN_SHARES;  // the keys of all tiles are shared out
static_assert(!kSplitKeys || !kEvenShares, "blocks part the keys one way or the other");
static_assert(!kSplitKeys || kMostQueries == 0, "the parts of all rows are merged");
constexpr bool kNextOverlaps = NEXT_OVERLAPS;  // the launch after this one begins early
constexpr int kMergeThreads = MERGE_THREADS;
constexpr int kMergeBlocks = MERGE_BLOCKS;  // of the second launch, for each share
constexpr int kMergeBlocksOfSm = 3;         // for more, the compiler would spill
// 16-row tiles of a warp: with two, what it loads of keys and values serves twice as many rows.
constexpr int kTiles = WARP_ROWS / kMmaM;
constexpr int kWarps = THREADS / 32, kTeamWarps = kBlockM / (kTiles * kMmaM);
constexpr int kTeamThreads = kTeamWarps * 32, kTeams = kWarps / kTeamWarps;
static_assert(kTeamWarps * kTiles * kMmaM == kBlockM, "a warp must own whole 16-row tiles");
static_assert(kTeams * kTeamWarps == kWarps, "the warps of a team must divide the block's");
static_assert(kBlockN % kMmaK == 0, "BLOCK_N must be whole steps of P V");
static_assert(kStages > 1, "a tile is copied while another one is worked on");
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");

struct Stage {
    MmaTile<kBlockN, kHeadDim> k;
    MmaTile<kBlockN, kValueDim> v;
};

struct Smem : HalfQueries<kBlockM, kMixed> {
    MmaTile<kBlockM, kHeadDim, scalar_t> q;
    union {
        Stage stages[kTeams][kStages];
        RowPart parts[kTeams][kBlockM];
    };
};

struct MergeSmem {
    RowPart parts[kMergeThreads / 32];
};

using Scores = Accumulators<kTiles, kBlockN>;

// Who a thread is.
__device__ inline int team() {
    return threadIdx.x / kTeamThreads;
}
__device__ inline int team_thread() {
    return threadIdx.x % kTeamThreads;
}
__device__ inline void sync_team() {
    constexpr int kFirstTeam = 1;  // barrier 0 is the block's
    if constexpr (kTeamWarps == 1) {
        __syncwarp();
    } else {
        ptx::named_barrier_sync<kTeamThreads>(kFirstTeam + team());
    }
}
// The warp's first row of the block's tile, and a lane's in each half of its fragments `m`.
__device__ inline int warp_row() {
    return team_thread() / 32 * kTiles * kMmaM;
}
__device__ inline int row_of(int m, int half) {
    return fragment_row(warp_row(), m, half);
}

// What a block works on: rows of a KV head from first_row on, a query's heads being neighbours.
struct Work {
    Sequence sequence;
    int kv_head, group, first_row;

    __device__ int rows() const { return min(kBlockM, sequence.seqlen_q * group - first_row); }
    __device__ int query(int row) const { return (first_row + row) / group; }
    __device__ int head(int row) const { return kv_head * group + (first_row + row) % group; }
    __device__ HeadScales scales(const ForwardParams& params) const {
        return {params, sequence.batch, kv_head};
    }
};

// And which tiles of the sequence's keys.
struct TileRange {
    int begin, end;
};

// Starts the copy of the block's rows of Q; rows past the last become zeros.
__device__ inline void copy_queries(Smem& smem, const ForwardParams& params, const Work& work) {
    constexpr int kChunk = min_of(kAlignBytes / sizeof(scalar_t), kHeadDim & -kHeadDim);
    constexpr int kRowChunks = kHeadDim / kChunk;
#pragma unroll 1  // it is short, and comes once
    for (int i = threadIdx.x; i < kBlockM * kRowChunks; i += THREADS) {
        const int row = i / kRowChunks, col = i % kRowChunks * kChunk;
        const auto q = work.sequence.queries<const scalar_t>(params.q, work.head(row));
        const bool inside = row < work.rows();
        ptx::copy_async<kChunk * sizeof(scalar_t)>(smem.q.at(row, col),
                                                   q.row(work.query(row)) + col, inside);
    }
}

// Where a team gets its tiles of K and V.
struct Source {
    KeyMatrix<const key_t> k, v;
    int end_key;

    __device__ TilePages<kBlockN> pages_of(int tile) const { return {k, tile * kBlockN, end_key}; }
    // Those of the team's first tiles, all looked up at once.
    template <int Tiles>
    __device__ void look_up(TilePages<kBlockN> (&pages)[Tiles], int first_tile) const {
        if constexpr (kPaged) {
#pragma unroll
            for (int i = 0; i < Tiles; ++i) pages[i] = pages_of(first_tile + i * kTeams);
        }
    }

    // Starts the copy of a tile, if it is before `end_tile`.
    __device__ void copy(Stage& stage, int tile, int end_tile,
                         const TilePages<kBlockN>& pages) const {
        if (tile >= end_tile) return;
        copy_keys<kTeamThreads, kHeadDim>(stage.k, k, pages, tile * kBlockN, end_key,
                                          team_thread());
        copy_keys<kTeamThreads, kValueDim>(stage.v, v, pages, tile * kBlockN, end_key,
                                           team_thread());
    }
};

// What a lane has rows of in each half of its fragments `m`: the queries, and the rules of the
// heads.
struct LaneRows {
    int query[2];
    ScoreRules rules[2];

    __device__ LaneRows(const ForwardParams& params, const Work& work, int m)
        : query{work.query(row_of(m, 0)), work.query(row_of(m, 1))},
          rules{{params, work.sequence, work.head(row_of(m, 0))},
                {params, work.sequence, work.head(row_of(m, 1))}} {
        if constexpr (kDescaled) {
            for (ScoreRules& of_half : rules) of_half.scale = work.scales(params).scores;
        }
    }
    // Takes what rows of Q were divided by, if they were.
    __device__ void take_units(const Smem& smem, int m) {
        for (int half = 0; half < 2; ++half) rules[half].scale *= smem.unit(row_of(m, half));
    }
};
// Those of a warp: of its first 16-row tile and of its last, which may be the same.
struct WarpRows {
    static_assert(kTiles <= 2, "a warp has one 16-row tile or two");
    LaneRows first, last;

    __device__ WarpRows(const ForwardParams& params, const Work& work)
        : first(params, work, 0), last(params, work, kTiles - 1) {}
    __device__ void take_units(const Smem& smem) {
        first.take_units(smem, 0);
        last.take_units(smem, kTiles - 1);
    }
    __device__ const LaneRows& operator[](int m) const { return m == 0 ? first : last; }
};

// Makes scores of products; those of keys that a row does not see become -inf.
__device__ inline void apply(Scores& s, const WarpRows& rows, int first_key, bool masked) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const ScoreRules& rules = rows[m].rules[half];
            const int query = rows[m].query[half];
#pragma unroll
            for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int key = fragment_col(first_key, n) + e;
                    acc_t& score = s[m][n][2 * half + e];
                    const bool seen = !masked || rules.sees(query, key);
                    score = seen ? rules.score(score, query, key) : negative_infinity();
                }
        }
}

// Columns of a row's sums lie together that a lane has; where a run of them begins.
constexpr int kRunCols = Operands::kRunCols, kRuns = kPartCols / (4 * kRunCols);
__device__ inline int run_col(int run) {
    return (run * 4 + threadIdx.x % 4) * kRunCols;
}

// What a warp has found out about its rows from the keys that it has seen.
struct Findings {
    OnlineSoftmax softmax[kTiles][2];
    Accumulators<kTiles, kPartCols> o;

    // Takes in one tile of scores and turns them into P.
    __device__ void exponentiate(Scores& s) {
        acc_t largest[kTiles][2];
        bool raised = false;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                largest[m][half] = largest_of(s[m], half);
                raised |= largest[m][half] > softmax[m][half].max;
            }
        if (__any_sync(0xffffffffu, raised)) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m) raise_maxima(softmax[m], o[m], largest[m]);
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int n = 0; n < kBlockN / kMmaN; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        s[m][n][e] = softmax[m][half].weight(s[m][n][e]);
                    }
    }

    // Leaves them where parts of rows are merged.
    __device__ void store(RowPart* parts) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                RowPart& part = parts[row_of(m, half)];
                softmax[m][half].total<4>();
                if (threadIdx.x % 4 == 0) part.softmax = softmax[m][half];
#pragma unroll
                for (int run = 0; run < kRuns; ++run) {
                    Pack<acc_t, kRunCols> sums;
#pragma unroll
                    for (int i = 0; i < kRunCols; ++i)
                        sums[i] = Operands::in_run(o[m], half, run, i);
                    *reinterpret_cast<Pack<acc_t, kRunCols>*>(part.sums + run_col(run)) = sums;
                }
            }
    }
};

// Where a mask cuts through a tile, a value that is NaN or infinite must reach the rows that see
// its key and no other; but in the product 0 * NaN is NaN. Such values are added here to the
// outputs of the rows that see them, whatever their weight, and are zero in the product.
__device__ inline void take_out_nonfinite(Findings& found, Stage& stage, const WarpRows& rows,
                                          int first_key) {
    // Each warp looks at all values, so that all of a team go the same way.
    const unsigned int lane = threadIdx.x % 32;
    if (!__any_sync(0xffffffffu, finds_nonfinite<32>(stage.v, lane))) return;

#pragma unroll 1
    for (int key = 0; key < kBlockN; ++key)
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!rows[m].rules[half].sees(rows[m].query[half], first_key + key)) continue;
#pragma unroll
                for (int run = 0; run < kRuns; ++run)
#pragma unroll
                    for (int i = 0; i < kRunCols; ++i) {
                        const key_t value = *stage.v.at(key, run_col(run) + i);
                        if (!is_finite(value))
                            Operands::in_run(found.o[m], half, run, i) += to_acc(value);
                    }
            }
    sync_team();  // every warp has seen them
    constexpr int kChunkCols = decltype(stage.v)::kMatrixCols, kRowChunks = kPartCols / kChunkCols;
    for (int i = team_thread(); i < kBlockN * kRowChunks; i += kTeamThreads)
#pragma unroll
        for (int e = 0; e < kChunkCols; ++e) {
            key_t& value = *stage.v.at(i / kRowChunks, i % kRowChunks * kChunkCols + e);
            if (!is_finite(value)) value = key_t{};
        }
    sync_team();
}

// One tile of keys, which is there.
__device__ inline void attend(Findings& found, const Smem& smem, Stage& stage, const WarpRows& rows,
                              const KeyTiles<kBlockN>& keys, int first_key) {
    const bool masked = keys.masked(first_key);
    Scores s = {};
    add_product_nt<kTiles, kBlockN>(s, smem.q, warp_row(), stage.k);
    apply(s, rows, first_key, masked);
    found.exponentiate(s);
    if (kCutTiles && masked) take_out_nonfinite(found, stage, rows, first_key);
    add_product_pn<kTiles, kBlockN, kPartCols>(found.o, s, stage.v);
}

// Ends a row that is merged, and writes it: a warp's work.
__device__ inline void write_row(MergedRow& row, const ForwardParams& params,
                                 const Sequence& sequence, int head, int query) {
    const acc_t factor = end_row<1>(row.softmax, ScoreRules(params, sequence, head));
    row.write(sequence.queries<out_t>(params.o, head).row(query), factor);
    acc_t* lse = static_cast<acc_t*>(params.lse);
    if (lse && threadIdx.x % 32 == 0) {
        lse[sequence.first_row(head, params.sizes) + query] = row.softmax.lse();
    }
}

// Attends to a range of tiles; `finish(row, merged)` takes what was found of each row, a warp's
// work.
template <class Range, class Finish>
__device__ inline void attend_part(Smem& smem, const ForwardParams& params, const Work& work,
                                   const Range& range_of, const Finish& finish) {
    WarpRows rows(params, work);
    const int last_row = work.rows() - 1;
    const KeyTiles<kBlockN> keys(rows[0].rules[0].mask, work.query(0),
                                 work.query(last_row) - work.query(0) + 1);
    const TileRange tiles = range_of(keys);
    const Source source{work.sequence.keys<const key_t>(params.k, work.kv_head),
                        work.sequence.keys<const key_t>(params.v, work.kv_head), keys.end};
    Stage* const stages = smem.stages[team()];

    clear_padding<THREADS, kHeadDim>(smem.q);
    int tile = tiles.begin + team(), ahead = tile;
    // Where memory is busy it answers after more than a round.
    TilePages<kBlockN> pages[kStages + 1];
    source.look_up(pages, tile);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
        clear_padding<kTeamThreads, kHeadDim>(stages[stage].k, team_thread());
        clear_padding<kTeamThreads, kValueDim>(stages[stage].v, team_thread());
        if (stage == kStages - 1) continue;  // the loop begins with its copy
        source.copy(stages[stage], ahead, tiles.end, pages[stage]);
        if (stage == 0) copy_queries(smem, params, work);
        ptx::commit_copies();
        ahead += kTeams;
    }
    ptx::wait_copies_but<kStages - 2>();
    __syncthreads();  // Q is there
    smem.make<THREADS>(smem.q);
    if constexpr (kMixed) rows.take_units(smem);

    Findings found = {};
    TilePages<kBlockN> pages_ahead = pages[kStages - 1], pages_after = pages[kStages];
    for (int stage = 0; tile < tiles.end; tile += kTeams, ahead += kTeams) {
        ptx::wait_copies_but<kStages - 2>();
        sync_team();  // the tile is there, and every warp is done with the one before
        source.copy(stages[stage == 0 ? kStages - 1 : stage - 1], ahead, tiles.end, pages_ahead);
        ptx::commit_copies();  // a group for each tile, even if it is none
        pages_ahead = pages_after;
        pages_after = source.pages_of(ahead + 2 * kTeams);
        attend(found, smem, stages[stage], rows, keys, tile * kBlockN);
        stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    if constexpr (kDescaled) scale<kTiles, kPartCols>(found.o, work.scales(params).output);
    __syncthreads();  // nobody reads tiles any more
    found.store(smem.parts[team()]);
    __syncthreads();

    for (int row = threadIdx.x / 32; row <= last_row; row += kWarps) {
        finish(row, MergedRow::of<kTeams>(
                        kTeams, [&](int i) -> const RowPart& { return smem.parts[i][row]; }));
    }
}

// ---- as many blocks for each tile of rows ----

// How many part its keys. Both launches have the same grid.
__device__ inline int splits_of(const Sizes& sizes) {
    const int tiles = row_tiles<kBlockM>(sizes.batch, sizes.seqlen_q * group_of(sizes));
    return gridDim.x / (tiles * sizes.kv_heads);
}

// The parts of a row that the blocks found lie one after the other, rows as in the LSE.
__device__ inline RowPart* parts_of(const ForwardParams& params, long long row, int splits) {
    return static_cast<RowPart*>(params.workspace) + row * splits;
}

__device__ inline void attend_split(Smem& smem, const ForwardParams& params) {
    const Sizes& sizes = params.sizes;
    const int group = group_of(sizes), splits = splits_of(sizes);
    const int head_splits = blockIdx.x / sizes.kv_heads, split = head_splits % splits;
    const auto [batch, first_row] =
        row_tile<kBlockM>(head_splits / splits, sizes.batch, sizes.seqlen_q * group,
                          params.features.cu_seqlens_q, group);
    const Work work{Sequence(params, batch), static_cast<int>(blockIdx.x % sizes.kv_heads), group,
                    first_row};
    // It may be none of the sequence's tiles.
    if (kPacked && (work.rows() <= 0 || !work.sequence.is_ours())) return;

    // Tiles are parted as evenly as whole ones can be.
    const auto range_of = [&](const KeyTiles<kBlockN>& keys) -> TileRange {
        const long long tiles = ceil_div(max(keys.end - keys.begin, 0), kBlockN);
        const int first = keys.begin / kBlockN;
        return {first + static_cast<int>(tiles * split / splits),
                first + static_cast<int>(tiles * (split + 1) / splits)};
    };
    attend_part(smem, params, work, range_of, [&](int row, MergedRow merged) {
        const int query = work.query(row), head = work.head(row);
        if constexpr (kSplitKeys) {
            const long long index = work.sequence.first_row(head, sizes) + query;
            merged.store(parts_of(params, index, splits)[split]);
        } else {
            write_row(merged, params, work.sequence, head, query);
        }
    });
}

// ---- a share of all tiles' keys for each block ----

using Rounds = KeyRounds<kBlockM, kBlockN, kTeams>;

__device__ inline Work work_at(const ForwardParams& params, const RoundPlace& place) {
    const int row_tiles = place.of.tiles / params.sizes.kv_heads;
    return {Sequence(params, place.batch), place.tile / row_tiles, group_of(params.sizes),
            place.tile % row_tiles * kBlockM};
}

// What a block leaves of tiles that it has a part of: of the one that it ends or goes on with, and
// of the one that it begins.
struct ShareParts {
    RowPart ends[kBlockM], begins[kBlockM];
};
__device__ inline ShareParts& parts_of_block(const ForwardParams& params, int block) {
    return static_cast<ShareParts*>(params.workspace)[block];
}

__device__ inline void attend_share(Smem& smem, const ForwardParams& params) {
    const Rounds rounds(params, gridDim.x);
    const KeyShare share = rounds.of_block(blockIdx.x);
    if (share.begin == share.end) return;
    ShareParts& parts = parts_of_block(params, blockIdx.x);
    RoundPlace place = rounds.at(share.begin);
    for (int left = share.end - share.begin;; place = rounds.next_tile(place)) {
        const Work work = work_at(params, place);
        const int count = min(place.of.rounds - place.round, left);
        // Rows of a tile may see less than the sequence's rows together.
        const auto range_of = [&](const KeyTiles<kBlockN>& keys) -> TileRange {
            const Mask mask = work.sequence.mask(params.features);
            const KeyTiles<kBlockN> all(mask, 0, work.sequence.seqlen_q);
            const int first = all.begin / kBlockN + place.round * kTeams;
            return {max(first, keys.begin / kBlockN),
                    min(first + count * kTeams, ceil_div(keys.end, kBlockN))};
        };
        attend_part(smem, params, work, range_of, [&](int row, MergedRow merged) {
            if (count == place.of.rounds) {
                write_row(merged, params, work.sequence, work.head(row), work.query(row));
            } else {
                merged.store((place.round == 0 ? parts.begins : parts.ends)[row]);
            }
        });
        left -= count;
        if (left == 0) return;
        __syncthreads();  // the next part's tiles may overwrite what was found
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    fwd_8_split_kv(const __grid_constant__ ForwardParams params) {
    if constexpr (kNextOverlaps) ptx::let_next_launch_begin();
    Smem& smem = shared_memory<Smem>();
    if constexpr (kEvenShares) {
        attend_share(smem, params);
    } else {
        attend_split(smem, params);
    }
}

// ---- the second launch: parts of rows are merged ----

// Merges `count` parts of each of some rows: as many warps share a row as are needed for each to
// read its parts at once; one of them merges what those found. `parts_of_row(row, first, step)` are
// the parts from one on, and `write(row, merged)` ends a row.
template <class Parts, class Write>
__device__ inline void merge_rows(int first, int step, int rows, int count,
                                  const Parts& parts_of_row, const Write& write) {
    constexpr int kMergeWarps = kMergeThreads / 32;
    auto& parts = shared_memory<MergeSmem, MERGE_SMEM_BYTES>().parts;
    int sharing = 1;
    while (sharing < kMergeWarps && sharing * MergedRow::kPartsAtOnce < count) sharing *= 2;
    const int warp = threadIdx.x / 32, share = warp % sharing;
    const long long at_once = kMergeWarps / sharing;
    for (long long next = first * at_once; next < rows; next += step * at_once) {
        const int row = static_cast<int>(next) + warp / sharing;
        if (row < rows) {
            const auto part = parts_of_row(row, share, sharing);
            MergedRow::of<MergedRow::kPartsAtOnce>(ceil_div(count - share, sharing), part)
                .store(parts[warp]);
        }
        __syncthreads();
        if (row < rows && share == 0) {
            write(row, MergedRow::of<kMergeWarps>(
                           sharing, [&](int i) -> const RowPart& { return parts[warp + i]; }));
        }
        __syncthreads();  // the next rows' parts may overwrite these
    }
}

// Packed arrays may have rows before the first sequence and after the last.
__device__ inline void merge_all(const ForwardParams& params) {
    const Sizes& sizes = params.sizes;
    const int splits = splits_of(sizes);
    const auto parts_of_row = [&](int row, int first, int step) {
        const RowPart* const parts = parts_of(params, row, splits) + first;
        return [=](long long i) -> const RowPart& { return parts[i * step]; };
    };
    if constexpr (kNextOverlaps) ptx::wait_for_launch_before();
    // Memory for parts of 2^31 rows nobody has.
    merge_rows(blockIdx.x, gridDim.x, rows_of_heads<int>(sizes), splits, parts_of_row,
               [&](int row, MergedRow merged) {
                   const int query = row % sizes.seqlen_q;
                   const int head = row / sizes.seqlen_q % sizes.heads;
                   if constexpr (kPacked) {
                       const int* const cu_seqlens = params.features.cu_seqlens_q;
                       if (query < cu_seqlens[0] || query >= cu_seqlens[sizes.batch]) return;
                   }
                   const int batch = row / sizes.seqlen_q / sizes.heads;
                   write_row(merged, params, Sequence(batch, 0, 0, sizes.seqlen_q, sizes.seqlen_k),
                             head, query);
               });
}

// The tile that a block began and did not end.
__device__ inline void merge_tile(const ForwardParams& params) {
    const int blocks = gridDim.x / kMergeBlocks, block = blockIdx.x % blocks;
    const Rounds rounds(params, blocks);
    const KeyShare share = rounds.of_block(block);
    if (share.begin == share.end) return;
    const RoundPlace last = rounds.at(share.end - 1);
    const int first_round = share.end - 1 - last.round;
    const int end_round = first_round + last.of.rounds;
    if (first_round < share.begin || end_round == share.end) return;

    const Work work = work_at(params, last);
    const auto parts_of_row = [&](int row, int first, int step) {
        return [=, blocks = &parts_of_block(params, block)](int i) -> const RowPart& {
            const int part = first + i * step;
            return part == 0 ? blocks->begins[row] : blocks[part].ends[row];
        };
    };
    if constexpr (kNextOverlaps) ptx::wait_for_launch_before();
    merge_rows(blockIdx.x / blocks, kMergeBlocks, work.rows(),
               rounds.block_of(end_round - 1) - block + 1, parts_of_row,
               [&](int row, MergedRow merged) {
                   write_row(merged, params, work.sequence, work.head(row), work.query(row));
               });
}

extern "C" __global__ void __launch_bounds__(kMergeThreads, kMergeBlocksOfSm)
    merge_splits(const __grid_constant__ ForwardParams params) {
    if constexpr (kEvenShares) {
        merge_tile(params);
    } else {
        merge_all(params);
    }
    // Even where there is nothing to merge, this launch ends after the one before.
    if constexpr (kNextOverlaps) {
        if (blockIdx.x == 0) ptx::wait_for_launch_before();
    }
}
