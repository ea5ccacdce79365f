// The warps of the Hopper forwards that do not compute. One copies tiles of queries, keys and
// values; others process each tile of values before the consumers do.
#pragma once

#include "hopper/forward/key_columns.cuh"

// Walks over the tiles of keys that a mask or a mask_mod shows at least partly to a tile of
// queries, from the last tile down. If it shows none, the walk has the last tile of the range.
struct SeenWalk {
    KeyRange keys;
    Seen seen;
    int head, first_row, tile, next;

    __device__ SeenWalk(const ForwardParams& call, const WorkTile& work, const KeyRange& keys)
        : keys(keys),
          seen(seen_parts(call), call, work.sequence(call), work.head),
          head(work.head),
          first_row(work.first_row),
          tile(seen_from(keys.end - 1)) {
        if (at_end()) tile = keys.end - 1;
        next = seen_from(tile - 1);
    }

    __device__ bool at_end() const { return tile < keys.begin; }
    __device__ bool at_last() const { return next < keys.begin; }
    __device__ void advance() {
        tile = next;
        next = seen_from(tile - 1);
    }
    __device__ TileLabel label() const {
        const bool cut = !keys.is_whole(tile) || seen.cuts(first_row, tile * kBlockN);
        return {head, tile, cut, at_last()};
    }

  private:
    // The first shown tile from `tile` down, or one before all tiles.
    __device__ int seen_from(int tile) const {
        return seen.last_key(first_row, tile * kBlockN, keys.begin * kBlockN) / kBlockN;
    }
};

// ---- the producer: one thread, or a whole warp, if it looks up pages or its share of keys, or
// also widens keys ----

constexpr int kProducers = kPaged || kWidensKeys || kSharesKeys ? 32 : 1;
static_assert(kLeastQueries == 0 || kPaged, "a whole warp looks for sequences of many queries");

// True in the producer's one thread that starts copies.
__device__ inline bool starts_copies() {
    return kProducers == 1 || ptx::elect_lane();
}

// Hands a tile of queries to the block and starts their copies, or leaves these to others.
template <bool Copies = true, class Smem>
__device__ inline void send_queries(Smem& smem, const Params& params,
                                    RingPosition<kQueryStages>& at, WorkTile work) {
#pragma unroll 1  // a producer is short of registers
    for (int w = 0; w < kTeams; ++w) {
        smem.q_ring[w].wait_empty(at);
        if (!starts_copies()) continue;
        smem.work.of_stage[w][at.stage] = work;
        ptx::Barrier& full =
            smem.q_ring[w].announce(at, Copies && work.exists() ? QueryRows::kBytes : 0);
        if (Copies && work.exists()) {
            copy_tile(smem.q[w][at.stage], params.q, full, kPacked ? 0 : work.batch, work.head,
                      work.sequence(params.call).first_q + work.first_row + w * kWgmmaM, 0,
                      first_col_of<kHeadDim>(params.call.k, work.kv_head));
        }
    }
    at.advance();
}

// The pages of a tile's keys from first_key on: looked up before the stage is empty, and used again
// for the values.
__device__ inline KeyPages pages_from(const ForwardParams& call, const WorkTile& work,
                                      const Sequence& sequence, int first_key) {
    return {sequence.keys<const key_t>(call.k, work.kv_head), first_key, sequence.seqlen_k};
}

// Starts the copy of a tile of keys or values, from first_key and first_col on.
template <class Tile>
__device__ inline void send_tile(Tile& tile, TileRing& ring, RingPosition<kStages> at,
                                 const TensorMap& map, WorkTile work, const Sequence& sequence,
                                 const KeyPages& pages, int first_key, int first_col,
                                 TileLabel label = {}) {
    ring.wait_empty(at);
    if constexpr (kPaged) {
        const BoxPages<kBoxKeys, kBlockN> boxes(pages, first_key, sequence.seqlen_k);
        if (!starts_copies()) return;
        ring.label(at, label);
        boxes.copy(tile, map, ring.announce(at, Tile::kBytes), work.kv_head, first_col);
    } else {
        if (!starts_copies()) return;
        ring.label(at, label);
        ptx::Barrier& full = ring.announce(at, Tile::kBytes);
        const int batch = kPacked ? 0 : work.batch;
        if constexpr (kInParts || kOddRows<kHeadDim> || kOddRows<kValueDim>) {
            copy_tile(tile, map, full, batch, work.kv_head, first_key, 0, first_col);
        } else {
            copy_tile(tile, map, full, batch, work.kv_head, first_key);
        }
    }
}

// The same for Cols columns of a tile of keys, which are a part of it.
template <int Cols, class Smem>
__device__ inline void send_part(Smem& smem, RingPosition<kStages> at, const Params& params,
                                 const WorkTile& work, const Sequence& sequence,
                                 const KeyPages& pages, int first_key, int first_col, int part) {
    send_tile(columns_of_part<Cols>(smem.k[at.stage], part), smem.k_ring.parts[part], at, params.k,
              work, sequence, pages, first_key, first_col + first_col_of_part(part));
}

// The same for a tile of keys; `owner` is the warpgroup that computes its scores, if several take
// turns. Parts come in the order in which consumers release those of the tile before.
template <class Smem>
__device__ inline void send_keys(Smem& smem, RingPosition<kStages> at, const Params& params,
                                 const WorkTile& work, const Sequence& sequence,
                                 const KeyPages& pages, int first_key, int first_col, int owner) {
    if constexpr (kInParts) {
        if constexpr (kKeysAlone > 0)
            send_part<kKeysAlone>(smem, at, params, work, sequence, pages, first_key, first_col,
                                  kColumnWarpgroups);
        for (int i = 0; i < kColumnWarpgroups; ++i)
            send_part<kOwnCols>(smem, at, params, work, sequence, pages, first_key, first_col,
                                (owner + i) % kColumnWarpgroups);
    } else {
        send_tile(smem.k[at.stage], smem.k_ring, at, params.k, work, sequence, pages, first_key,
                  first_col);
    }
}

// The same for a tile of values, unless it came with the keys.
template <class Smem>
__device__ inline void send_values(Smem& smem, RingPosition<kStages> at, const Params& params,
                                   WorkTile work, const Sequence& sequence, const KeyPages& pages,
                                   int first_key, int first_col, TileLabel label = {}) {
    if constexpr (!kValuesInKeys) {
        send_tile(smem.v[at.stage], smem.v_ring, at, params.v, work, sequence, pages, first_key,
                  first_col, label);
    }
}

// Starts the copy of the bias of a tile of scores. A template, because Smem may have no bias.
template <class Smem, class Params>
__device__ inline void send_bias(Smem& smem, const Params& params, const WorkTile& work, int tile,
                                 RingPosition<1>& at) {
    if constexpr (kBiasBoxes) {
#pragma unroll 1
        for (int w = 0; w < kConsumers; ++w) {
            smem.bias_rings[w].wait_empty(at);
            if (!starts_copies()) continue;
            ptx::Barrier& full = smem.bias_rings[w].announce(at, kBiasBytes<BiasRows>);
            copy_bias(smem.bias[w], params.bias, full, params.call.features.bias, work.batch,
                      work.head, work.first_row + w * kWgmmaM, tile * kBlockN);
        }
        at.advance();
    }
}

// Sends a tile of queries and the tiles of keys that a mask or a mask_mod shows to it. Calls `ask`
// when only the last values are still to be sent.
template <class Smem, class Ask>
__device__ inline void send_seen(Smem& smem, const Params& params, RingPosition<kQueryStages>& q_at,
                                 RingPosition<kStages>& at, RingPosition<1>& bias_at,
                                 const WorkTile& work, const KeyRange& keys, Ask ask) {
    const Sequence sequence = work.sequence(params.call);
    const auto key_of = [&](const SeenWalk& walk) {
        return sequence.first_k + walk.tile * kBlockN;
    };
    const int k_col = first_col_of<kHeadDim>(params.call.k, work.kv_head);
    const int v_col = first_col_of<kValueDim>(params.call.v, work.kv_head);
    SeenWalk walk(params.call, work, keys);
    KeyPages pages = pages_from(params.call, work, sequence, key_of(walk));
    send_tile(smem.k[at.stage], smem.k_ring, at, params.k, work, sequence, pages, key_of(walk),
              k_col, walk.label());
    send_queries(smem, params, q_at, work);
    send_bias(smem, params, work, walk.tile, bias_at);
    while (!walk.at_end()) {
        RingPosition<kStages> after = at;
        after.advance();
        SeenWalk next = walk;
        next.advance();
        KeyPages pages_after;
        if (walk.at_last()) {
            ask();
        } else {
            pages_after = pages_from(params.call, work, sequence, key_of(next));
            send_tile(smem.k[after.stage], smem.k_ring, after, params.k, work, sequence,
                      pages_after, key_of(next), k_col, next.label());
        }
        send_values(smem, at, params, work, sequence, pages, key_of(walk), v_col, walk.label());
        if (!walk.at_last()) send_bias(smem, params, work, next.tile, bias_at);
        at = after;
        walk = next;
        pages = pages_after;
    }
}

// A block asks for its next tile of queries when this many tiles of keys of the current one are
// left. The answer takes a while, but a block that asks early may get long work that others would
// finish sooner. In 8 bits a few hundred keys are just four tiles; the first of these should be
// under way before the block waits for the answer.
constexpr int kAskAhead = sizeof(scalar_t) == 1 ? 2 : 4;

template <class Smem>
__device__ inline void produce(Smem& smem, const Params& params) {
    Order order(params.call);
    TileHandout<kMergesLater> handout(params.call, order);
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> at;  // keys and values of a tile have the same position
    RingPosition<1> bias_at;

    constexpr unsigned int kLanes = kProducers > 1 ? 0xffffffffu : 1;  // that produce
    const auto ask = [&] {
        if (kProducers > 1 && threadIdx.x != 0) return 0;
        return handout.next();
    };

    unsigned int index = kAsksFirst ? uniform<kLanes>(ask()) : blockIdx.x;
    for (;;) {
        WorkTile work = order.at(index);
        if (!work.exists()) break;
        const Sequence sequence = work.sequence(params.call);
        if ((kPacked && work.first_row >= sequence.seqlen_q) || !has_part(params.call, work)) {
            index = uniform<kLanes>(ask());
            continue;
        }
        const KeyRange keys = key_tiles_of(params.call, work);
        if constexpr (kKeyMask) {
            if (!keys.none()) {
                int asked;
                send_seen(smem, params, q_at, at, bias_at, work, keys, [&] { asked = ask(); });
                index = uniform<kLanes>(asked);
                continue;
            }
        }
        const int first_key = sequence.first_k;
        const int k_col = first_col_of<kHeadDim>(params.call.k, work.kv_head);
        const int v_col = first_col_of<kValueDim>(params.call.v, work.kv_head);
        int tile = keys.end - 1;
        KeyPages pages;
        if (!keys.none()) {
            const int key = first_key + tile * kBlockN;
            pages = pages_from(params.call, work, sequence, key);
            send_keys(smem, at, params, work, sequence, pages, key, k_col, 0);
        }
        send_queries(smem, params, q_at, work);
        if (!keys.none()) send_bias(smem, params, work, tile, bias_at);
        // Keys are needed a tile ahead of values.
        const auto send_down_to = [&](int begin) {
            for (; tile >= begin; --tile) {
                RingPosition<kStages> after = at;
                after.advance();
                KeyPages pages_after;
                const int key = first_key + tile * kBlockN;
                if (tile > keys.begin) {
                    pages_after = pages_from(params.call, work, sequence, key - kBlockN);
                    send_keys(smem, after, params, work, sequence, pages_after, key - kBlockN,
                              k_col, (keys.end - tile) % kColumnWarpgroups);
                }
                send_values(smem, at, params, work, sequence, pages, key, v_col);
                if (tile > keys.begin) send_bias(smem, params, work, tile - 1, bias_at);
                at = after;
                pages = pages_after;
            }
        };
        send_down_to(keys.begin + kAskAhead);
        const int asked = ask();  // the answer comes while the others are sent
        send_down_to(keys.begin);
        index = uniform<kLanes>(asked);
    }
    send_queries(smem, params, q_at, WorkTile::none());
}

// ---- the helpers: the warps beside the producer, or a warpgroup of their own ----

// Waits for the block's next tile of queries, or for the end of its tiles.
template <class Smem>
__device__ inline WorkTile follow_queries(Smem& smem, RingPosition<kQueryStages>& at) {
    smem.q_ring[0].wait_full(at);
    const WorkTile work = smem.work.of_stage[0][at.stage];
    __syncwarp();
    release_and_advance(smem.q_ring[0], at);
    return work;
}

// Calls handle(whether a mask cuts through the tile, whether it is the first for its queries, its
// position) for each tile of values, in the order of copying, while the consumers still work on its
// scores.
template <class Smem, class Handle>
__device__ inline void follow_values(Smem& smem, const Params& params, Handle handle) {
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> at;
    for (;;) {
        const WorkTile work = follow_queries(smem, q_at);
        if (!work.exists()) return;

        const KeyRange keys = key_tiles_of(params.call, work);
        if constexpr (kKeyMask) {
            bool first = true;
            for (bool last = keys.none(); !last; at.advance()) {
                value_ring(smem).wait_full(at);
                const TileLabel seen = value_ring(smem).label_at(at);
                handle(seen.cut, first, at);
                first = false;
                last = seen.last;
            }
        } else {
            for (int left = keys.end - keys.begin; left > 0; --left) {
                value_ring(smem).wait_full(at);
                handle(!keys.is_whole(keys.begin + left - 1), left == keys.end - keys.begin, at);
                at.advance();
            }
        }
    }
}
