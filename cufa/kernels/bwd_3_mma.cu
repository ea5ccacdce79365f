// bwd_3_mma: FlashAttention-2's backward on tensor cores (Dao 2023, Algorithm 2).
//
// Change from bwd_2_flash_v2: mma.sync as in fwd_5_mma. S and dP are computed transposed, S^T = K
// Q^T and dP^T = V dO^T. A warp owns rows of keys, so P^T and dS^T are left operands of dV += P^T
// dO and dK += dS^T Q straight from registers. Only dS^T goes to shared memory, for dQ = dS K.
// Where dK and dV are too wide for a warp's registers (SPLIT 2 or 4), so many warps share the rows
// of keys. Each computes S^T and dP^T for its part of the queries, or with few of them the same as
// another warp, and owns a part of the head dims of dK and dV.
// Where every run must give the same bits, blocks that own queries compute dQ, with the parts of
// keys and queries exchanged. Where barriers can be waited at for parts of a block's work
// (HANDS_OVER), warps hand over Q, dO and dS through them, and none waits for the slowest. Where
// sequences have no more keys than a tile (WHOLE_HEADS), a block has all keys of a KV head and dQ
// to itself: it finds LSE and D, too, and rounds dQ at once. A mask that hides keys from all
// queries that share them, such as padding (HIDES_KEYS), is read once by the block that owns the
// keys.
//
// Launches: with another mask or a mask_mod, and with any if deterministic, seen_tiles, which finds
// out what it shows of each tile of scores; row_sums (LSE and D; sets the sums in the workspace to
// zero), key_tiles, round_keys if the heads are in parts, round_queries or, if deterministic,
// query_tiles; array_gradients and sink_gradient, each if wanted. If blocks have whole heads,
// key_tiles alone, and of the others what these two and parts need.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     block: BLOCK_N keys of one KV head, for one of HEAD_PARTS parts of the query heads that
//          share them, or BLOCK_N queries of one head; warp: kTiles 16-row tiles of them
// Shared   K, V, STAGES Q and dO tiles with LSE and D, dS^T and, if SPLIT, P^T, with whole heads O;
//          or Q, dO, STAGES K and V tiles and dS
// Global   workspace: sums of dQ in fragments (heads, tiles of queries, BLOCK_M, head_dim rounded
//          up), unless deterministic or heads are whole and not packed; sums of dK and dV (batch,
//          seqlen_k, kv_heads, HEAD_PARTS, dims in eights), if there are parts; LSE and D (batch,
//          heads, seqlen_q, 2); what seen_tiles finds out; sums of the gradients of score_mod's
//          arrays, if wanted
// Writes   dQ, dK, dV
#include "call/grid.cuh"
#include "gradients/sink_gradient.cuh"
#include "mma/bwd_3_heads.cuh"
#include "mma/bwd_3_queries.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    seen_tiles(const __grid_constant__ BackwardParams params) {
    if constexpr (kSkipsTiles) {
        const Workspace workspace(params);
        const long long tile = warp_of_grid<kThreads>();
        const long long of_keys = Workspace::keys_seen(params);
        if (tile < of_keys) {
            SeenOfKeys::find(workspace.seen, params, tile);
        } else if (tile < Workspace::seen_tiles(params)) {
            SeenOfQueries::find(workspace.seen_of_queries(params), params, tile - of_keys);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    row_sums(const __grid_constant__ BackwardParams params) {
    const Workspace workspace(params);
    if constexpr (kKeepsStats) write_row_stats<kThreads>(params, workspace.stats);
    const long long row = warp_of_grid<kThreads>();
    if (kSharesQueries && row < DqSums::rows(params.sizes)) {
        DqSums::clear_row(workspace.dq, row);
    }
    if constexpr (kArrayGradients)
        clear_sums<kThreads>(workspace.arrays, array_sums(params.features));
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    key_tiles(const __grid_constant__ BackwardParams params) {
    KeySmem& smem = shared_memory<Smem>().keys;
    const KeyTile own = keys_of_block(params);
    if (kPacked && !kWholeHeads && own.first_key >= end_of_keys(params, own.sequence))
        return;  // the sequence does not have this tile

    clear_padding_of(smem);
    if constexpr (kWholeHeads) {
        attend_whole_heads(smem, params, own);
    } else {
        attend_keys(smem, params, own);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    round_keys(const __grid_constant__ BackwardParams params) {
    if constexpr (kParts > 1) add_parts<kThreads>(params, Workspace(params).key_sums);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    query_tiles(const __grid_constant__ BackwardParams params) {
    if constexpr (kOwnsQueries) {
        QuerySmem& smem = shared_memory<Smem>().queries;
        const Place place;
        const QueryTile own = query_tile_of_block<kBlockN>(params);
        const Sequence& sequence = own.sequence;
        const int first_row = own.first_row, seqlen_q = sequence.seqlen_q;
        if (kPacked && first_row >= seqlen_q) return;  // the sequence does not have this tile

        clear_padding<kThreads, kHeadDim>(smem.q);
        clear_padding<kThreads, kValueDim>(smem.dout);
        for (int stage = 0; stage < kStages; ++stage) {
            clear_padding<kThreads, kHeadDim>(smem.k[stage]);
            clear_padding<kThreads, kValueDim>(smem.v[stage]);
        }
        const QueryHead queries(params, sequence, own.head);
        copy_tile_anew<kHeadDim>(smem.q, queries.q, first_row, seqlen_q);
        copy_tile_anew<kValueDim>(smem.dout, queries.dout, first_row, seqlen_q);
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
                copy_tile_anew<kHeadDim>(smem.k[stage], k, key, tiles.end);
                copy_tile_anew<kValueDim>(smem.v[stage], v, key, tiles.end);
            },
            [&](int stage, int key, int) {
                gradients.attend(smem, stage, queries.rules, place, first_row, key,
                                 tiles.masked(key, seen.cuts(first_row, key)));
            });
        ptx::wait_copies();
        gradients.write(params, own, place);
    }
}

// Each warp has 16 rows.
extern "C" __global__ void __launch_bounds__(kThreads)
    round_queries(const __grid_constant__ BackwardParams params) {
    if constexpr (kSharesQueries) {
        const Sizes& sizes = params.sizes;
        const int strips = row_tiles<kMmaM>(sizes.batch, sizes.seqlen_q);
        const long long index = warp_of_grid<kThreads>();
        if (index >= static_cast<long long>(sizes.heads) * strips) return;
        const int head = index / strips;
        const auto [batch, first_row] = row_tile<kMmaM>(index % strips, sizes.batch, sizes.seqlen_q,
                                                        params.features.cu_seqlens_q);
        const Sequence sequence(params, batch);
        const DqSums sums(Workspace(params).dq, sizes, sequence, head);
        if (first_row >= sequence.seqlen_q) return;  // the sequence does not have it
        sums.round_rows<kHeadDim>(sequence.queries<scalar_t>(params.dq, head), first_row,
                                  sequence.seqlen_q, params.softmax_scale);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    array_gradients(const __grid_constant__ BackwardParams params) {
    if constexpr (kArrayGradients) round_array_sums<kThreads>(params, Workspace(params).arrays);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    sink_gradient(const __grid_constant__ BackwardParams params) {
    if constexpr (kSink)
        write_sink_gradient<kThreads>(params, StatsInOrder{params, Workspace(params).stats},
                                      shared_memory<WarpSums<kThreads>, SINK_SMEM_BYTES>());
}
