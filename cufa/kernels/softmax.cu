// softmax: the row softmax of fwd_1_naive (three passes) or fwd_2_online_softmax (two), on its own.
//
// Shapes   x, y (rows, cols), any row stride
// Owns     block: one row
// Writes   y; zeros for a row in which all elements are -inf
#include "call/memory.cuh"
#include "call/params.cuh"
#include "softmax/softmax_rows.cuh"

constexpr int kThreads = THREADS;
static_assert(sizeof(SoftmaxParams) == PARAMS_BYTES, "the host passes a different struct");
constexpr int kPasses = PASSES;
static_assert(kPasses == 2 || kPasses == 3, "a softmax takes two passes or three");

extern "C" __global__ void __launch_bounds__(kThreads)
    softmax(const __grid_constant__ SoftmaxParams params) {
    auto& scratch = shared_memory<RowScratch<kThreads>>();
    for (long long row = blockIdx.x; row < params.rows; row += gridDim.x) {
        const scalar_t* x = static_cast<const scalar_t*>(params.x) + row * params.x_row_stride;
        scalar_t* y = static_cast<scalar_t*>(params.y) + row * params.y_row_stride;
        if constexpr (kPasses == 3) {
            softmax_three_passes(x, y, params.cols, scratch);
        } else {
            softmax_two_passes(x, y, params.cols, scratch);
        }
    }
}
