// quantize: rounds elements to 8 bits (e4m3), in units of a descale that the heads of a group
// share.
//
// `measure` finds the largest finite magnitude, divided by the largest e4m3: in these units, no
// finite element exceeds 448. `convert` multiplies by the reciprocal and rounds. It takes the tiles
// in reverse: what was measured last is still in the L2 cache.
//
// Shapes   x, y (batch, seqlen, heads, head_dim); descale (batch, kv_heads). If SEQLEN_CONTIGUOUS,
//          y has one row per dim, with tokens adjacent
// Owns     block: TILE_ROWS tokens of one head; thread: ROWS of them, CHUNK columns of each
// Writes   measure: measured, initially 0; convert: y, NaN where x is, and descale if measured
#include "call/columns.cuh"
#include "call/memory.cuh"
#include "call/numbers.cuh"
#include "call/tensor.cuh"
#include "ptx/ptx_sm90.cuh"

constexpr int kThreads = THREADS;
constexpr int kTileRows = TILE_ROWS;
constexpr int kRows = ROWS;
constexpr int kChunk = CHUNK;
constexpr bool kSeqlenContiguous = SEQLEN_CONTIGUOUS;
constexpr int kOutAlignBytes = OUT_ALIGN_BYTES;
constexpr bool kConvertOverlaps = CONVERT_OVERLAPS;  // the second launch begins early
static_assert(sizeof(QuantizeParams) == PARAMS_BYTES, "the host passes a different struct");
static_assert(kValueDim % kChunk == 0, "a row must be whole chunks");

constexpr int kAcross = kValueDim / kChunk;  // chunks of a row
// Tokens that a thread reads together when it only reads.
constexpr int kReadRows = min_of(kRows, 4);
constexpr float kLargestE4m3 = 448;
// Descales and their reciprocals are floats.
constexpr float kSmallest = 0x1p-126f, kLargest = 0x1.fffffep127f;

// Some tokens of one head, numbered within its matrix.
struct Tile {
    int sequence, head, begin, end;
    bool first_of_sequence;
};

__device__ inline Tile tile_of_block(const QuantizeParams& params, int block) {
    const int head = block % params.heads;
    const auto [sequence, first_row] =
        row_tile<kTileRows>(block / params.heads, params.batch, params.seqlen, params.cu_seqlens);
    const int begin = kPacked ? params.cu_seqlens[sequence] : 0;
    const int end = kPacked ? params.cu_seqlens[sequence + 1] : params.seqlen;
    return {sequence, head, begin + first_row, min(end, begin + first_row + kTileRows),
            first_row == 0};
}

// The index of the descale of a tile's head.
__device__ inline int descale_index(const QuantizeParams& params, const Tile& tile) {
    return tile.sequence * params.kv_heads + tile.head / (params.heads / params.kv_heads);
}

// What a thread processes at once: some columns of some tokens.
template <int Rows>
struct Piece {
    using Chunk = Pack<scalar_t, kChunk>;
    Chunk rows[Rows];

    // Past the tile's end, its last row stands in.
    __device__ Piece(const Matrix<const scalar_t>& x, const Tile& tile, int row, int col) {
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            rows[r] = *reinterpret_cast<const Chunk*>(x.row(min(row + r, tile.end - 1)) + col);
        }
    }
};

// Calls work(piece, row, col) for each piece of a tile. Across threads of a warp are adjacent in a
// row, the others are in other rows.
template <int Rows, int Across, class Work>
__device__ inline void for_pieces(const QuantizeParams& params, const Tile& tile,
                                  const Work& work) {
    const auto x = matrix_of<const scalar_t>(params.x, tile.sequence, tile.head);
    constexpr int kDown = kTileRows / Rows;
    static_assert(kTileRows % Rows == 0, "a tile must be whole pieces");
    static_assert(kAcross % Across == 0, "a row must be whole runs of threads");
    for (int i = threadIdx.x; i < kAcross * kDown; i += kThreads) {
        const int row = tile.begin + i / Across % kDown * Rows;
        const int col = (i / (Across * kDown) * Across + i % Across) * kChunk;
        if (row < tile.end) work(Piece<Rows>(x, tile, row, col), row, col);
    }
}

// ---- the descale ----

// The largest magnitude of a thread's part of a tile, ignoring NaN and, if Finite, infinity.
template <bool Finite>
__device__ inline acc_t largest_magnitude(const QuantizeParams& params, const Tile& tile) {
    acc_t largest = 0;
    for_pieces<kReadRows, kAcross>(params, tile, [&](const Piece<kReadRows>& piece, int, int) {
#pragma unroll
        for (int r = 0; r < kReadRows; ++r)
#pragma unroll
            for (int e = 0; e < kChunk; ++e) {
                const acc_t value = to_acc(piece.rows[r][e]);
                if (!Finite || is_finite(value)) largest = max(largest, acc_t(fabs(value)));
            }
    });
    return largest;
}

struct MeasureSmem {
    acc_t warps[kThreads / 32];
};

extern "C" __global__ void __launch_bounds__(kThreads)
    measure(const __grid_constant__ QuantizeParams params) {
    if constexpr (kConvertOverlaps) ptx::let_next_launch_begin();
    const Tile tile = tile_of_block(params, blockIdx.x);
    acc_t largest = largest_magnitude<false>(params, tile);
    // Testing each element would take longer than reading it.
    if (!is_finite(largest)) largest = largest_magnitude<true>(params, tile);
    auto& smem = shared_memory<MeasureSmem>();
    largest = lanes_max<32>(largest);
    if (threadIdx.x % 32 == 0) smem.warps[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (const acc_t of_warp : smem.warps) largest = max(largest, of_warp);
    if (largest == 0) return;
    // float64 may exceed what float32 can hold.
    const acc_t descale = min(max(largest / kLargestE4m3, acc_t(kSmallest)), acc_t(kLargest));
    // Positive floats are ordered like their bits.
    atomicMax(params.measured + descale_index(params, tile),
              __float_as_uint(static_cast<float>(descale)));
}

// ---- the elements ----

// Stores a thread's part of y, one token per row.
__device__ inline void store_tokens(const Matrix<float8_e4m3fn>& y, const Tile& tile,
                                    const Piece<kRows>& piece, int row, int col, acc_t scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (row + r >= tile.end) break;
        float scaled[kChunk];
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
            scaled[e] = static_cast<float>(to_acc(piece.rows[r][e]) * scale);
        }
        write_e4m3(y.row(row + r) + col, scaled);
    }
}

// Stores a thread's part of y, one dim per row.
__device__ inline void store_dims(const Matrix<float8_e4m3fn>& y, const Tile& tile,
                                  const Piece<kRows>& piece, int row, int col, acc_t scale) {
    constexpr int kTogether = min_of(kRows, kOutAlignBytes);
#pragma unroll
    for (int e = 0; e < kChunk; ++e)
#pragma unroll
        for (int r = 0; r < kRows; r += kTogether) {
            float scaled[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                scaled[i] = static_cast<float>(to_acc(piece.rows[r + i][e]) * scale);
            }
            float8_e4m3fn* const to = y.row(col + e) + row + r;
            if (row + r + kTogether <= tile.end) {
                write_e4m3(to, scaled);
            } else {
#pragma unroll
                for (int i = 0; i < kTogether; ++i)
                    if (row + r + i < tile.end) to[i] = {ptx::e4m3_from_float(scaled[i])};
            }
        }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    convert(const __grid_constant__ QuantizeParams params) {
    const Tile tile = tile_of_block(params, gridDim.x - 1 - blockIdx.x);
    const int index = descale_index(params, tile);
    if constexpr (kConvertOverlaps) ptx::wait_for_launch_before();
    float descale;
    if (params.measured) {
        const float measured = __uint_as_float(params.measured[index]);
        descale = measured == 0 ? 1 : measured;
        const bool tells =
            tile.first_of_sequence && tile.head % (params.heads / params.kv_heads) == 0;
        if (tells && threadIdx.x == 0) params.descale[index] = descale;
    } else {
        descale = params.descale[index];
    }
    const auto y = matrix_of<float8_e4m3fn>(params.y, tile.sequence, tile.head);
    // So a warp reads 64 adjacent bytes and writes 128.
    constexpr int kTogether = kSeqlenContiguous ? min_of(kAcross & -kAcross, 4) : kAcross;
    for_pieces<kRows, kTogether>(params, tile, [&](const Piece<kRows>& piece, int row, int col) {
        const acc_t scale = 1 / acc_t(descale);
        if constexpr (kSeqlenContiguous) {
            store_dims(y, tile, piece, row, col, scale);
        } else {
            store_tokens(y, tile, piece, row, col, scale);
        }
    });
}
