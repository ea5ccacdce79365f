// rotary: pairs of columns, rotated by angles that grow with a token's position (see rotation.cuh).
//
// Shapes   x, y (batch, seqlen, heads, head_dim); cos, sin (places, ROTARY_DIM / 2); positions
//          (batch, seqlen): the row of cos and sin for each token
// Owns     thread: some pairs, or some copied columns, of one row of one head
// Writes   y, which may be x; NaN for a token whose position cos and sin do not have
#include "call/grid.cuh"
#include "call/rotation.cuh"
#include "call/tensor.cuh"

using table_t = TABLE_SCALAR;
using position_t = POSITION;
constexpr int kThreads = THREADS;
using Row = RotatedRow<scalar_t, kValueDim, ROTARY_DIM, INTERLEAVED>;
static_assert(sizeof(RotaryParams) == PARAMS_BYTES, "the host passes a different struct");

// The position of a token.
__device__ inline long long position_of(const RotaryParams& params, int batch, int row) {
    if (!params.positions) return row;
    return static_cast<const position_t*>(
        params.positions)[batch * params.positions_batch_stride + row * params.positions_stride];
}

extern "C" __global__ void __launch_bounds__(kThreads)
    rotary(const __grid_constant__ RotaryParams params) {
    const long long index = thread_of_grid<kThreads>();
    const int part = index % Row::kParts;
    // Heads vary fastest, since they share a token's angles.
    const long long row_of_head = index / Row::kParts, token = row_of_head / params.heads;
    const int head = row_of_head % params.heads, row = token % params.seqlen;
    const int batch = token / params.seqlen;
    if (batch >= params.batch) return;

    const scalar_t* const x = matrix_of<const scalar_t>(params.x, batch, head).row(row);
    scalar_t* const y = matrix_of<scalar_t>(params.y, batch, head).row(row);
    if (x == y && Row::stays(part)) return;
    const AngleTables<table_t> tables{static_cast<const table_t*>(params.cos),
                                      static_cast<const table_t*>(params.sin), params.places};
    Row::rotate(
        x, part, tables, position_of(params, batch, row),
        [&](int col, const Row::Chunk& chunk) { *reinterpret_cast<Row::Chunk*>(y + col) = chunk; });
}
