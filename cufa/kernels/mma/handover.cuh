// How the warps of a block hand on a place in shared memory that all of them fill and all of them
// read, without meeting: a warp waits only until what it reads is whole, and before it fills the
// place anew until all others are done with what was there.
#pragma once

#include "hopper/pipeline.cuh"

// What fills the place, and who reads it, is numbered from 0.
class Handover {
  public:
    // By one thread, before the block meets. As many arrivals make a filling whole: threads that
    // copy, or warps that write.
    __device__ void init(int arrivals, int warps) {
        ptx::barrier_init(whole, arrivals);
        ptx::barrier_init(free, warps);
    }

    // Those who fill the place. It begins free: the phase before the first counts as ended.
    __device__ void wait_free(int filling) { wait_for(free, (filling & 1) ^ 1, filling); }
    // A thread that has started its part of the copies, one whose part is there, and a warp that
    // has written its part.
    __device__ void announce_copies() { ptx::barrier_arrive_after_copies(whole); }
    __device__ void announce_copied() { ptx::barrier_arrive(whole); }
    __device__ void announce() { arrive_by_warp(whole); }

    // Those who read it.
    __device__ void wait_whole(int filling) { wait_for(whole, filling & 1, filling); }
    __device__ void release() { arrive_by_warp(free); }

  private:
    ptx::Barrier whole, free;
};

// What stands in its place where warps meet instead.
struct NoHandover {
    __device__ void wait_free(int) const {}
    __device__ void announce_copies() const {}
    __device__ void announce_copied() const {}
    __device__ void announce() const {}
    __device__ void wait_whole(int) const {}
    __device__ void release() const {}
};
