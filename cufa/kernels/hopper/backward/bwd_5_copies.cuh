// The producer of bwd_5_wgmma_wide: one thread, which copies tiles of keys and queries.
#pragma once

#include "hopper/backward/bwd_5_block.cuh"

// Copies a tile of keys, also one that no query sees: zeros leave through its memory.
__device__ inline void send_keys(Smem& smem, const Params& params, KeyWork work,
                                 RingPosition<1>& to) {
    smem.keys_ring.wait_empty(to);
    ptx::Barrier& full = smem.keys_ring.announce(to, KeyRows::kBytes + ValueRows::kBytes);
    const int first_key = work.sequence(params.call).first_k + work.first_key;
    copy_tile_once(smem.k, params.k, full, work.map_batch(), work.kv_head(), first_key,
                   first_head_col());
    copy_tile_once(smem.v, params.v, full, work.map_batch(), work.kv_head(), first_key,
                   first_value_col());
    to.advance();
}

// Copies the bias of a tile of queries. A template, because Smem may have none.
template <class Smem, class Params, class Walk>
__device__ inline void send_bias(Smem& smem, const Params& params, const KeyWork& work,
                                 const Walk& at, RingPosition<kStages> to) {
    if constexpr (kBiasBoxes) {
        smem.p_ring.wait_empty(to);
        auto& bias = bias_in_place_of<BiasRows>(smem.p[to.stage]);
        ptx::Barrier& full = smem.bias_full[to.stage];
        ptx::barrier_arrive_expecting(full, kBiasBytes<BiasRows>);
        copy_bias(bias, params.bias, full, params.call.features.bias, work.batch, at.head,
                  at.tile * kBlockM, work.first_key);
    }
}

template <class Walk>
__device__ inline void send_queries(Smem& smem, const Params& params, KeyWork work, const Walk& at,
                                    RingPosition<kStages>& to) {
    const Sequence sequence = work.sequence(params.call);
    const QueryWorkspace workspace(params.call);
    const int first_row = sequence.first_q + at.tile * kBlockM;
    smem.q_ring.wait_empty(to);
    if constexpr (kHidesScores) smem.q_ring.label(to, at.label());
    ptx::Barrier& q_full = smem.q_ring.announce(to, QueryRows::kBytes + sizeof(Statistics));
    copy_tile(smem.q[to.stage], params.q, q_full, work.map_batch(), at.head, first_row, 0,
              first_head_col());
    ptx::copy_bytes(&smem.rows[to.stage], &workspace.rows_of(sequence, at.head, at.tile),
                    sizeof(Statistics), q_full);
    smem.dout_ring.wait_empty(to);
    ptx::Barrier& dout_full = smem.dout_ring.announce(to, OutRows::kBytes);
    copy_tile(smem.dout[to.stage], params.dout, dout_full, work.map_batch(), at.head, first_row, 0,
              first_value_col());
    send_bias(smem, params, work, at, to);
    to.advance();
}

// Sends the tiles of queries that a mask or a mask_mod shows some of the keys.
__device__ inline void send_seen(Smem& smem, const Params& params, const KeyWork& work,
                                 const Tiles& tiles, RingPosition<kStages>& to) {
    for (SeenWalk at(params.call, seen_parts(params.call), work, tiles); !at.at_end();
         at.advance()) {
        send_queries(smem, params, work, at, to);
    }
}

__device__ inline void produce(Smem& smem, const Params& params, KeyWork work) {
    const Sizes& sizes = params.call.sizes;
    RingPosition<1> keys_to;
    RingPosition<kStages> to;
    do {
        send_keys(smem, params, work, keys_to);
        const Tiles tiles(params.call, work);
        if constexpr (kHidesScores) {
            if (tiles.begin < tiles.end) send_seen(smem, params, work, tiles, to);
        } else {
            for (RangeWalk at(tiles, sizes, work.part); !at.at_end(); at.advance()) {
                send_queries(smem, params, work, at, to);
            }
        }
    } while (Keys::next(work, params.call));
}
