// Keys in 8 bits for products in float16, and the warpgroup that brings them.
#pragma once

#include "hopper/forward/wgmma_forward_copies.cuh"
#include "hopper/forward/wgmma_inspected_values.cuh"
#include "hopper/forward/widened_queries.cuh"

// The keys of a range, tile after tile, from the last one down.
template <class Tile>
class KeyWidener : public RowWidener<Tile> {
    using RowWidener<Tile>::kUnits, RowWidener<Tile>::row_of;

  public:
    __device__ KeyWidener(const Params& params, const WorkTile& work, const KeyRange& range)
        : sequence(work.sequence(params.call)),
          keys(sequence.keys<const key_t>(params.call.k, work.kv_head)),
          begin(range.begin) {
        look_up(range.end - 1);
    }

    // Starts to load a tile, and looks up where the one before it is. Called for all of the range,
    // and once more: a tile before the range is left out.
    __device__ void load_tile(int tile) {
        const int first_key = tile * Tile::kRows;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const int key = first_key + row_of(unit);
            const key_t* const row = row_at(keys, key, first_key);  // by all lanes together
            this->load(unit, tile >= begin && key < sequence.seqlen_k ? row : nullptr);
        }
        look_up(tile - 1);
    }

  private:
    __device__ void look_up(int tile) {
        if (tile >= begin) pages = {keys, tile * Tile::kRows, sequence.seqlen_k};
    }
    // The row of a key of the tile that was looked up. A template, because there may be no pages.
    template <class Keys>
    __device__ const key_t* row_at(const Keys& keys, int key, int first_key) const {
        if constexpr (kPaged) {
            const int number = pages.number(key / kPageSize - first_key / kPageSize);
            return keys.page(number).row(key % kPageSize);
        } else {
            return keys.row(key);
        }
    }

    const Sequence sequence;
    const KeyMatrix<const key_t> keys;
    const int begin;
    TilePages<Tile::kRows> pages;  // of the tile that is loaded next
};

// What the warps of the first warpgroup do if keys are in 8 bits: all write keys, and one of them
// also takes tiles of queries and starts their copies.
template <class Smem>
__device__ inline void produce_widened(Smem& smem, const Params& params) {
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    TakenTiles taken(params);
    RingPosition<kQueryStages> sent, q_at;
    RingPosition<kStages> at;
    for (;;) {
        if (warp == 0) send_queries<kCopiesQueries>(smem, params, sent, taken.current());
        const WorkTile work = follow_queries(smem, q_at);
        if (!work.exists()) return;

        const KeyRange keys = key_tiles_of(params.call, work);
        KeyWidener<KeyRows> widener(params, work, keys);
        // Consumers know that queries are made when the same warps hand over the first keys.
        // Without keys they wait for nothing, and may have output there already.
        QueryRows& q = smem.q[0][0];
        if (!kCopiesQueries && !keys.none()) widen_queries(q, params, work);
        widener.load_tile(keys.end - 1);
        if (!keys.none()) smem.helpers.scale(q);
        for (int tile = keys.end - 1; tile >= keys.begin; --tile, at.advance()) {
            smem.k_ring.wait_empty(at);
            widener.write(smem.k[at.stage]);
            const bool cut = kCutKeys && !keys.is_whole(tile);
            const bool found = cut && __any_sync(0xffffffffu, widener.finds_nan(smem.k[at.stage]));
            ptx::proxy_fence();
            __syncwarp();
            if (lane == 0) {
                if constexpr (kCutKeys) smem.helpers.report(at, warp, found);
                ptx::barrier_arrive(smem.k_ring.full[at.stage]);
            }
            widener.load_tile(tile - 1);  // not before: a fence waits for all that is on its way
        }
        if (warp == 0) taken.advance(taken.ask());
    }
}
