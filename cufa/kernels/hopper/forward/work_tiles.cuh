// The tiles of queries that a block of the Hopper forwards is at, in shared memory: the producer
// writes that of each stage of queries. A warp that computes copies the one it is at, to registers
// or, if `Shared`, to a place of its own in shared memory.
#pragma once

#include "call/schedule.cuh"
#include "hopper/panel_tile.cuh"

constexpr int kWarps = kWarpgroup / 32;  // of a warpgroup

template <int Warpgroups, bool Shared>
struct CurrentTiles {};
template <int Warpgroups>
struct CurrentTiles<Warpgroups, true> {
    WorkTile current[Warpgroups][kWarps];
};

template <int Warpgroups, int Stages, bool Shared>
struct WorkTiles : CurrentTiles<Warpgroups, Shared> {
    WorkTile of_stage[Warpgroups][Stages];
};

// The tile that a warp is at.
template <bool Shared>
struct CurrentTile {
    using Received = WorkTile;  // how the next one is held
    WorkTile tile;

    template <class Tiles>
    __device__ CurrentTile(Tiles&, int) {}
    __device__ static Received held(const WorkTile&, const WorkTile& copy) { return copy; }
    __device__ void become(const WorkTile& next) { tile = next; }
};
template <>
struct CurrentTile<true> {
    using Received = const WorkTile&;
    WorkTile& tile;

    template <class Tiles>
    __device__ CurrentTile(Tiles& tiles, int warpgroup)
        : tile(tiles.current[warpgroup][uniform(threadIdx.x / 32) % kWarps]) {}
    __device__ static Received held(const WorkTile& there, const WorkTile&) { return there; }
    __device__ void become(const WorkTile& next) {
        __syncwarp();  // all lanes have read the tile before
        if (threadIdx.x % 32 == 0) tile = next;
        __syncwarp();
    }
};
