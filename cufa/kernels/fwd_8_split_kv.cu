// fwd_8_split_kv: few queries and many keys, as in decoding (flash-decoding: Dao et al. 2023).
//
// Change from fwd_5_mma: nearly all of the time goes to reading K and V, so they are read once, by
// all SMs. The rows of a tile are the queries of all heads that share a KV head. Keys are split
// among blocks, so that there are enough blocks, and among the teams of a block. A team has a warp
// for each 16 or 32 rows and its own ring of tiles, and waits for no other team. The results of
// teams are merged in shared memory, those of blocks by a second launch. If lengths may differ, the
// keys of all sequences together are divided evenly among blocks (key_shares.cuh). Sequences of
// more than kMostQueries queries are left to fwd_6_wgmma, which then runs beside this kernel.
// Of wide heads, several warps share rows: each computes their scores from a part of the head dims,
// adds up the parts of all, and has a part of the output's columns. Where rows of V are the
// beginnings of those of K (multi-head latent attention: DeepSeek-AI 2024), only K is copied.
// With a mask or a mask_mod, a team finds out what a tile shows before its copy would begin, and
// leaves out tiles of which nobody sees anything.
//
// Launches: fwd_8_split_kv; merge_parts, if blocks split the keys of a tile. It may begin while
// the launch before it ends.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (batch,
//          seqlen_k, kv_heads, value_dim); packed sequences: (tokens, heads, dim); K and V in
//          pages: (pages, page_size, kv_heads, dim). K and V may have 8 bits, with Q in 8 or 16 and
//          O in 16; then q_descale, k_descale and v_descale (batch, kv_heads) are the factors of Q,
//          K and V
// Owns     block: BLOCK_M rows of one KV head and a part of its keys, with EVEN_SHARES several of
//          these in turn; team: every kTeams-th tile of BLOCK_N of those keys; warp: WARP_ROWS rows
//          and, with COLUMN_WARPS, a part of the output's columns
// Shared   Q tile and, for each team, STAGES tiles of K and V; later replaced by results of teams
// Global   workspace: partial rows (partial_rows.cuh), of each row for all blocks that split its
//          keys or, with EVEN_SHARES, of each block for the tile that it ends and the one that it
//          begins
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key, unless
//          there is a sink. Where blocks split the keys of a tile, they write partial rows to the
//          workspace, and merge_parts writes O and the LSE.
#include "mma/fwd_8_copies.cuh"
#include "mma/fwd_8_key_parts.cuh"
#include "mma/fwd_8_output.cuh"
#include "mma/fwd_8_scores.cuh"
#include "mma/fwd_8_shares.cuh"

// Processes one tile of keys, whose copies have arrived.
__device__ inline void attend(Output& out, Smem& smem, Stage& stage, const WarpRows& rows,
                              const SeenScores& seen, const KeyTiles<kBlockN>& keys, int first_key,
                              bool takes_out) {
    const bool masked = keys.masked(first_key);
    Scores s = {};
    const int first_dim = column_warp() * kOwnDepth;
    add_product_nt<kTiles, kBlockN>(s, smem.inputs.q, warp_row(), stage.k, 0, first_dim,
                                    first_dim + kOwnDepth);
    smem.add_up(s);
    if (kScoreMod && !masked) {
        apply<true>(s, rows, seen, first_key, false);
    } else {
        apply<false>(s, rows, seen, first_key, masked);
    }
    out.exponentiate(s);
    if (kCutTiles && takes_out && masked) take_out_nonfinite(out, stage, rows, first_key);
    add_product_pn<kTiles, kBlockN, kOwnCols>(out.o, s, stage.v(), column_warp() * kOwnCols);
}

// Whether values that are NaN or infinite are taken out where a mask cuts only if the output shows
// that there are any. Nearly always there are none, and a mask in memory or a function may cut all
// tiles; a range of keys cuts few of them.
constexpr bool kTakesOutLater = kKeyMask;

// Attends to a range of tiles; with `again`, Q is there, and values that are not finite are taken
// out.
template <class Range>
__device__ inline Output attend_tiles(Smem& smem, const ForwardParams& params, Work work,
                                      const Range& range_of, bool again) {
    if constexpr (kTakesOutLater) work.find_anew();
    WarpRows rows(params, work);
    const int first_query = work.query(0), last_query = work.query(work.rows() - 1);
    const KeyTiles<kBlockN> keys(rows[0].rules[0].mask, first_query, last_query - first_query + 1);
    const TileRange range = range_of(work, keys);
    const bool takes_out = again || !kTakesOutLater;
    const Source source{work.sequence.keys<const key_t>(params.k, work.kv_head),
                        work.sequence.keys<const key_t>(params.v, work.kv_head), keys.end};

    TeamTiles tiles(source, smem.inputs.stages[team()], range);
    TilePages<kBlockN> pages[kStages + 1];
    tiles.begin(pages, [&] {
        if (!again) copy_queries(smem, params, work);
    });
    ptx::wait_copies_but<kStages - 2>();
    __syncthreads();  // Q is there
    if (!again) smem.make<kThreads>(smem.inputs.q);
    if constexpr (kMixed) rows.take_units(smem);

    Output out = {};
    SeenScores seen(rows, tiles.tile, tiles.end);
    // Of the next tile to be copied and the one after it: busy memory takes more than a round to
    // answer.
    TilePages<kBlockN> pages_ahead = pages[kStages - 1], pages_after = pages[kStages];
    for (; !tiles.at_end(); tiles.advance()) {
        tiles.arrive(rows, seen);
        tiles.copy_next(pages_ahead);
        pages_ahead = pages_after;
        pages_after = source.pages_of(tiles.ahead + 2 * kTeams);
        seen.load(rows, tiles.first_key_after());
        if (tiles.wants_this()) {
            attend(out, smem, tiles.current(), rows, seen, keys, tiles.tile * kBlockN, takes_out);
        }
        seen.advance();
    }
    return out;
}

// Attends to a range of tiles. Then each warp calls `finish(row, merged)` with the results of some
// rows.
template <class Range, class Finish>
__device__ inline void attend_part(Smem& smem, const ForwardParams& params, const Work& work,
                                   const Range& range_of, const Finish& finish) {
    clear_padding<kThreads, kHeadDim>(smem.inputs.q);
    Output out;
    bool again = false;
    do {
        out = attend_tiles(smem, params, work, range_of, again);
        again =
            kTakesOutLater && !again && __syncthreads_or(has_nonfinite<kTiles, kOwnCols>(out.o));
    } while (again);
    if constexpr (kDescaled) scale<kTiles, kOwnCols>(out.o, work.scales(params).output);
    __syncthreads();  // nobody reads tiles any more
    out.store(smem.parts[team()]);
    __syncthreads();

    for (int row = threadIdx.x / 32; row < work.rows(); row += kWarps) {
        finish(row, MergedRow::of<kTeams>(
                        kTeams, [&](int i) -> const PartialRow& { return smem.parts[i][row]; }));
    }
}

// attend_part as a function object, for both ways to split keys.
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
    const AttendToPart attend_to_part{smem, params};
    if constexpr (kEvenShares) {
        attend_share(params, attend_to_part);
    } else {
        attend_key_part(params, attend_to_part);
    }
}

extern "C" __global__ void __launch_bounds__(kMergeThreads, kMergeBlocksOfSm)
    merge_parts(const __grid_constant__ ForwardParams params) {
    if constexpr (kEvenShares) {
        merge_share(params);
    } else {
        merge_key_parts(params);
    }
    // Blocks with nothing to merge have not waited, and there may be no others. One that waits is
    // enough for this launch to end after the one before.
    if constexpr (kNextOverlaps) {
        if (blockIdx.x == 0) ptx::wait_for_launch_before();
    }
}
