// Blocks that wait for each other, one after the other.
#include "ptx/ptx_sm90.cuh"

struct Turns {
    unsigned int *turn, *sums;
    unsigned int first_turn;  // 0, or a number that nobody reaches
};

// Block i comes in turn i, the last one first; each adds to what the one before left.
extern "C" __global__ void turns(const __grid_constant__ Turns params) {
    if (threadIdx.x == 0) {
        const unsigned int mine = params.first_turn + gridDim.x - 1 - blockIdx.x;
        while (ptx::load_acquire(params.turn) != mine) {
        }
    }
    __syncthreads();
    params.sums[threadIdx.x] = 2 * params.sums[threadIdx.x] + blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release(params.turn, 1);
}
