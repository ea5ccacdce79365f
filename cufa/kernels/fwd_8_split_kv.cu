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
#include "mma/fwd_8_copies.cuh"
#include "mma/fwd_8_findings.cuh"
#include "mma/fwd_8_shares.cuh"
#include "mma/fwd_8_splits.cuh"

// One tile of keys, which is there.
__device__ inline void attend(Findings& found, const Smem& smem, Stage& stage, const WarpRows& rows,
                              const SeenScores& seen, const KeyTiles<kBlockN>& keys,
                              int first_key) {
    const bool masked = keys.masked(first_key);
    Scores s = {};
    add_product_nt<kTiles, kBlockN>(s, smem.q, warp_row(), stage.k);
    apply(s, rows, seen, first_key, masked);
    found.exponentiate(s);
    if (kCutTiles && masked) take_out_nonfinite(found, stage, rows, first_key);
    add_product_pn<kTiles, kBlockN, kPartCols>(found.o, s, stage.v);
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

    clear_padding<kThreads, kHeadDim>(smem.q);
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
    smem.make<kThreads>(smem.q);
    if constexpr (kMixed) rows.take_units(smem);

    Findings found = {};
    SeenScores seen;
    seen.load(rows, tile * kBlockN);
    TilePages<kBlockN> pages_ahead = pages[kStages - 1], pages_after = pages[kStages];
    for (int stage = 0; tile < tiles.end; tile += kTeams, ahead += kTeams) {
        ptx::wait_copies_but<kStages - 2>();
        sync_team();  // the tile is there, and every warp is done with the one before
        source.copy(stages[stage == 0 ? kStages - 1 : stage - 1], ahead, tiles.end, pages_ahead);
        ptx::commit_copies();  // a group for each tile, even if it is none
        pages_ahead = pages_after;
        pages_after = source.pages_of(ahead + 2 * kTeams);
        seen.look(rows, tile * kBlockN);
        seen.load(rows, (tile + kTeams) * kBlockN);
        attend(found, smem, stages[stage], rows, seen, keys, tile * kBlockN);
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

// The same, for either way to part keys.
struct AttendToPart {
    Smem& smem;
    const ForwardParams& params;

    template <class Range, class Finish>
    __device__ void operator()(const Work& work, const Range& range_of,
                               const Finish& finish) const {
        attend_part(smem, params, work, range_of, finish);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    fwd_8_split_kv(const __grid_constant__ ForwardParams params) {
    if constexpr (kNextOverlaps) ptx::let_next_launch_begin();
    Smem& smem = shared_memory<Smem>();
    const AttendToPart attend{smem, params};
    if constexpr (kEvenShares) {
        attend_share(params, attend);
    } else {
        attend_split(params, attend);
    }
}

extern "C" __global__ void __launch_bounds__(kMergeThreads, kMergeBlocksOfSm)
    merge_splits(const __grid_constant__ ForwardParams params) {
    if constexpr (kEvenShares) {
        merge_share(params);
    } else {
        merge_splits_of_rows(params);
    }
    // Even where there is nothing to merge, this launch ends after the one before.
    if constexpr (kNextOverlaps) {
        if (blockIdx.x == 0) ptx::wait_for_launch_before();
    }
}
