// The warps of bwd_4_wgmma that do not compute. One copies tiles of keys and queries, others store
// gradients and, where blocks take turns to add to dQ, wait for the turns.
#pragma once

#include "hopper/backward/bwd_4_block.cuh"

// ---- the producer: one thread ----

// Other blocks do not need these keys, and the L2 cache has little room for the queries and sums of
// dQ that they share.
__device__ inline void send_keys(Smem& smem, const Params& params, KeyWork work,
                                 RingPosition<kKeyStages>& to) {
    smem.keys_ring.wait_empty(to);
    smem.work[to.stage] = work;
    constexpr int kBytes = kConsumers * (KeyRows::kBytes + ValueRows::kBytes);
    ptx::Barrier& full = smem.keys_ring.announce(to, kBytes);
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
        const int first_key = work.sequence(params.call).first_k + work.first_key + w * kWgmmaM;
        copy_tile_once(smem.k[to.stage][w], params.k, full, work.map_batch(), work.kv_head(),
                       first_key);
        copy_tile_once(smem.v[to.stage][w], params.v, full, work.map_batch(), work.kv_head(),
                       first_key);
    }
    to.advance();
}

// Signals that no keys are left.
__device__ inline void send_end(Smem& smem, RingPosition<kKeyStages> to) {
    smem.keys_ring.wait_empty(to);
    smem.work[to.stage] = KeyWork::none();
    smem.keys_ring.announce(to, 0);
}

// Copies the bias of a tile of queries. A template, because Smem may have none.
template <class Smem, class Params, class Walk>
__device__ inline void send_bias(Smem& smem, const Params& params, const KeyWork& work,
                                 const Walk& at, RingPosition<1>& to) {
    if constexpr (kBiasBoxes) {
        smem.bias_ring.wait_empty(to);
        ptx::Barrier& full = smem.bias_ring.announce(to, kConsumers * kBiasBytes<BiasRows>);
#pragma unroll
        for (int w = 0; w < kConsumers; ++w)
            copy_bias(smem.bias[w], params.bias, full, params.call.features.bias, work.batch,
                      at.head, at.tile * kBlockM, work.first_key + w * kWgmmaM);
        to.advance();
    }
}

template <class Walk>
__device__ inline void send_queries(Smem& smem, const Params& params, KeyWork work, const Walk& at,
                                    RingPosition<kStages>& to, RingPosition<1>& bias_to) {
    const Sequence sequence = work.sequence(params.call);
    const QueryWorkspace workspace(params.call);
    const int first_row = sequence.first_q + at.tile * kBlockM;
    Queries& queries = smem.queries[to.stage];
    smem.ring.wait_empty(to);
    if constexpr (kHidesScores) smem.ring.label(to, at.label());
    ptx::Barrier& full = smem.ring.announce(
        to, QueryRows::kBytes + sizeof(Statistics) + !kOutApart * OutRows::kBytes);
    ptx::Barrier& dout_full = kOutApart ? smem.dout_full[to.stage] : full;
    if (kOutApart) ptx::barrier_arrive_expecting(dout_full, OutRows::kBytes);
    copy_tile(queries.q, params.q, full, work.map_batch(), at.head, first_row);
    ptx::copy_bytes(&smem.rows[to.stage], &workspace.rows_of(sequence, at.head, at.tile),
                    sizeof(Statistics), full);
    copy_tile(queries.dout, params.dout, dout_full, work.map_batch(), at.head, first_row);
    to.advance();
    send_bias(smem, params, work, at, bias_to);  // last: it waits until the bias before is read
}

// Sends the tiles of queries that a mask or a mask_mod shows some of the keys.
__device__ inline void send_seen(Smem& smem, const Params& params, const KeyWork& work,
                                 const Tiles& tiles, RingPosition<kStages>& to,
                                 RingPosition<1>& bias_to) {
    for (SeenWalk at(params.call, seen_parts(params.call), work, tiles); !at.at_end();
         at.advance()) {
        send_queries(smem, params, work, at, to, bias_to);
    }
}

// Takes keys until none are left. It takes the next only after the queries of the current keys are
// under way, so that the block that finishes first gets them. If blocks wait for others, even the
// first keys are taken by the counter: then a block takes keys only after the blocks that it will
// wait for have taken theirs, whichever blocks have an SM.
__device__ inline void produce(Smem& smem, const Params& params) {
    const Sizes& sizes = params.call.sizes;
    const auto take = [&] {
        const TileCounter counter{key_tiles_taken(params.call), Keys::count(sizes)};
        const unsigned int index = kTurns ? counter.of_all_unlimited() : counter.after_own();
        return Keys::at(uniform<1>(index), params.call);
    };
    RingPosition<kKeyStages> keys_to;
    RingPosition<kStages> to;
    RingPosition<1> bias_to;
    for (KeyWork work = kTurns ? take() : Keys::first(params.call); work.exists();) {
        if (work.has_keys(params.call)) {
            const Tiles tiles(params.call, work);
            send_keys(smem, params, work, keys_to);
            if constexpr (kHidesScores) {
                if (tiles.begin < tiles.end) send_seen(smem, params, work, tiles, to, bias_to);
            } else {
                for (RangeWalk at(tiles, sizes, work.part); !at.at_end(); at.advance()) {
                    send_queries(smem, params, work, at, to, bias_to);
                }
            }
            if (Keys::next(work, params.call)) continue;
        }
        work = take();
    }
    send_end(smem, keys_to);
}

// ---- one more thread, if blocks take turns to add to dQ ----

// Waits for the consumers' turns.
__device__ inline void take_turns(Smem& smem, const Params& params) {
    RingPosition<kStages> to[kConsumers];
    for (RingPosition<kKeyStages> keys_at;; keys_at.advance()) {
        smem.keys_ring.wait_full(keys_at);
        const KeyWork work = smem.work[keys_at.stage];
        smem.keys_ring.release(keys_at);
        if (!work.exists()) return;
        const Tiles tiles(params.call, work);
        take_turns(smem.order, to, QueryWorkspace(params.call), params.call, work,
                   RangeWalk(tiles, params.call.sizes, work.part));
    }
}

// ---- the sender: one warp or, if blocks take turns, one for each consumer ----

// Stores the gradients of each tile of keys from the memory of the keys, for Count consumers from
// `first` on, unless the consumers wrote parts. Before that, it passes on the turns of consumer
// `first`.
template <int Count>
__device__ inline void send_gradients(Smem& smem, const Params& params, int first) {
    RingPosition<kStages> turn;
    for (RingPosition<kKeyStages> at;; at.advance()) {
        smem.keys_ring.wait_full(at);
        const KeyWork& work = smem.work[at.stage];
        if (!work.exists()) return;
        if (kTurns) {
            const Tiles tiles(params.call, work);
            pass_turns(smem.order[first], turn, QueryWorkspace(params.call), first, params.call,
                       work, RangeWalk(tiles, params.call.sizes, work.part));
        }
        __syncwarp();
        wait_for(smem.gradients[at.stage], at.parity, at.stage);
#pragma unroll
        for (int w = first; kParts == 1 && w < first + Count; ++w) {
            send_out<kValueDim, 32>(params.dv, params.call.dv, smem.v[at.stage][w], params.call,
                                    work, w * kWgmmaM, 0);
            send_out<kHeadDim, 32>(params.dk, params.call.dk, smem.k[at.stage][w], params.call,
                                   work, w * kWgmmaM, 0);
        }
        __syncwarp();
        if (threadIdx.x % 32 != 0) continue;
        ptx::wait_stores_read();
        smem.keys_ring.release(at);
    }
}

// ---- or one warp for each consumer, which sends out its outbox as the label says ----

__device__ inline void send(Smem& smem, const Params& params, int consumer) {
    const int key = consumer * kWgmmaM;
    Outbox& outbox = smem.outboxes[consumer];
    const OutboxLabel& label = smem.outbox_labels[consumer];
    Ring<1>& ring = smem.outbox_rings[consumer];
    for (RingPosition<1> from;; from.advance()) {
        ring.wait_full(from);
        if (label.content == OutboxLabel::kNothing) return;
        if (label.content == OutboxLabel::kValues) {
            send_out<kValueDim, 32>(params.dv, params.call.dv, outbox.values(), params.call,
                                    label.work, key, 0);
        } else if (label.content == OutboxLabel::kKeys) {
            send_out<kHeadDim, 32>(params.dk, params.call.dk, outbox.keys(), params.call,
                                   label.work, key, 0);
        } else if (threadIdx.x % 32 == 0) {
            ptx::add_to_global(label.sums, outbox.queries(), Sums::panel_bytes(consumer));
            ptx::commit_stores();
        }
        __syncwarp();
        if (threadIdx.x % 32 != 0) continue;
        ptx::wait_stores_read();
        ring.release(from);
    }
}
