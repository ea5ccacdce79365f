// Rows of Q in 16 bits as products with keys of 8 take them: as float16, which those become, and
// with their columns in the order of OperandsOf<float8_e4m3fn>.
//
// bfloat16 has more exponents than float16. So each row is multiplied with a power of two that
// takes its largest number to float16's largest exponent, and products with the inverse. Numbers
// so much smaller than that one that they lose bits are less than what float32 sums lose.
#pragma once

#include "mma/mma_tiles.cuh"

// That which takes a number to float16's largest exponent, if it is one of float32.
struct PowerToHalf {
    float factor, inverse;

    __device__ explicit PowerToHalf(float number) {
        constexpr int kBias = 127, kLargest = 15, kMantissaBits = 23;
        const int exponent = __float_as_int(number) >> kMantissaBits;
        // Below that the factor would be none.
        const int up = kBias + kLargest - max(exponent, kLargest + 1);
        factor = __int_as_float((kBias + up) << kMantissaBits);
        inverse = __int_as_float((kBias - up) << kMantissaBits);
    }
};

// The powers of two of a tile's rows; of a tile that stays as it is, nothing.
template <int Rows, bool Used>
struct HalfQueries {
    // What products with a row are to be multiplied with.
    __device__ float unit(int row) const { return units[row]; }

    // Makes float16 of a tile that is there. The whole block takes part.
    template <int Threads, class Tile>
    __device__ void make(Tile& tile) {
        constexpr int kRunCols = 16;  // whose order changes
        constexpr int kRuns = Tile::kCols / kRunCols;
        constexpr int kLanes = min_of(floor_power_of_two(kRuns), 32);  // that share a row
        constexpr int kLaneRuns = ceil_div(kRuns, kLanes);
        static_assert(Rows % (32 / kLanes) == 0, "all lanes of a warp have rows, or none");
        const int lane = threadIdx.x % kLanes;
        for (int row = threadIdx.x / kLanes; row < Rows; row += Threads / kLanes) {
            Run<Tile> runs[kLaneRuns];
            float largest = 0;
#pragma unroll
            for (int i = 0; i < kLaneRuns; ++i) {
                const int run = i * kLanes + lane;
                if (run < kRuns) largest = max(largest, runs[i].load(tile, row, run * kRunCols));
            }
            const PowerToHalf power(lanes_max<kLanes>(largest));
            if (lane == 0) units[row] = power.inverse;
#pragma unroll
            for (int i = 0; i < kLaneRuns; ++i) {
                const int run = i * kLanes + lane;
                if (run < kRuns) runs[i].store(tile, row, run * kRunCols, power.factor);
            }
        }
        __syncthreads();
    }

  private:
    // Columns of a row as they lie, and as pairs of which every second one comes first.
    template <class Tile>
    struct Run {
        static constexpr int kHalfCols = Tile::kMatrixCols;
        Pack<scalar_t, kHalfCols> halves[2];

        // The largest of their magnitudes.
        __device__ float load(const Tile& tile, int row, int col) {
            float largest = 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const scalar_t* const from = tile.at(row, col + half * kHalfCols);
                halves[half] = *reinterpret_cast<const Pack<scalar_t, kHalfCols>*>(from);
#pragma unroll
                for (int e = 0; e < kHalfCols; ++e)
                    largest = max(largest, fabsf(to_acc(halves[half][e])));
            }
            return largest;
        }
        __device__ void store(Tile& tile, int row, int col, float factor) const {
            using Pairs = Pack<unsigned int, kHalfCols / 2>;
            Pairs pairs[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < kHalfCols; e += 2) {
                    const auto number = [&](int i) { return to_acc(halves[half][i]) * factor; };
                    const int pair = (half * kHalfCols + e) / 2;
                    pairs[pair % 2][pair / 2] = ptx::pack_f16(number(e), number(e + 1));
                }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                scalar_t* const to = tile.at(row, col + half * kHalfCols);
                *reinterpret_cast<Pairs*>(to) = pairs[half];
            }
        }
    };

    float units[Rows];
};
template <int Rows>
struct HalfQueries<Rows, false> {
    __device__ static float unit(int) { return 1; }
    template <int Threads, class Tile>
    __device__ void make(Tile&) {}
};
