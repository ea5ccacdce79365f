// Blocks that add to the same sums may take turns: in the order of their keys, so that every run
// gives the same bits and a block knows that it is the last; or just the first before all others.
// Threads beside the warpgroups wait for turns and pass them on, so that warpgroups do not wait for
// memory. Passing a turn on lasts until all other blocks can see the sums, about half the time of a
// tile. So one thread passes turns on and another waits for them.
#pragma once

#include "hopper/backward/wgmma_query_walks.cuh"
#include "hopper/backward/wgmma_workspace.cuh"

// A warpgroup's turns. A stage is full once the warpgroup may add its part of a tile, and added
// once it has. It is empty once the thread that passes the turn on has seen that.
template <int Stages>
struct OrderRing : Ring<Stages> {
    ptx::Barrier added[Stages];

    __device__ void init() {
        Ring<Stages>::init(1);
        for (ptx::Barrier& barrier : added) ptx::barrier_init(barrier, kWarpgroup / 32);
    }
};

// The number of a warpgroup among those that add to a tile.
__device__ inline int adder_of(int warpgroup) {
    return rank_in_cluster() * kConsumers + warpgroup;
}

// Waits for the turns of all warpgroups: until the blocks before this one have added their parts.
template <int Stages, class Workspace, class Walk>
__device__ inline void take_turns(OrderRing<Stages> (&order)[kConsumers],
                                  RingPosition<Stages> (&to)[kConsumers],
                                  const Workspace& workspace, const BackwardParams& call,
                                  const KeyWork& work, Walk at) {
    const int first_place = workspace.first_place_of(work.sequence(call));
    const int tiles_before = workspace.tiles_before(call, work);
    for (; !at.at_end(); at.advance()) {
        const int first_tile = work.mask(call).first_key(at.tile * Workspace::kBlockM) / kBlockN;
        const unsigned int place = tiles_before - first_tile;
        const unsigned int turn = kAdding == kInOrder ? place : min(place, 1u);
        const auto& added = workspace.added[workspace.place_from(first_place, at.head, at.tile)];
        for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
            if (!Workspace::Sums::has_part(warpgroup, at.head, at.tile)) continue;
            order[warpgroup].wait_empty(to[warpgroup]);
            const Watchdog watchdog;
            const unsigned int* const before = &added[adder_of(warpgroup)];
            while (turn > 0 && ptx::load_acquire(before) < turn) {
                watchdog.check("turn", turn, before, Caller::here());
            }
            ptx::barrier_arrive(order[warpgroup].full[to[warpgroup].stage]);
            to[warpgroup].advance();
        }
    }
}
// The same for all that a block processes, if it has one tile of keys.
template <class Workspace, int Stages>
__device__ inline void take_turns(OrderRing<Stages> (&order)[kConsumers],
                                  const BackwardParams& call, KeyWork work) {
    const WorkQueryTiles<Workspace> tiles(call, work);
    RingPosition<Stages> to[kConsumers];
    take_turns(order, to, Workspace(call), call, work, QueryWalk(tiles, call.sizes, work.part));
}

// Passes on the turns of one warpgroup. A whole warp waits for it: a thread that others of its warp
// wait for would poll all the time.
template <int Stages, class Workspace, class Walk>
__device__ inline void pass_turns(OrderRing<Stages>& order, RingPosition<Stages>& to,
                                  const Workspace& workspace, int warpgroup,
                                  const BackwardParams& call, const KeyWork& work, Walk at) {
    const int first_place = workspace.first_place_of(work.sequence(call));
    for (; !at.at_end(); at.advance()) {
        if (!Workspace::Sums::has_part(warpgroup, at.head, at.tile)) continue;
        const int place = workspace.place_from(first_place, at.head, at.tile);
        wait_for(order.added[to.stage], to.parity, to.stage);
        if (threadIdx.x % 32 == 0) {
            order.release(to);
            if (kAdding == kInOrder || work.first_key == 0) {
                ptx::add_release(&workspace.added[place][adder_of(warpgroup)], 1);
            }
        }
        __syncwarp();
        to.advance();
    }
}
// The same for all that a block processes, if it has one tile of keys.
template <class Workspace, int Stages>
__device__ inline void pass_turns(OrderRing<Stages>& order, int warpgroup,
                                  const BackwardParams& call, KeyWork work) {
    const WorkQueryTiles<Workspace> tiles(call, work);
    RingPosition<Stages> to;
    pass_turns(order, to, Workspace(call), warpgroup, call, work,
               QueryWalk(tiles, call.sizes, work.part));
}
