// What a mask or a mask_mod hides in the Hopper backward: single scores; or, by a mask of which all
// queries that share a key see the same, as of padding, whole keys. Nobody asks for the scores of
// these one by one: they are like keys past the end of a sequence.
#pragma once

#include "call/grid.cuh"
#include "call/tensor.cuh"
#include "scores/seen_columns.cuh"

constexpr int kBlockN = BLOCK_N;  // keys of a block's tile
constexpr bool kHidesKeys = HIDES_KEYS, kHidesScores = kKeyMask && !kHidesKeys;

// What is seen of tiles of keys, of one KV head.
struct SeenKeys : SeenColumns<kBlockN> {
    using Columns = SeenColumns<kBlockN>;
    using Columns::Columns;

    __device__ static long long count(const BackwardParams& call) {
        return kHidesKeys ? Columns::count(call) : 0;
    }
    // Finds out about those of all heads, by a grid of blocks of Threads.
    template <int Threads>
    __device__ static void find(Part* all, const BackwardParams& call) {
        constexpr int kAtOnce = 4;  // with more, threads need registers, and fewer blocks run
        const auto keep_no_bits = [](long long, const Bits&) {};
        const long long step = static_cast<long long>(gridDim.x) * (Threads / 32);
        for (long long i = warp_of_grid<Threads>(); kHidesKeys && i < warps(call); i += step)
            Columns::find<kAtOnce>(all, call, i, keep_no_bits);
    }
};
