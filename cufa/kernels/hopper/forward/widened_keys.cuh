// Keys in 8 bits for products in 16. The copy engine cannot convert. So a warpgroup loads keys to
// registers, widens them, and writes them where the engine would have.
#pragma once

#include "hopper/forward/wgmma_forward_copies.cuh"
#include "hopper/nonfinite_elements.cuh"
#include "ptx/ptx_sm89.cuh"

// What a lane holds of a key in 8 bits at once, and the same in 16.
constexpr int kNarrowCols = 16;
using NarrowCols = Pack<unsigned int, kNarrowCols / 4>;
using WideCols = Pack<unsigned int, kChunkCols / 2>;

// Two numbers as the products read them, from float16.
__device__ inline unsigned int operands_from_halves(unsigned int halves) {
    if constexpr (!is_bfloat16<operand_t>) return halves;
    return ptx::pack_bf16(ptx::float_from_half(static_cast<unsigned short>(halves)),
                          ptx::float_from_half(static_cast<unsigned short>(halves >> 16)));
}

// The half of these columns that fills a chunk; exact, and NaN stays NaN.
__device__ inline WideCols widen(const NarrowCols& narrow, int half) {
    WideCols wide;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        unsigned int pairs[2];
        ptx::half_from_e4m3(pairs, narrow[2 * half + i]);
#pragma unroll
        for (int e = 0; e < 2; ++e) wide[2 * i + e] = operands_from_halves(pairs[e]);
    }
    return wide;
}

// What is looked up of a key before its row is known: the number of its page, if there are pages.
template <bool Paged>
struct KeyPlace {
    template <class Keys>
    __device__ void look_up(const Keys&, int) {}
    template <class Keys>
    __device__ const key_t* row(const Keys& keys, int key) const {
        return keys.row(key);
    }
};
template <>
struct KeyPlace<true> {
    int page;

    template <class Keys>
    __device__ void look_up(const Keys& keys, int key) {
        page = keys.table[key / kPageSize];
    }
    template <class Keys>
    __device__ const key_t* row(const Keys& keys, int key) const {
        return keys.page(page).row(key % kPageSize);
    }
};

// A lane's part of a tile of keys. A warp has swizzled units of eight rows, and four lanes share a
// row: in each panel, a lane has the columns from `first_col` on.
template <class Tile>
class KeyWidener {
  public:
    __device__ KeyWidener(const Params& params, const WorkTile& work, const KeyRange& range)
        : sequence(work.sequence(params.call)),
          keys(sequence.keys<const key_t>(params.call.k, work.kv_head)),
          end(sequence.seqlen_k),
          first_row(threadIdx.x / 32 * kUnits * kUnitRows + threadIdx.x % 32 / kRowLanes),
          first_col(threadIdx.x % kRowLanes * kNarrowCols),
          begin(range.begin) {
        look_up(range.end - 1);
    }

    // Starts to load a tile, and looks up where the one before it is. Called for all of the range,
    // from the last tile down, and once more: a tile before the range is left out.
    __device__ void load(int tile) {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const key_t* const row = row_of(tile, unit);
#pragma unroll
            for (int panel = 0; panel < Tile::kPanels; ++panel)
                held[unit][panel] = load(row, panel);
        }
        look_up(tile - 1);
    }

    // Writes the tile that was loaded.
    __device__ void write(Tile& to) const {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
            for (int panel = 0; panel < Tile::kPanels; ++panel)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *chunk(to, unit, panel, half) = widen(held[unit][panel], half);
    }

    // Whether there is NaN in what this lane has written.
    __device__ bool finds_nan(Tile& written) const {
        NonfiniteSearch search;
#pragma unroll 1
        for (int i = 0; i < kUnits * Tile::kPanels; ++i) {
            search.look_at(chunk(written, i % kUnits, i / kUnits, 0));
            search.look_at(chunk(written, i % kUnits, i / kUnits, 1));
        }
        return search.found();
    }

  private:
    static constexpr int kRowLanes = kPanelCols / kNarrowCols;
    static constexpr int kUnitRows = 32 / kRowLanes;
    static constexpr int kUnits = Tile::kRows / (kWarps * kUnitRows);  // of a tile that a warp has
    static_assert(kUnitRows == kSwizzleRows && Tile::kRows % (kWarps * kUnitRows) == 0,
                  "each warp writes whole swizzled units");
    static_assert(!kWidensKeys || kHeadDim % kNarrowCols == 0,
                  "loads are inside a row or beyond it");

    __device__ int key_of(int tile, int unit) const {
        return tile * Tile::kRows + first_row + unit * kUnitRows;
    }
    // Whether a tile is in the range, and the key of this lane is before their end.
    __device__ bool exists(int tile, int unit) const {
        return begin <= tile && key_of(tile, unit) < end;
    }

    __device__ void look_up(int tile) {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
            if (exists(tile, unit)) places[unit].look_up(keys, key_of(tile, unit));
    }
    // The row of this lane's key; none if it does not exist.
    __device__ const key_t* row_of(int tile, int unit) const {
        if (!exists(tile, unit)) return nullptr;
        return places[unit].row(keys, key_of(tile, unit));
    }

    // Keys that do not exist are zero, and so are columns that the head does not have.
    __device__ NarrowCols load(const key_t* row, int panel) const {
        const int col = panel * kPanelCols + first_col;
        if (row == nullptr || col >= kHeadDim) return {};
        return *reinterpret_cast<const NarrowCols*>(row + col);
    }

    __device__ WideCols* chunk(Tile& tile, int unit, int panel, int half) const {
        const int col = panel * kPanelCols + first_col + half * kChunkCols;
        return reinterpret_cast<WideCols*>(tile.at(first_row + unit * kUnitRows, col));
    }

    const Sequence sequence;
    const KeyMatrix<const key_t> keys;
    const int end, first_row, first_col, begin;
    NarrowCols held[kUnits][Tile::kPanels];
    KeyPlace<kPaged> places[kUnits];  // of the tile that is loaded next
};

// Hands out a block's tiles of queries. One warp calls it.
class TakenTiles {
  public:
    __device__ explicit TakenTiles(const Params& params)
        : call(params.call), order(call), counter{tiles_taken(call), order.count()} {}

    // The next tile with queries and with keys of its own, or none.
    __device__ WorkTile next() {
        for (;;) {
            WorkTile work = order.at(next_index());
            if (!work.exists()) return WorkTile::none();
            if (kPacked && work.first_row >= work.sequence(call).seqlen_q) continue;
            if (has_part(call, work)) return work;
        }
    }

  private:
    __device__ unsigned int next_index() {
        if (!kAsksFirst && first) {
            first = false;
            return blockIdx.x;
        }
        unsigned int index = 0;
        if (threadIdx.x == 0) index = kAsksFirst ? counter.of_all() : counter.after_own();
        return uniform(index);
    }

    const ForwardParams& call;
    const Order order;
    const TileCounter counter;
    bool first = true;
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
        if (warp == 0) send_queries(smem, params, sent, taken.next());
        const WorkTile work = follow_queries(smem, q_at);
        if (!work.exists()) return;

        const KeyRange keys = key_tiles_of(params.call, work);
        KeyWidener<KeyRows> widener(params, work, keys);
        widener.load(keys.end - 1);
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
            widener.load(tile - 1);  // not before: a fence waits for all that is on its way
        }
    }
}
