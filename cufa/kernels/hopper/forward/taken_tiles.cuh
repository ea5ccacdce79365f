// How the producer of a block of the Hopper forwards takes tiles of queries: by their numbers in an
// order that all blocks share.
#pragma once

#include "hopper/forward/share_walk.cuh"
#include "hopper/forward/wgmma_forward_block.cuh"

template <bool Shares>
struct OrderOf {
    using type = TileOrder<kBlockM, kSectionBytes>;
};
template <>
struct OrderOf<true> {
    using type = ShareWalk<kBlockM, kBlockN>;
};
using Order = OrderOf<kSharesKeys>::type;

// Where only the GPU knows how many tiles of keys are to be split, limits their parts, each of
// which has at least one. Returns whether this part is left. A template, because tiles may have no
// parts.
template <class Work>
__device__ inline bool limit_parts(const ForwardParams& call, Work& work) {
    if constexpr (kPartsVary) {
        const KeyRange keys(work.sequence(call).mask(call.features), work.first_row);
        work.parts = min(int(work.parts), max(keys.end - keys.begin, 1));
        return work.part < work.parts;
    }
    return true;
}

// Whether even a block's first tile is taken by the count. If blocks wait for parts, a block then
// takes a part only after running blocks have taken those before it, however few blocks have an SM.
constexpr bool kAsksFirst = kLateBlocks || (kPartsKeys && !kMergesLater);

// Hands out the numbers of tiles after a block's first, or from the first on if kAsksFirst.
template <bool MergesLater>
struct TileHandout : TileCounter {
    template <class Order>  // that of shares has no count
    __device__ TileHandout(const ForwardParams& call, const Order& order)
        : TileCounter{tiles_taken(call), order.count()} {}
    __device__ int next() const { return kAsksFirst ? of_all() : after_own(); }
};
// If parts are merged later, there are about as many as blocks, or each block has a share. So each
// block takes every gridDim.x-th, without a count that a launch before would have to set.
template <>
struct TileHandout<true> {
    int last = blockIdx.x;

    __device__ TileHandout(const ForwardParams&, const Order&) {}
    __device__ int next() { return last += gridDim.x; }
};

// The producer: one thread, or a whole warp, if it looks up pages or its share of keys, or also
// widens keys.
constexpr int kProducers = kPaged || kWidensKeys || kSharesKeys ? 32 : 1;
static_assert(kLeastQueries == 0 || kPaged, "a whole warp looks for sequences of many queries");

// The tiles that a block takes, one after the other.
class TakenTiles {
  public:
    __device__ explicit TakenTiles(const Params& params)
        : call(params.call), order(call), handout(call, order) {
        index = kAsksFirst ? uniform<kLanes>(ask()) : blockIdx.x;
    }

    // Asks for the number of the next tile. The answer takes a while: `advance` waits for it.
    __device__ int ask() {
        if (kProducers > 1 && threadIdx.x != 0) return 0;
        return handout.next();
    }
    __device__ void advance(int answer) { index = uniform<kLanes>(answer); }

    // The tile with that number or, if it has no queries or no keys of its own, one after it; or
    // none.
    __device__ WorkTile current() {
        for (;; advance(ask())) {
            WorkTile work = order.at(index);
            if (!work.exists()) return work;
            const Sequence sequence = work.sequence(call);
            if ((kPacked && work.first_row >= sequence.seqlen_q) || !limit_parts(call, work))
                continue;
            return work;
        }
    }

  private:
    static constexpr unsigned int kLanes = kProducers > 1 ? 0xffffffffu : 1;  // that produce

    const ForwardParams& call;
    Order order;
    TileHandout<kMergesLater> handout;
    unsigned int index;
};
