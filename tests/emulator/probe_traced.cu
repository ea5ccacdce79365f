// What traced functions compute in a kernel, for a test to look at. The test writes the header: it
// has them and what puts the values of all of them into results, `count` apart.
#include "traced_functions.cuh"

struct Arguments {
    const acc_t *x, *y;
    const int *i, *j;
    acc_t* results;
    int count;
};

extern "C" __global__ void traced(const __grid_constant__ Arguments at) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int n = first; n < at.count; n += step)
        write_values(at.x[n], at.y[n], at.i[n], at.j[n], at.results + n, at.count);
}
