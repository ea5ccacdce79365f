// 2^x of float64 as the kernels compute it, with a table and without, for a test to look at.
#include "call/memory.cuh"
#include "softmax/exp2_table.cuh"

struct Powers {
    const double* x;
    double *by_table, *without;
    int count;
};

extern "C" __global__ void powers(const __grid_constant__ Powers params) {
    auto& table = shared_memory<Exp2Table<double, ROOT_BITS>>();
    table.init();
    __syncthreads();
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int i = first; i < params.count; i += step) {
        params.by_table[i] = table.power(params.x[i]);
        params.without[i] = exp2_of(params.x[i]);
    }
}
