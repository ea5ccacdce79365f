// Blocks of the float32 backwards add to dQ as they come or, if every run must give the same bits,
// in the order of their keys.
#pragma once

#include "gradients/score_gradients.cuh"
#include "hopper/float32/backward_tiles.cuh"
#include "hopper/watchdog.cuh"

static_assert(!kDeterministic || !kKeyMask,
              "nobody would count those that leave out a tile of queries");

// The turns of those who add to a block's part of dQ, tile by tile of queries. A block never waits
// for one that begins later: the first keys come first, and blocks begin in the order of their
// numbers (CUDA does not promise it, but all GPUs do so).
class AdditionTurns {
  public:
    __device__ explicit AdditionTurns(const KeyTile& work)
        : earlier(work.first_key / kBlockN * kAdders) {}

    // Waits until all blocks with earlier keys are done with a tile's sums.
    __device__ void take(QueryHalves& tile) {
        if constexpr (!kDeterministic) return;
        taken = &tile.additions;
        const Watchdog watchdog;
        while (ptx::load_acquire(taken) < earlier) {
            watchdog.check("turn", earlier, taken, Caller::here());
        }
    }
    // Whether a turn was taken and not passed on yet.
    __device__ bool has_one() const { return kDeterministic && taken != nullptr; }
    // Passes it on, once what was added is there. Of several threads that added, one passes it on
    // and the others drop it.
    __device__ void pass() {
        ptx::add_release(taken, 1);
        drop();
    }
    __device__ void drop() { taken = nullptr; }

  private:
    const unsigned int earlier;
    unsigned int* taken = nullptr;
};
