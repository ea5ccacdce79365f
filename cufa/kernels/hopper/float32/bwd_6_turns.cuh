// Blocks of bwd_6_float32 add to dQ as they come or, if every run must give the same bits, in the
// order of their keys.
#pragma once

#include "gradients/score_gradients.cuh"
#include "hopper/float32/bwd_6_block.cuh"
#include "hopper/watchdog.cuh"

static_assert(!kDeterministic || !kKeyMask,
              "nobody would count those that leave out a tile of queries");

// The turns of the thread that sends out a warpgroup's sums, tile by tile of queries. A block never
// waits for one that begins later: the first keys come first.
class Turns {
  public:
    __device__ explicit Turns(const KeyTile& work) : number(work.first_key / kBlockN) {}

    // Waits until all blocks with earlier keys are done with a tile's sums.
    __device__ void take(QueryHalves& tile) {
        if constexpr (!kDeterministic) return;
        taken = &tile.keys_done;
        const Watchdog watchdog;
        while (ptx::load_acquire(taken) < number) {
            watchdog.check("turn", number, taken, Caller::here());
        }
        ptx::proxy_fence_global();
    }
    // Passes on the last turn that was taken, if any, once what was added is there. That takes a
    // while: other work should come first.
    __device__ void pass() {
        if (!kDeterministic || taken == nullptr) return;
        ptx::wait_stores();
        ptx::add_release(taken, 1);
        taken = nullptr;
    }

  private:
    const unsigned int number;
    unsigned int* taken = nullptr;
};
