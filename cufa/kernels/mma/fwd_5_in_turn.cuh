// How fwd_5_mma processes a tile where its warps hand over K and V instead of meeting.
#pragma once

#include "mma/fwd_5_copies.cuh"
#include "mma/fwd_5_values.cuh"

// Processes tile number `number`. On entry the copy of K is under way. V is copied when the other
// warps are probably done with the V before, and the next K when they are probably done with this
// K. Where a mask cuts, a thread takes NaN out of the part of V that it copied before announcing
// it.
__device__ inline void attend_in_turn(Output& out, Smem& smem, const ScoreRules& rules,
                                      Source& source, const Seen& seen_keys, int first_row,
                                      int first_key, int step, int number) {
    constexpr int kHalf = decltype(smem.q)::kCols / kMmaK / 2 * kMmaK;
    const int next_key = first_key + step, keys_end = source.tiles.end;
    const bool masked = source.tiles.masked(first_key, seen_keys.cuts(first_row, first_key));
    const SeenScores seen(seen_keys, rules, first_row, first_key, masked);
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
        if constexpr (kRowsAlike) {
            seen.clear_copied_values(smem);
        } else {
            smem.note_nonfinite(clear_copied_nonfinite<kThreads, kValueDim>(smem.v));
        }
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
    // Not masked: nothing is left to take out.
    weigh_values(out, s, smem, rules, first_row, first_key, keys_end, false);
    smem.values.release();
}
