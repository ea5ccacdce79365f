// Tiles of float32 in two halves each, as tensor cores of 16 bits take them.
//
// An element is a large float16 plus a small one, 22 bits of mantissa together, and of the product
// of two such sums all is computed but the product of the two small parts: three products, each
// twice as fast as one of tf32 (Ootomo and Yokota 2022, "Recovering single precision accuracy from
// Tensor Cores while surpassing the FP32 theoretical peak performance"). float16 has few exponents,
// so that each row is in units of a power of two of its own: of queries and keys it becomes a
// factor of the score, of values one of the weight. If tf32 will do, there are large parts alone,
// which have as many bits of mantissa.
//
// A launch of its own makes them. In the workspace, tiles lie as they will in shared memory, so
// that one copy brings each: first those of queries, then those of keys with their values.
#pragma once

#include "online_softmax.cuh"
#include "tensor.cuh"
#include "wgmma_tiles.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kConsumers = kBlockM / kWgmmaM;
constexpr int kParts = kTf32 ? 1 : 2;
constexpr int kDepth = round_up(kHeadDim, kWgmmaK), kDims = round_up(kValueDim, kWgmmaK);

// Rows of the small parts come after all of the large ones.
using QueryRows = PanelTile<kParts * kWgmmaM, kDepth>;
using KeyRows = PanelTile<kParts * kBlockN, kDepth>;
using ValueRows = PanelTile<kParts * kBlockN, kDims>;

struct QueryHalves {
    QueryRows rows[kConsumers];
    float unit[kBlockM];

    static constexpr int kBytes = kConsumers * QueryRows::kBytes + sizeof(unit);
};

// Keys, and what their values are in units of: the exponent, and 2 to minus that, negative where
// halves cannot hold the values. These are zeros then, and added to the output as they are.
struct KeyHalves {
    KeyRows rows;
    float unit[kBlockN], value_exponent[kBlockN], value_reciprocal[kBlockN];

    static constexpr int kBytes = KeyRows::kBytes + 3 * sizeof(unit);
    __device__ bool has_value(int key) const { return value_reciprocal[key] > 0; }
};

struct TileHalves {
    KeyHalves k;
    ValueRows v;
};

// Where they are: each head has the tiles that row_tiles counts.
struct HalvesWorkspace {
    const ForwardParams& call;
    int query_tiles, key_tiles;

    __device__ explicit HalvesWorkspace(const ForwardParams& call)
        : call(call),
          query_tiles(row_tiles<kBlockM>(call.sizes.batch, call.sizes.seqlen_q)),
          key_tiles(row_tiles<kBlockN>(call.sizes.batch, call.sizes.seqlen_k)) {}

    __device__ QueryHalves& queries(int head, int tile) const {
        return first_queries()[static_cast<long long>(head) * query_tiles + tile];
    }
    __device__ TileHalves& keys(int kv_head, int tile) const {
        auto* first = reinterpret_cast<TileHalves*>(
            first_queries() + static_cast<long long>(call.sizes.heads) * query_tiles);
        return first[static_cast<long long>(kv_head) * key_tiles + tile];
    }
    // The tile that begins with row first_row of a sequence.
    __device__ int query_tile(const Sequence& sequence, int first_row) const {
        return first_tile<kBlockM>(sequence.batch, call.features.cu_seqlens_q,
                                   call.sizes.seqlen_q) +
               first_row / kBlockM;
    }
    __device__ int first_key_tile(const Sequence& sequence) const {
        return first_tile<kBlockN>(sequence.batch, call.features.cu_seqlens_k, call.sizes.seqlen_k);
    }

  private:
    // The workspace has room for its beginning to be aligned as shared memory is.
    __device__ QueryHalves* first_queries() const {
        const auto begin = reinterpret_cast<unsigned long long>(call.workspace);
        constexpr int kAlignment = alignof(QueryHalves);
        auto* const bytes = static_cast<unsigned char*>(call.workspace);
        return reinterpret_cast<QueryHalves*>(bytes +
                                              (kAlignment - begin % kAlignment) % kAlignment);
    }
    // As row_tile counts, for which rows before the first sequence have no tiles.
    template <int Rows>
    __device__ static int first_tile(int batch, const int* cu_seqlens, int seqlen) {
        if constexpr (!kPacked) return first_row_tile<Rows>(batch, 0, seqlen);
        return first_row_tile<Rows>(batch, cu_seqlens[batch], seqlen) - cu_seqlens[0] / Rows;
    }
};

// ---- making them ----

constexpr int kPieceCols = 4;
// Threads that have a row together, next to each other in a warp.
template <int Dims>
constexpr int kRowThreads = Dims > 64   ? 32
                            : Dims > 32 ? 16
                                        : 8;
static_assert(kDepth <= 32 * kPieceCols && kDims <= 32 * kPieceCols, "a warp has whole rows");

// A row is multiplied so that its largest element is from 2^14 on, below 2^15: then small parts
// have all their bits even of much smaller elements.
constexpr int kTopExponent = 14;
// Smaller rows are taken for such ones.
constexpr int kLeastKeyExponent = -100, kLeastValueExponent = -60;
// Larger values would leave the weights of others beside theirs no place in a float.
constexpr float kLargestValue = 0x1p40f;

__device__ inline float power_of_two(int exponent) {
    return __int_as_float((exponent + 127) << 23);
}
// The exponent of a number that is not negative, from Least on.
template <int Least>
__device__ inline int exponent_of(float x) {
    return max((__float_as_int(x) >> 23) - 127, Least);
}

// Two elements, rounded.
struct HalfPair {
    unsigned int pair;

    __device__ HalfPair(float low, float high) : pair(ptx::pack_f16(low, high)) {}
    __device__ float low() const { return to_acc(float16{static_cast<unsigned short>(pair)}); }
    __device__ float high() const {
        return to_acc(float16{static_cast<unsigned short>(pair >> 16)});
    }
};

// Some columns of a row of the caller's: zeros past the end of it, or of the rows.
template <int Dims>
struct RowPiece {
    float x[kPieceCols];

    __device__ RowPiece(const Matrix<const float>& rows, int row, int count, int col) {
        constexpr int kVector = min_of(kAlignBytes / int(sizeof(float)), Dims & -Dims);
        constexpr int kChunk = min_of(kVector, kPieceCols);
        using Chunk = Pack<float, kChunk>;
#pragma unroll
        for (int c = 0; c < kPieceCols; c += kChunk) {
            Chunk chunk = {};
            if (row < count && col + c < Dims)
                chunk = *reinterpret_cast<const Chunk*>(rows.row(row) + col + c);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) x[c + i] = chunk[i];
        }
    }

    // The largest magnitude of what is finite in the row, which all threads ask that have it.
    __device__ float largest_of_row() const {
        float largest = 0;
#pragma unroll
        for (const float each : x) {
            if (is_finite(each)) largest = fmaxf(largest, fabsf(each));
        }
        return lanes_max<kRowThreads<Dims>>(largest);
    }
    __device__ bool row_is_finite() const {
        float others = 0;
#pragma unroll
        for (const float each : x) {
            if (!is_finite(each)) others = 1;
        }
        return lanes_max<kRowThreads<Dims>>(others) == 0;
    }

    // Writes it as so many times as large halves; columns beyond the tile's are not there.
    template <class Tile>
    __device__ void write(Tile& tile, int row, int col, float factor) const {
        using Words = Pack<unsigned int, kPieceCols / 2>;
        if (col >= round_up(Dims, kWgmmaK)) return;
        Words large, small;
#pragma unroll
        for (int i = 0; i < kPieceCols; i += 2) {
            const float low = factor == 0 ? 0 : x[i] * factor;
            const float high = factor == 0 ? 0 : x[i + 1] * factor;
            const HalfPair halves(large_part(low), large_part(high));
            large[i / 2] = halves.pair;
            small[i / 2] = ptx::pack_f16(low - halves.low(), high - halves.high());
        }
        *reinterpret_cast<Words*>(tile.at(row, col)) = large;
        if (kParts > 1) *reinterpret_cast<Words*>(tile.at(row + Tile::kRows / kParts, col)) = small;
    }

  private:
    // NaN and infinity are left to the small part. In the large one, infinity times a small part
    // that is 0 would be NaN.
    __device__ static float large_part(float x) {
        if (kParts == 1 || is_finite(x)) return x;
        return copysignf(1 << kTopExponent, x);
    }
};
