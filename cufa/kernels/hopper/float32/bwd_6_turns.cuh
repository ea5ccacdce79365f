// Blocks of bwd_6_float32 add to dQ as they come or, if every run must give the same bits, in the
// order of their keys.
#pragma once

#include "hopper/float32/bwd_6_block.cuh"
#include "hopper/watchdog.cuh"

// The turns of the thread that sends out a warpgroup's sums, tile by tile of queries. A block never
// waits for one that begins later: the first keys come first.
template <class Walk>
class TurnsInOrder {
  public:
    // `walk` is that of the tiles.
    __device__ TurnsInOrder(const BackwardParams& call, const KeyTile& work, const Walk& walk)
        : call(call), work(work), walk(walk) {}

    // Waits until all blocks with earlier keys have added to the sums of the next tile.
    __device__ void take() {
        const int row = walk.first_row();
        const int first = work.sequence.mask(call.features).first_key(row) / kBlockN;
        const unsigned int turn = work.first_key / kBlockN - first;
        added = &Workspace(call).queries_from(work.sequence, walk.head(), row).added;
        const Watchdog watchdog;
        while (ptx::load_acquire(added) < turn) {
            watchdog.check("turn", turn, added, Caller::here());
        }
        walk.advance();
    }
    // Passes on the last turn that was taken, if any, once what was added is there.
    __device__ void pass() {
        if (added == nullptr) return;
        ptx::wait_stores();
        ptx::add_release(added, 1);
        added = nullptr;
    }

  private:
    const BackwardParams& call;
    const KeyTile& work;
    Walk walk;
    unsigned int* added = nullptr;
};

struct NoTurns {
    template <class Walk>
    __device__ NoTurns(const BackwardParams&, const KeyTile&, const Walk&) {}
    __device__ void take() {}
    __device__ void pass() {}
};

template <class Walk, bool InOrder = kDeterministic>
struct TurnsOf {
    using type = NoTurns;
};
template <class Walk>
struct TurnsOf<Walk, true> {
    using type = TurnsInOrder<Walk>;
};
template <class Walk>
using Turns = typename TurnsOf<Walk>::type;
