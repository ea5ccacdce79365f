// Queries beside keys that are widened to float16: as they were copied, if they are in float16;
// converted where they lie, if in bfloat16; loaded and widened like keys, if in 8 bits.
#pragma once

#include "call/half_range.cuh"
#include "hopper/forward/widened_rows.cuh"

using query_t = QUERY_SCALAR;  // scalar_t is the type of products, if keys are widened
constexpr bool kCopiesQueries = sizeof(query_t) == 2;
constexpr bool kScalesQueries = kWidensKeys && is_bfloat16<query_t>;

// The units of a tile's rows, powers of two by which products with them are multiplied
// (half_range.cuh).
template <bool Scaled>
struct QueryUnits {
    float units[kWgmmaM];

    // Converts a tile of queries. A warpgroup calls it, of which eight lanes share a row.
    __device__ void scale(QueryRows& q) {
        constexpr int kRowLanes = kPanelRowBytes / kChunkBytes;
        // Panels: the first keys, which are on their way, take most registers.
        constexpr int kAtOnce = 3;
        const int col = threadIdx.x % kRowLanes * kChunkCols;
        using Chunk = Pack<query_t, kChunkCols>;
        const auto chunk = [&](int row, int panel) {
            return reinterpret_cast<Chunk*>(q.at(row, panel * kPanelCols + col));
        };
#pragma unroll 1
        for (int row = threadIdx.x / kRowLanes; row < kWgmmaM; row += kWarpgroup / kRowLanes) {
            float largest = 0;
#pragma unroll kAtOnce
            for (int panel = 0; panel < QueryRows::kPanels; ++panel)
                take_largest(largest, *chunk(row, panel));
            const PowerToHalf power(lanes_max<kRowLanes>(largest));
            if (threadIdx.x % kRowLanes == 0) units[row] = power.inverse;
#pragma unroll kAtOnce
            for (int panel = 0; panel < QueryRows::kPanels; ++panel)
                *reinterpret_cast<WideCols*>(chunk(row, panel)) =
                    float16_pairs(*chunk(row, panel), power.factor);
        }
    }

    // Undoes the factors in a thread's products.
    __device__ void unscale(Scores& s) const {
        const int row = row_of_thread();
        const float of_rows[] = {units[row], units[row + 8]};
        rescale(s, of_rows);
    }
};
template <>
struct QueryUnits<false> {
    __device__ void scale(QueryRows&) {}
    __device__ void unscale(Scores&) const {}
};

// Loads a tile of queries in 8 bits, and widens it.
__device__ inline void widen_queries(QueryRows& q, const Params& params, const WorkTile& work) {
    const Sequence sequence = work.sequence(params.call);
    const auto queries = sequence.queries<const float8_e4m3fn>(params.call.q, work.head);
    RowWidener<QueryRows> widener;
#pragma unroll
    for (int unit = 0; unit < widener.kUnits; ++unit) {
        const int row = work.first_row + widener.row_of(unit);
        widener.load(unit, row < sequence.seqlen_q ? queries.row(row) : nullptr);
    }
    widener.write(q);
}
