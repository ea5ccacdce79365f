// Queries beside keys that are widened to float16: as they were copied, if they are in float16;
// converted where they lie, if in bfloat16; loaded and widened like keys, if in 8 bits.
#pragma once

#include "call/half_range.cuh"
#include "hopper/forward/widened_rows.cuh"

using query_t = QUERY_SCALAR;  // scalar_t is the type of products, if keys are widened
constexpr bool kCopiesQueries = sizeof(query_t) == 2;
constexpr bool kScalesQueries = kWidensKeys && is_bfloat16<query_t>;

// Some columns of a row in bfloat16, as pairs, which become pairs in float16.
struct BfloatCols {
    WideCols pairs;

    __device__ float number(int i) const {
        return to_acc(bfloat16{static_cast<unsigned short>(pairs[i / 2] >> i % 2 * 16)});
    }
    __device__ float largest() const {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < kChunkCols; ++i) largest = fmaxf(largest, fabsf(number(i)));
        return largest;
    }
    __device__ WideCols times(float factor) const {
        WideCols halves;
#pragma unroll
        for (int i = 0; i < kChunkCols; i += 2)
            halves[i / 2] = ptx::pack_f16(number(i) * factor, number(i + 1) * factor);
        return halves;
    }
};

// bfloat16 has more exponents than float16. So each row is multiplied by a power of two that brings
// its largest number to float16's largest exponent, and products by the inverse, the unit of the
// row. Numbers small enough to lose bits are below what float32 sums lose anyway.
template <bool Scaled>
struct QueryUnits {
    float units[kWgmmaM];

    // Converts a tile of queries. A warpgroup calls it, of which eight lanes share a row.
    __device__ void scale(QueryRows& q) {
        constexpr int kRowLanes = kPanelRowBytes / kChunkBytes;
        // Panels: the first keys, which are on their way, take most registers.
        constexpr int kAtOnce = 3;
        const int col = threadIdx.x % kRowLanes * kChunkCols;
        const auto cols = [&](int row, int panel) {
            return reinterpret_cast<WideCols*>(q.at(row, panel * kPanelCols + col));
        };
#pragma unroll 1
        for (int row = threadIdx.x / kRowLanes; row < kWgmmaM; row += kWarpgroup / kRowLanes) {
            float largest = 0;
#pragma unroll kAtOnce
            for (int panel = 0; panel < QueryRows::kPanels; ++panel)
                largest = fmaxf(largest, BfloatCols{*cols(row, panel)}.largest());
            const PowerToHalf power(lanes_max<kRowLanes>(largest));
            if (threadIdx.x % kRowLanes == 0) units[row] = power.inverse;
#pragma unroll kAtOnce
            for (int panel = 0; panel < QueryRows::kPanels; ++panel)
                *cols(row, panel) = BfloatCols{*cols(row, panel)}.times(power.factor);
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
