// The warps of the Hopper forwards that do not compute. One copies tiles of queries, keys and
// values; others process each tile of values before the consumers do.
#pragma once

#include "hopper/forward/key_columns.cuh"
#include "hopper/forward/taken_tiles.cuh"

// Walks over the tiles of keys that a mask or a mask_mod shows at least partly to a tile of
// queries, from the last tile down. If it shows none, it walks over the last tile of the range.
struct SeenWalk {
    KeyRange keys;
    Seen seen;
    int first_row, next;
    bool unsure = false;  // whether a row may have seen no key so far

    __device__ SeenWalk(const ForwardParams& call, const WorkTile& work, const KeyRange& keys)
        : keys(keys),
          seen(seen_parts(call), call, work.sequence(call), work.head),
          first_row(work.first_row),
          next(seen_from(keys.end - 1)) {
        if (next < keys.begin) next = keys.end - 1;
    }

    // The label of the next tile.
    __device__ TileLabel advance() {
        const int tile = next;
        next = seen_from(tile - 1);
        // If all rows are alike, tiles in which the keys end are not shown as a whole.
        const bool ends = !kRowsAlike && !keys.is_whole(tile);
        const bool hides = seen.cuts(first_row, tile * kBlockN);
        const bool cut = ends || hides || unsure;
        // Rows see a key of the last tile that the diagonal passes, unless a mask hides it; those
        // of a whole tile that is shown are seen by all.
        if constexpr (kKeyBits && kRangeMask) unsure = ends && (hides || next < tile - 1);
        return {tile, cut, next < keys.begin};
    }

  private:
    // The first shown tile from `tile` down, or one before all tiles.
    __device__ int seen_from(int tile) const {
        return seen.last_key(first_row, tile * kBlockN, keys.begin * kBlockN) / kBlockN;
    }
};

// ---- the producer: one thread or a whole warp ----

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

// Sends a tile of queries, and tiles of the keys and values that it sees.
template <class Smem>
struct Sender {
    Smem& smem;
    const Params& params;
    const WorkTile& work;
    const Sequence sequence;
    const int k_col, v_col;  // the first columns of tiles

    __device__ Sender(Smem& smem, const Params& params, const WorkTile& work)
        : smem(smem),
          params(params),
          work(work),
          sequence(work.sequence(params.call)),
          k_col(first_col_of<kHeadDim>(params.call.k, work.kv_head)),
          v_col(first_col_of<kValueDim>(params.call.v, work.kv_head)) {}

    __device__ void send_queries(RingPosition<kQueryStages>& at) const {
        ::send_queries(smem, params, at, work);
    }
    // The bias of the tile's scores, if TMA can copy it.
    __device__ void send_bias(int tile, RingPosition<1>& at) const {
        ::send_bias(smem, params, work, tile, at);
    }

    // The pages of a tile: looked up before the stage is empty, and used again for the values.
    __device__ KeyPages pages_from(int first_key) const {
        return {sequence.keys<const key_t>(params.call.k, work.kv_head), first_key,
                sequence.seqlen_k};
    }

    // Starts the copy of a tile of keys; `owner` is the warpgroup that computes its scores, if
    // several take turns. Parts come in the order in which consumers release those of the tile
    // before.
    __device__ void send_keys(RingPosition<kStages> at, const KeyPages& pages, int first_key,
                              int owner = 0, TileLabel label = {}) const {
        const KeyBoxes boxes(pages, first_key, sequence.seqlen_k);
        if constexpr (kInParts) {
            if constexpr (kKeysAlone > 0)
                send_part<kKeysAlone>(at, boxes, first_key, kColumnWarpgroups);
            for (int i = 0; i < kColumnWarpgroups; ++i)
                send_part<kOwnCols>(at, boxes, first_key, (owner + i) % kColumnWarpgroups);
        } else {
            send(smem.k[at.stage], smem.k_ring, at, params.k, boxes, first_key, k_col, label);
        }
    }

    // The same for a tile of values, unless it came with the keys.
    __device__ void send_values(RingPosition<kStages> at, const KeyPages& pages, int first_key,
                                TileLabel label = {}) const {
        if constexpr (!kValuesInKeys) {
            const KeyBoxes boxes(pages, first_key, sequence.seqlen_k);
            send(smem.v[at.stage], smem.v_ring, at, params.v, boxes, first_key, v_col, label);
        }
    }

  private:
    // Sends the Cols columns of a tile of keys that are a part of it.
    template <int Cols>
    __device__ void send_part(RingPosition<kStages> at, const KeyBoxes& boxes, int first_key,
                              int part) const {
        send(columns_of_part<Cols>(smem.k[at.stage], part), smem.k_ring.parts[part], at, params.k,
             boxes, first_key, k_col + first_col_of_part(part), {});
    }

    // Starts the copy of a tile to `to`, from first_col on. A template over `Boxes`, because there
    // may be no pages.
    template <class Rows, class Boxes>
    __device__ void send(Rows& to, TileRing& ring, RingPosition<kStages> at, const TensorMap& map,
                         const Boxes& boxes, int first_key, int first_col,
                         const TileLabel& label) const {
        ring.wait_empty(at);
        if (!starts_copies()) return;
        ring.label(at, label);
        ptx::Barrier& full = ring.announce(at, Rows::kBytes);
        [[maybe_unused]] const int batch = kPacked ? 0 : work.batch;
        if constexpr (kPaged) {
            boxes.copy(to, map, full, work.kv_head, first_col);
        } else if constexpr (kInParts || kOddRows<kHeadDim> || kOddRows<kValueDim>) {
            copy_tile(to, map, full, batch, work.kv_head, first_key, 0, first_col);
        } else {
            copy_tile(to, map, full, batch, work.kv_head, first_key);
        }
    }
};

// Sends a tile of queries and the tiles of keys that a mask or a mask_mod shows to it. Calls `ask`
// when only the last values are still to be sent.
template <class Smem, class Ask>
__device__ inline void send_seen(const Sender<Smem>& sender, RingPosition<kQueryStages>& q_at,
                                 RingPosition<kStages>& at, RingPosition<1>& bias_at,
                                 const KeyRange& keys, const Ask& ask) {
    const auto key_of = [&](const TileLabel& label) {
        return sender.sequence.first_k + label.tile() * kBlockN;
    };
    SeenWalk walk(sender.params.call, sender.work, keys);
    TileLabel label = walk.advance();
    KeyPages pages = sender.pages_from(key_of(label));
    sender.send_keys(at, pages, key_of(label), 0, label);
    sender.send_queries(q_at);
    sender.send_bias(label.tile(), bias_at);
    for (bool last = false; !last;) {
        last = label.last();
        RingPosition<kStages> after = at;
        after.advance();
        TileLabel label_after;
        KeyPages pages_after;
        if (last) {
            ask();
        } else {
            label_after = walk.advance();
            pages_after = sender.pages_from(key_of(label_after));
            sender.send_keys(after, pages_after, key_of(label_after), 0, label_after);
        }
        sender.send_values(at, pages, key_of(label), label);
        if (!last) sender.send_bias(label_after.tile(), bias_at);
        at = after;
        label = label_after;
        pages = pages_after;
    }
}

// A block asks for its next tile of queries when this many tiles of keys of the current one are
// left. The answer takes a while, but a block that asks early may get long work that others would
// finish sooner. In 8 bits a few hundred keys are just four tiles; the first of these should be
// under way before the block waits for the answer.
constexpr int kAskAhead = sizeof(scalar_t) == 1 ? 2 : 4;

// Whether a block's first queries are sent while it looks up the pages of its first keys. Other
// producers have no registers for this.
constexpr bool kQueriesFirst = kPaged && kColumnWarpgroups > 1;

// Sends a tile of queries and all tiles of keys that it sees.
template <class Smem, class Ask>
__device__ inline void send_range(const Sender<Smem>& sender, RingPosition<kQueryStages>& q_at,
                                  RingPosition<kStages>& at, RingPosition<1>& bias_at,
                                  const KeyRange& keys, bool first, const Ask& ask) {
    const int first_key = sender.sequence.first_k;
    int tile = keys.end - 1;
    KeyPages pages;
    if (!keys.none()) {
        const int key = first_key + tile * kBlockN;
        pages = sender.pages_from(key);
        if (first) sender.send_queries(q_at);
        sender.send_keys(at, pages, key);
    }
    if (!first || keys.none()) sender.send_queries(q_at);
    if (!keys.none()) sender.send_bias(tile, bias_at);
    // Keys are needed a tile ahead of values.
    const auto send_down_to = [&](int begin) {
        for (; tile >= begin; --tile) {
            RingPosition<kStages> after = at;
            after.advance();
            KeyPages pages_after;
            const int key = first_key + tile * kBlockN;
            if (tile > keys.begin) {
                pages_after = sender.pages_from(key - kBlockN);
                sender.send_keys(after, pages_after, key - kBlockN,
                                 (keys.end - tile) % kColumnWarpgroups);
            }
            sender.send_values(at, pages, key);
            if (tile > keys.begin) sender.send_bias(tile - 1, bias_at);
            at = after;
            pages = pages_after;
        }
    };
    send_down_to(keys.begin + kAskAhead);
    ask();  // the answer comes while the others are sent
    send_down_to(keys.begin);
}

// Takes tiles of queries until none are left, and sends each with the keys that it sees.
template <class Smem>
__device__ inline void produce(Smem& smem, const Params& params) {
    TakenTiles taken(params);
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> at;  // keys and values of a tile have the same position
    RingPosition<1> bias_at;
    int answer;
    const auto ask = [&] { answer = taken.ask(); };
    for (bool first = kQueriesFirst;; first = false, taken.advance(answer)) {
        const WorkTile work = taken.current();
        if (!work.exists()) break;
        const KeyRange keys = key_tiles_of(params.call, work);
        const Sender sender(smem, params, work);
        if constexpr (kKeyMask) {
            if (keys.none()) {
                sender.send_queries(q_at);
                ask();
            } else {
                send_seen(sender, q_at, at, bias_at, keys, ask);
            }
        } else {
            send_range(sender, q_at, at, bias_at, keys, first, ask);
        }
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
                handle(seen.cut(), first, at);
                first = false;
                last = seen.last();
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
