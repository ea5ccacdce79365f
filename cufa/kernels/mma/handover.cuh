// How the warps of a block share memory that all of them fill and all of them read, without
// meeting. A warp waits until what it reads is whole, and before it refills the memory, until all
// others are done with the old contents.
#pragma once

#include "hopper/pipeline.cuh"

// Fillings are numbered from 0, for those who fill and those who read.
class Handover {
  public:
    // Called by one thread, before the block meets. A filling is whole after `arrivals` arrivals:
    // of threads that copy, or of warps that write.
    __device__ void init(int arrivals, int warps) {
        ptx::barrier_init(whole, arrivals);
        ptx::barrier_init(free, warps);
    }

    // For those who fill. The memory begins free: the phase before the first counts as ended.
    __device__ void wait_free(int filling) { wait_for(free, (filling & 1) ^ 1, filling); }
    // Called by a thread that has started its copies, by a thread whose copies are done, and by a
    // warp that has written its part.
    __device__ void announce_copies() { ptx::barrier_arrive_after_copies(whole); }
    __device__ void announce_copied() { ptx::barrier_arrive(whole); }
    __device__ void announce() { arrive_by_warp(whole); }

    // For those who read.
    __device__ void wait_whole(int filling) { wait_for(whole, filling & 1, filling); }
    __device__ void release() { arrive_by_warp(free); }

  private:
    ptx::Barrier whole, free;
};

// Stands in where warps meet instead.
struct NoHandover {
    __device__ void wait_free(int) const {}
    __device__ void announce_copies() const {}
    __device__ void announce_copied() const {}
    __device__ void announce() const {}
    __device__ void wait_whole(int) const {}
    __device__ void release() const {}
};
