// 16-bit rows of Q in the form that products with 8-bit keys need: float16, as the keys become, in
// units of a power of two (half_range.cuh), with columns in the order of
// OperandsOf<float8_e4m3fn>.
#pragma once

#include "call/half_range.cuh"
#include "mma/mma_products.cuh"

// The powers of two of a tile's rows; nothing for a tile that is not converted.
template <int Rows, bool Used>
struct HalfQueries {
    // The factor of products with a row.
    __device__ float unit(int row) const { return units[row]; }

    // Converts a tile in shared memory to float16. The whole block takes part.
    template <int Threads, class Tile>
    __device__ void make(Tile& tile) {
        constexpr int kRunCols = 16;  // that are reordered
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
    // Columns of a row in order; `store` writes every second pair first, then the others.
    template <class Tile>
    struct Run {
        static constexpr int kHalfCols = Tile::kMatrixCols;
        Pack<scalar_t, kHalfCols> halves[2];

        // Returns the largest magnitude.
        __device__ float load(const Tile& tile, int row, int col) {
            float largest = 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const scalar_t* const from = tile.at(row, col + half * kHalfCols);
                halves[half] = *reinterpret_cast<const Pack<scalar_t, kHalfCols>*>(from);
                take_largest(largest, halves[half]);
            }
            return largest;
        }
        __device__ void store(Tile& tile, int row, int col, float factor) const {
            using Pairs = Pack<unsigned int, kHalfCols / 2>;
            Pairs pairs[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Pairs in_order = float16_pairs(halves[half], factor);
#pragma unroll
                for (int i = 0; i < kHalfCols / 2; ++i) {
                    const int pair = half * (kHalfCols / 2) + i;
                    pairs[pair % 2][pair / 2] = in_order[i];
                }
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
