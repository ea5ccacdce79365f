// How warps that copy and warps that compute hand each other tiles: through a ring of stages in
// shared memory, each full or empty.
#pragma once

#include "hopper/watchdog.cuh"
#include "ptx/ptx_sm90.cuh"

// Waits until the phase of this parity has ended. `stage` and `caller` are for the watchdog.
__device__ inline void wait_for(ptx::Barrier& barrier, unsigned int parity, int stage,
                                Caller caller = Caller::here()) {
    const Watchdog watchdog;
    while (!ptx::barrier_try_wait(barrier, parity)) {
        watchdog.check("stage", stage, &barrier, caller);
    }
}

// The same for a phase with arrivals or bytes of the partner, the other block of a cluster.
__device__ inline void wait_for_partner(ptx::Barrier& barrier, unsigned int parity, int stage = 0,
                                        Caller caller = Caller::here()) {
    const Watchdog watchdog;
    while (!ptx::barrier_try_wait_for_partner(barrier, parity)) {
        watchdog.check("partner's stage", stage, &barrier, caller);
    }
}

// A thread's position in a ring of Stages. `parity` is that of the phase in which the stage becomes
// full; it became empty in the phase before.
template <int Stages>
struct RingPosition {
    int stage = 0;
    unsigned int parity = 0;

    __device__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The position one step before `at`.
template <int Stages>
__device__ inline RingPosition<Stages> before(RingPosition<Stages> at) {
    if (at.stage == 0) return {Stages - 1, at.parity ^ 1};
    return {at.stage - 1, at.parity};
}

// The barriers of a ring of tiles. `writers` threads arrive when a stage is full, usually the one
// that starts its copy; `readers` threads arrive when they are done with it.
template <int Stages>
struct Ring {
    ptx::Barrier full[Stages], empty[Stages];

    __device__ void init(int readers, int writers = 1) {
        for (int stage = 0; stage < Stages; ++stage) {
            ptx::barrier_init(full[stage], writers);
            ptx::barrier_init(empty[stage], readers);
        }
    }

    // The writer's side. Every stage begins empty: the phase before the first counts as ended.
    __device__ void wait_empty(RingPosition<Stages> at, Caller caller = Caller::here()) {
        wait_for(empty[at.stage], at.parity ^ 1, at.stage, caller);
    }
    __device__ ptx::Barrier& announce(RingPosition<Stages> at, int bytes) {
        ptx::barrier_arrive_expecting(full[at.stage], bytes);
        return full[at.stage];
    }

    // The readers' side.
    __device__ void wait_full(RingPosition<Stages> at, Caller caller = Caller::here()) {
        wait_for(full[at.stage], at.parity, at.stage, caller);
    }
    __device__ void release(RingPosition<Stages> at) { ptx::barrier_arrive(empty[at.stage]); }
};

// Arrives once per warp, after all of its lanes.
__device__ inline void arrive_by_warp(ptx::Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
}

// Releases a stage for a warp, whose part of a product is done and whose lanes have read what they
// need.
template <int Stages>
__device__ inline void release(Ring<Stages>& ring, RingPosition<Stages> at) {
    arrive_by_warp(ring.empty[at.stage]);
}
