// rotary: pairs of columns, rotated by angles that grow with a token's position.
//
// (y1, y2) = (x1 cos - x2 sin, x1 sin + x2 cos) for the pairs of the first ROTARY_DIM columns;
// other columns are copied (Su et al. 2021, eq. 34). A pair is columns i and i + ROTARY_DIM / 2 or,
// if INTERLEAVED, 2 i and 2 i + 1.
//
// Shapes   x, y (batch, seqlen, heads, head_dim); cos, sin (places, ROTARY_DIM / 2); positions
//          (batch, seqlen): the row of cos and sin for each token
// Owns     thread: some pairs, or some copied columns, of one row of one head
// Writes   y, which may be x; NaN for a token whose position cos and sin do not have
#include "call/columns.cuh"
#include "call/numbers.cuh"
#include "call/tensor.cuh"

using table_t = TABLE_SCALAR;
using position_t = POSITION;
constexpr int kThreads = THREADS;
constexpr int kRotaryDim = ROTARY_DIM;
constexpr bool kInterleaved = INTERLEAVED;
static_assert(sizeof(RotaryParams) == PARAMS_BYTES, "the host passes a different struct");

constexpr int kPairs = kRotaryDim / 2, kStaying = kValueDim - kRotaryDim;
// Pairs that a thread rotates, or columns that it copies: as many as one read takes.
constexpr int kTogether = min_of(kChunkOfRow<scalar_t, kPairs>, kChunkOfRow<scalar_t, kValueDim>);
constexpr int kTurns = kPairs / kTogether, kCopies = kStaying / kTogether;
static_assert(kStaying % kTogether == 0, "what stays must be whole chunks");
using Chunk = Pack<scalar_t, kTogether>;

// The position of a token.
__device__ inline long long position_of(const RotaryParams& params, int batch, int row) {
    if (!params.positions) return row;
    return static_cast<const position_t*>(
        params.positions)[batch * params.positions_batch_stride + row * params.positions_stride];
}

// Element e of two adjacent chunks.
__device__ inline scalar_t& element(Chunk& low, Chunk& high, int e) {
    return e < kTogether ? low[e] : high[e - kTogether];
}

// Rotates the pairs of a row from number `first` on.
__device__ inline void turn(const RotaryParams& params, const scalar_t* x, scalar_t* y, int first,
                            long long position) {
    const bool known = position >= 0 && position < params.places;
    const table_t* const cos = static_cast<const table_t*>(params.cos) + position * kPairs + first;
    const table_t* const sin = static_cast<const table_t*>(params.sin) + position * kPairs + first;
    const int low_col = kInterleaved ? 2 * first : first;
    const int high_col = kInterleaved ? low_col + kTogether : first + kPairs;
    Chunk low = *reinterpret_cast<const Chunk*>(x + low_col);
    Chunk high = *reinterpret_cast<const Chunk*>(x + high_col);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
        scalar_t& a = kInterleaved ? element(low, high, 2 * i) : low[i];
        scalar_t& b = kInterleaved ? element(low, high, 2 * i + 1) : high[i];
        const acc_t x1 = to_acc(a), x2 = to_acc(b);
        const acc_t c = known ? acc_t(to_acc(cos[i])) : not_a_number();
        const acc_t s = known ? acc_t(to_acc(sin[i])) : not_a_number();
        a = from_acc<scalar_t>(x1 * c - x2 * s);
        b = from_acc<scalar_t>(x1 * s + x2 * c);
    }
    *reinterpret_cast<Chunk*>(y + low_col) = low;
    *reinterpret_cast<Chunk*>(y + high_col) = high;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    rotary(const __grid_constant__ RotaryParams params) {
    const long long index = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    const int part = index % (kTurns + kCopies);
    // Heads vary fastest, since they share a token's angles.
    const long long row_of_head = index / (kTurns + kCopies), token = row_of_head / params.heads;
    const int head = row_of_head % params.heads, row = token % params.seqlen;
    const int batch = token / params.seqlen;
    if (batch >= params.batch) return;

    const scalar_t* const x = matrix_of<const scalar_t>(params.x, batch, head).row(row);
    scalar_t* const y = matrix_of<scalar_t>(params.y, batch, head).row(row);
    if (part < kTurns) {
        turn(params, x, y, part * kTogether, position_of(params, batch, row));
    } else if (x != y) {
        const int col = kRotaryDim + (part - kTurns) * kTogether;
        *reinterpret_cast<Chunk*>(y + col) = *reinterpret_cast<const Chunk*>(x + col);
    }
}
