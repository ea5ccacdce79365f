// fwd_5_mma: FlashAttention-2 on tensor cores (Dao 2023, Algorithm 1).
//
// Change from fwd_4_flash_v2: mma.sync instead of multiply-adds. Operands have 16 bits, with
// float32 sums. float32 operands are split into one or two parts of tf32; float64 has its own mma
// (operands_*.cuh). A warp owns whole rows. S and O are accumulators, and P goes from the registers
// of S straight into the second product. K and V are copied by cp.async, each during the product
// before the one that needs it. O is rescaled only when a maximum has grown by more than float32
// sums can hold anyway.
//
// float64 has one pipe for products and all other arithmetic. To save work there, Q is multiplied
// by the scale beforehand, and products start from minus the maxima. Where barriers can be waited
// at for parts of a block's work (HANDS_OVER), warps hand over K and V through them instead of
// meeting: one warp may compute its softmax while others multiply.
//
// To read it, begin with 16 bits and no mask, where kFolded, kHandsOver, kLongSteps, kCutTiles and
// kKeyMask are false. `attend` processes a tile of keys; its softmax is in fwd_5_output.cuh.
//
// Launches: seen_tiles, if there is a mask or a mask_mod; fwd_5_mma. seen_tiles finds out which
// tiles of scores a mask hides, so that they are skipped. With KEY_BITS it finds out which tiles of
// keys, and which keys, a mask hides.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim),
//          V (batch, seqlen_k, kv_heads, value_dim); packed sequences: (tokens, heads, dim); K and
//          V in pages: (pages, page_size, kv_heads, dim)
// Owns     block: BLOCK_M queries of one head; warp: kTiles 16-row tiles of them. SPLIT warps share
//          the scores of the same rows and divide the columns of the output
// Shared   Q tile, K tile, V tile
// Global   workspace: with a mask or a mask_mod, what seen_tiles finds out
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key, unless
//          there is a sink
#include "call/grid.cuh"
#include "mma/fwd_5_in_turn.cuh"

// Processes one tile of keys; the next tile is `step` keys further on. On entry K is being copied,
// on exit the next K. Its pages are looked up while products run. Whether the tile is masked is
// tested at run time: a second copy of this code for whole tiles would cost registers.
__device__ inline void attend(Output& out, Smem& smem, const ScoreRules& rules, Source& source,
                              const Seen& seen_keys, int first_row, int first_key, int step) {
    const int keys_end = source.tiles.end;
    const bool masked = source.tiles.masked(first_key, seen_keys.cuts(first_row, first_key));
    ptx::wait_copies();
    __syncthreads();  // K is there, and every warp is done with the V before
    source.copy_v(smem, first_key, copying_thread());
    source.look_up_pages(first_key + step);
    const SeenScores seen(seen_keys, rules, first_row, first_key, masked);
    Scores s;
    out.begin(s);
    add_product_nt<kTiles, kBlockN, kScoreSteps>(s, smem.q, warp_row(), smem.k);
    apply(rules, s, seen, first_row, first_key, masked);

    ptx::wait_copies();
    if (kRowsAlike && masked) seen.clear_copied_values(smem);
    __syncthreads();  // V is there, and every warp is done with this K
    if (first_key + step < keys_end) source.copy_k(smem, first_key + step, copying_thread());
    out.exponentiate(s, scale_log2(rules), smem);
    weigh_values(out, s, smem, rules, first_row, first_key, keys_end, masked);
}

// The tile that a block owns. float64 blocks take so long that a section has two rounds of them:
// with a single round in the last section, the longest block would end last.
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

extern "C" __global__ void __launch_bounds__(kThreads)
    seen_tiles(const __grid_constant__ ForwardParams params) {
    Seen::find(params, warp_of_grid<kThreads>());
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    fwd_5_mma(const __grid_constant__ ForwardParams params) {
    Smem& smem = shared_memory<Smem>();
    const auto [sequence, head, kv_head, first_row] = tile_of_block(params);
    const int seqlen_q = sequence.seqlen_q;
    if (kPacked && first_row >= seqlen_q) return;  // the sequence does not have this tile

    const ScoreRules rules(params, sequence, head);
    const auto q = sequence.queries<const scalar_t>(params.q, head);
    const auto k = sequence.keys<const scalar_t>(params.k, kv_head);
    const auto v = sequence.keys<const scalar_t>(params.v, kv_head);

    clear_padding<kThreads, kHeadDim>(smem.q);
    clear_padding<kThreads, kHeadDim>(smem.k);
    clear_padding<kThreads, kValueDim>(smem.v);
    copy_tile<kThreads, kHeadDim>(smem.q, q, first_row, seqlen_q);
    if constexpr (!kFolded) take_scale(smem, rules);  // any later, ptxas would spill on Blackwell
    Source source{k, v, KeyTiles<kBlockN>(rules.mask, first_row, kBlockM)};
    const int keys_end = source.tiles.end;
    const Seen seen(params, sequence, head);
    int begin = source.tiles.begin, step = kBlockN;
    if constexpr (kKeyMask) begin = seen.next_key(first_row, begin, keys_end);
    source.look_up_pages(begin);
    source.copy_k(smem, begin, threadIdx.x);
    smem.init();  // while Q and K are being copied
    if constexpr (kFolded) take_scale(smem, rules);
    if constexpr (kHandsOver) {
        __syncthreads();  // the barriers are set up
        smem.keys.announce_copies();
    }

    Output out = {};
    int number = 0;
    for (int key = begin; key < keys_end; key += step) {
        if constexpr (kKeyMask) step = seen.next_key(first_row, key + kBlockN, keys_end) - key;
        if constexpr (kHandsOver) {
            attend_in_turn(out, smem, rules, source, seen, first_row, key, step, number++);
        } else {
            attend(out, smem, rules, source, seen, first_row, key, step);
        }
    }
    ptx::wait_copies();

    write_output(out, smem, params, tile_of_block(params, ptx::anew(blockIdx.x)));
}
