// float32 in two halves, for 16-bit tensor cores.
//
// An element is a large float16 plus a small one, with 22 bits of mantissa together. The product of
// two such sums omits only the product of the two small parts. It takes three products, each twice
// as fast as one of tf32 (Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor
// Cores while surpassing the FP32 theoretical peak performance"). float16 has few exponents, so
// elements are in units of a power of two. If tf32 is enough there are only large parts, which have
// as many bits of mantissa as tf32.
#pragma once

#include "call/columns.cuh"
#include "call/half_range.cuh"
#include "call/numbers.cuh"
#include "call/tensor.cuh"
#include "hopper/wgmma_products.cuh"

constexpr int kHalves = kTf32 ? 1 : 2;  // of an element
constexpr int kDepth = round_up(kHeadDim, kWgmmaK);
constexpr int kDims = round_up(kValueDim, kWgmmaK);

// The columns of a row that a thread takes, and the adjacent threads of a warp that share the row.
template <int Dims>
constexpr int kPieceCols = Dims > 128 ? 8 : 4;
template <int Dims>
constexpr int kRowThreads = Dims > 64   ? 32
                            : Dims > 32 ? 16
                                        : 8;
template <int Dims>
constexpr bool kWarpHasRows = Dims <= kRowThreads<Dims> * kPieceCols<Dims>;
static_assert(kWarpHasRows<kDepth> && kWarpHasRows<kDims>, "a warp has whole rows");

// Numbers with one unit are scaled so that the largest is at least 2^14 and less than 2^15. Then
// the small parts even of much smaller numbers keep all their bits.
constexpr int kTopExponent = 14;

// Two elements, rounded.
struct HalfPair {
    unsigned int pair;

    __device__ HalfPair(float low, float high) : HalfPair(ptx::pack_f16(low, high)) {}
    __device__ explicit HalfPair(unsigned int pair) : pair(pair) {}
    __device__ float low() const { return to_acc(float16{static_cast<unsigned short>(pair)}); }
    __device__ float high() const {
        return to_acc(float16{static_cast<unsigned short>(pair >> 16)});
    }
};

// Some columns of a row of the caller's array: zeros past the end of the row or of the rows.
template <int Dims>
struct RowPiece {
    static constexpr int kCols = kPieceCols<Dims>;
    float x[kCols];

    RowPiece() = default;
    __device__ RowPiece(const Matrix<const float>& rows, int row, int count, int col) {
        constexpr int kChunk = min_of(kChunkOfRow<float, Dims>, kCols);
        using Chunk = Pack<float, kChunk>;
#pragma unroll
        for (int c = 0; c < kCols; c += kChunk) {
            Chunk chunk = {};
            if (row < count && col + c < Dims)
                chunk = *reinterpret_cast<const Chunk*>(rows.row(row) + col + c);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) x[c + i] = chunk[i];
        }
    }

    // The largest finite magnitude in the row. All threads of the row must call this.
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

    // Writes the piece times `factor` as halves, up to the columns that a product's last step
    // takes.
    template <class Tile>
    __device__ void write(Tile& tile, int row, int col, float factor) const {
        using Words = Pack<unsigned int, kCols / 2>;
        if (col >= round_up(Dims, kWgmmaK)) return;
        Words large, small;
#pragma unroll
        for (int i = 0; i < kCols; i += 2) {
            const float low = factor == 0 ? 0 : x[i] * factor;
            const float high = factor == 0 ? 0 : x[i + 1] * factor;
            const HalfPair halves(large_part(low), large_part(high));
            large[i / 2] = halves.pair;
            small[i / 2] = ptx::pack_f16(low - halves.low(), high - halves.high());
        }
        *reinterpret_cast<Words*>(tile.at(row, col)) = large;
        if (kHalves > 1)
            *reinterpret_cast<Words*>(tile.at(row + Tile::kRows / kHalves, col)) = small;
    }

  private:
    // The small part takes NaN and infinity. In the large part, infinity times a small part that is
    // 0 would be NaN.
    __device__ static float large_part(float x) {
        if (kHalves == 1 || is_finite(x)) return x;
        return copysignf(1 << kTopExponent, x);
    }
};
