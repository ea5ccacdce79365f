// The keys that a block of fwd_5_mma processes, and where it copies tiles of them from.
#pragma once

#include "call/key_tiles.cuh"
#include "mma/fwd_5_block.cuh"
#include "mma/key_pages.cuh"

// Whether a thread's part of copies is recomputed for each tile, to take no registers in between.
// Where a mask cuts tiles this takes longer.
constexpr bool kCopiesAnew = kLongSteps || (sizeof(scalar_t) == 2 && !kCutTiles);

// This thread's index, for copies. An unsigned index takes fewer registers with Blackwell's ptxas,
// and more with Hopper's.
__device__ inline auto copying_thread() {
    if constexpr (kCopiesAnew && ptx::kBlackwell) {
        return ptx::anew(threadIdx.x);
    } else if constexpr (kCopiesAnew) {
        return ptx::anew(static_cast<int>(threadIdx.x));
    } else {
        return threadIdx.x;
    }
}

// The keys and values of a head, and which of them the block's rows see.
struct Source {
    KeyMatrix<const scalar_t> k, v;
    KeyTiles<kBlockN> tiles;
    TilePages<kBlockN> pages;  // of the next tile to be copied

    // `thread` is copying_thread().
    template <class Thread>
    __device__ void copy_k(Smem& smem, int first_key, Thread thread) const {
        copy_keys<kThreads, kHeadDim>(smem.k, k, pages, first_key, tiles.end, thread);
    }
    template <class Thread>
    __device__ void copy_v(Smem& smem, int first_key, Thread thread) const {
        copy_keys<kThreads, kValueDim>(smem.v, v, pages, first_key, tiles.end, thread);
    }
    __device__ void look_up_pages(int first_key) { pages = {k, first_key, tiles.end}; }
};
