// The producer of bwd_8_wgmma_pair: one thread, which copies tiles of keys and queries.
#pragma once

#include "hopper/backward/bwd_8_block.cuh"

// Copies a tile of keys, also one that no query sees: zeros leave through its memory.
template <Role kRole>
__device__ inline void send_keys(Smem& smem, const Params& params, const KeyWork& work,
                                 RingPosition<1>& to) {
    smem.keys_ring.wait_empty(to);
    constexpr int kBytes =
        kRole == kKeyBlock ? KeyRows::kBytes : ValueRows::kBytes + LaterKeyRows::kBytes;
    ptx::Barrier& full = smem.keys_ring.announce(to, kConsumers * kBytes);
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
        const int first_key = work.sequence(params.call).first_k + work.first_key + w * kWgmmaM;
        const int batch = work.map_batch(), head = work.kv_head();
        if constexpr (kRole == kKeyBlock) {
            copy_tile_once(smem.keys.k[w], params.k, full, batch, head, first_key);
        } else {
            copy_tile_once(smem.values.v[w], params.v, full, batch, head, first_key);
            copy_tile_once(smem.values.k[w], params.k, full, batch, head, first_key,
                           kFirstLaterCol);
        }
    }
    to.advance();
}

// Copies a tile of Q or dO, with the statistics of its rows.
template <int Stages, class Tile>
__device__ inline void send_rows(Smem& smem, Tile (&tiles)[Stages], Ring<Stages>& ring,
                                 const TensorMap& map, const Params& params, const KeyWork& work,
                                 const RangeWalk& at, RingPosition<Stages>& to) {
    const Sequence sequence = work.sequence(params.call);
    const QueryWorkspace workspace(params.call);
    ring.wait_empty(to);
    ptx::Barrier& full = ring.announce(to, Tile::kBytes + sizeof(Statistics));
    copy_tile(tiles[to.stage], map, full, work.map_batch(), at.head,
              sequence.first_q + at.tile * kBlockM);
    ptx::copy_bytes(&smem.rows[to.stage], &workspace.rows_of(sequence, at.head, at.tile),
                    sizeof(Statistics), full);
    to.advance();
}

template <Role kRole>
__device__ inline void produce(Smem& smem, const Params& params, KeyWork work) {
    const Sizes& sizes = params.call.sizes;
    RingPosition<1> keys_to;
    RingPosition<kRole == kKeyBlock ? kQueryStages : kScoreStages> to;
    do {
        send_keys<kRole>(smem, params, work, keys_to);
        const Tiles tiles(params.call, work);
        for (RangeWalk at(tiles, sizes, work.part); !at.at_end(); at.advance()) {
            if constexpr (kRole == kKeyBlock) {
                send_rows(smem, smem.keys.q, smem.q_ring, params.q, params, work, at, to);
            } else {
                send_rows(smem, smem.values.dout, smem.dout_ring, params.dout, params, work, at,
                          to);
            }
        }
    } while (Keys::next(work, params.call));
}
