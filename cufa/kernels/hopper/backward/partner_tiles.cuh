// How partners, two blocks of a cluster, hand each other tiles of scores: a warp copies rows that
// it has written to the same place in the partner's shared memory.
#pragma once

#include "hopper/panel_tile.cuh"

// The barriers of a ring of tiles that one of the partners writes and the other one reads. The
// reader has those that say what is full, the writer those that say what the reader is done with:
// the tiles themselves and the copies that it has made of them.
template <int Stages>
struct PartnerRing {
    ptx::Barrier full[Stages], empty[Stages];

    // `readers` warps of the partner arrive when they are done with a stage.
    __device__ void init(int readers, int bytes) {
        for (int stage = 0; stage < Stages; ++stage) {
            ptx::barrier_init(full[stage], 1);
            ptx::barrier_init(empty[stage], readers);
            ptx::barrier_arrive_expecting(full[stage], bytes);
        }
    }

    // The writer's side.
    __device__ void wait_empty(RingPosition<Stages> at, Caller caller = Caller::here()) {
        wait_for_partner(empty[at.stage], at.parity ^ 1, at.stage, caller);
    }
    // Copies a warp's 16 rows of a tile of one panel, which its lanes have written and made visible
    // to the copy engine.
    template <class Tile>
    __device__ void send_rows(Tile& tile, int first_row, RingPosition<Stages> at) {
        static_assert(Tile::kPanels == 1, "a warp's rows follow each other");
        __syncwarp();
        if (threadIdx.x % 32 != 0) return;
        constexpr int kBytes = kWarpRows * Tile::kRowBytes;
        ptx::copy_to_partner(tile.data[0][first_row], kBytes, full[at.stage]);
    }

    // The reader's side. When a tile has come, one thread says how many bytes the next will have.
    __device__ void expect(RingPosition<Stages> at, int bytes) {
        ptx::barrier_arrive_expecting(full[at.stage], bytes);
    }
    __device__ void wait_full(RingPosition<Stages> at, Caller caller = Caller::here()) {
        wait_for_partner(full[at.stage], at.parity, at.stage, caller);
    }
    // For a warp that is done with a stage.
    __device__ void release(RingPosition<Stages> at) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::barrier_arrive_at_partner(empty[at.stage]);
    }

  private:
    static constexpr int kWarpRows = 16;
};
