// What launches of the float32 backwards do around key_tiles, one block per tile: to_halves makes
// tiles of halves and the statistics of rows, and zeroes the sums of dQ, to which key_tiles adds;
// store_query_gradients stores these sums.
#pragma once

#include "call/columns.cuh"
#include "gradients/sink_gradient.cuh"
#include "hopper/float32/backward_tiles.cuh"

constexpr int kHalvingThreads = HALVING_THREADS;

// For a tile's largest element: smaller exponents are raised to the least; with larger ones,
// products of three elements would exceed floats.
constexpr int kLeastExponent = -80, kMostExponent = 40;
// How far the smallest row may be below the largest for all rows to keep all their bits.
constexpr int kMostSpread = 14;
// How far D of a row may be above that of others and above dO.
constexpr int kMostAboveOthers = 24;

// The sizes of a tile's rows.
struct RowSizes {
    float largest = 0, least = -negative_infinity();
    float nonfinite = 0;

    __device__ void take(const RowSizes& other) {
        largest = fmaxf(largest, other.largest);
        least = fminf(least, other.least);
        nonfinite = fmaxf(nonfinite, other.nonfinite);
    }
    __device__ void take_row(float size, bool finite) {
        take({size, size > 0 ? size : -negative_infinity(), finite ? 0.f : 1.f});
    }

    __device__ int exponent() const { return exponent_of<kLeastExponent>(largest); }
    __device__ Held held() const {
        if (exponent() > kMostExponent) return kNever;
        const bool alike = least >= largest * power_of_two(-kMostSpread);
        return alike && nonfinite == 0 ? kAlways : kUncut;
    }
};

struct HalvingSmem {
    RowSizes of_warps[2][kHalvingThreads / 32];
};

// A thread's elements of a tile.
template <int Rows, int Dims>
struct TilePieces {
    static constexpr int kAcross = kRowThreads<Dims>, kDown = kHalvingThreads / kAcross;
    static constexpr int kCount = Rows / kDown;
    static_assert(Rows % kDown == 0, "all threads have as many pieces");

    RowPiece<Dims> pieces[kCount];

    __device__ TilePieces(const Matrix<const float>& from, int count) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) pieces[i] = RowPiece<Dims>(from, row(i), count, col());
    }
    __device__ static int row(int i) { return i * kDown + threadIdx.x / kAcross; }
    __device__ static int col() { return threadIdx.x % kAcross * kPieceCols<Dims>; }

    // Writes them as halves of one unit. The whole block takes part. `others_finite` is false if
    // other numbers of a row are NaN or infinite.
    template <class Tile>
    __device__ TileUnit write(Tile& to, RowSizes (&of_warps)[kHalvingThreads / 32],
                              bool others_finite = true) const {
        RowSizes sizes;
        sizes.nonfinite = !others_finite;
#pragma unroll
        for (const RowPiece<Dims>& piece : pieces)
            sizes.take_row(piece.largest_of_row(), piece.row_is_finite());
#pragma unroll
        for (int lane = kAcross; lane < 32; lane *= 2) {
            sizes.take({__shfl_xor_sync(0xffffffffu, sizes.largest, lane),
                        __shfl_xor_sync(0xffffffffu, sizes.least, lane),
                        __shfl_xor_sync(0xffffffffu, sizes.nonfinite, lane)});
        }
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sizes;
        __syncthreads();
#pragma unroll
        for (const RowSizes& others : of_warps) sizes.take(others);
        const int unit = sizes.exponent() - kTopExponent;
#pragma unroll
        for (int i = 0; i < kCount; ++i) pieces[i].write(to, row(i), col(), power_of_two(-unit));
        return {power_of_two(unit), sizes.held()};
    }
};

using OutPieces = TilePieces<kBlockM, kValueDim>;

// Writes the LSE and D of a tile's rows; `first` is the index of the first row in the LSE. Returns
// whether D is finite in the rows of which this thread has pieces.
__device__ inline bool write_statistics(Statistics& to, const BackwardParams& call,
                                        const OutPieces& dout, const OutPieces& out,
                                        long long first, int count) {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < OutPieces::kCount; ++i) {
        float d = 0;
#pragma unroll
        for (int e = 0; e < kPieceCols<kValueDim>; ++e)
            d += dout.pieces[i].x[e] * out.pieces[i].x[e];
        d = lanes_sum<OutPieces::kAcross>(d);
        const int row = OutPieces::row(i);
        float lse = negative_infinity();
        if (row < count) {
            lse = static_cast<const float*>(call.lse)[first + row];
            if (call.dlse) d -= static_cast<const float*>(call.dlse)[first + row];
        }
        finite &= is_finite(d);
        if (OutPieces::col() > 0) continue;
        const bool sees = lse != negative_infinity();
        to.lse_log2[row] = sees ? lse * float(kLog2E) : -negative_infinity();
        to.d[row] = d;
    }
    return finite;
}

// Whether D of a row is so large, as by the gradient of its LSE, that one unit for the tile's dS
// would leave other rows no bits. If it is infinite in all rows, there is nothing to lose. Called
// by a warp once D and the unit of dO are there.
__device__ inline bool dwarfs_others(const Statistics& rows) {
    float largest = 0, least = -negative_infinity();
    for (int row = threadIdx.x % 32; row < kBlockM; row += 32) {
        const float size = fabsf(rows.d[row]);
        largest = fmaxf(largest, size);
        if (size > 0) least = fminf(least, size);
    }
    const float most = lanes_max<32>(largest) * power_of_two(-kMostAboveOthers);
    const float largest_dout = rows.dout.size * (2 << kTopExponent);  // or half of it
    return -lanes_max<32>(-least) < most && largest_dout < most;
}

__device__ inline void halve_queries(const BackwardParams& call, HalvingSmem& smem, int head,
                                     int tile) {
    const Sizes& sizes = call.sizes;
    const RowTile place =
        row_tile<kBlockM>(tile, sizes.batch, sizes.seqlen_q, call.features.cu_seqlens_q);
    const Sequence sequence(call, place.batch);
    const int first_row = place.first_row, count = min(sequence.seqlen_q - first_row, kBlockM);
    QueryHalves& to = Workspace(call).queries(head, tile);
    const auto rows_of = [&](const Tensor& tensor) {
        return sequence.queries<const float>(tensor, head).from(first_row);
    };

    const OutPieces dout(rows_of(call.dout), count), out(rows_of(call.o), count);
    const long long first = sequence.first_row(head, sizes) + first_row;
    const bool finite = write_statistics(to.statistics, call, dout, out, first, count);
    const TileUnit of_dout = dout.write(to.dout, smem.of_warps[0], finite);
    using QueryPieces = TilePieces<kBlockM, kHeadDim>;
    const TileUnit of_q = QueryPieces(rows_of(call.q), count).write(to.q, smem.of_warps[1]);
    if (threadIdx.x == 0) {
        to.statistics.q = of_q;
        to.statistics.dout = of_dout;
        to.statistics.tile = &to;
        to.statistics.first_row = first_row;
        to.statistics.left_to_exact = false;
        const int unseen = sequence.mask(call.features).first_key(first_row) / kBlockN;
        to.additions = unseen * kAdders;
    }
    for (int i = threadIdx.x; i < QuerySums::kCount; i += kHalvingThreads) to.dq.quads[i] = {};
    if (threadIdx.x >= 32) return;
    __syncwarp();
    if (dwarfs_others(to.statistics) && threadIdx.x == 0) to.statistics.dout.held = kNever;
}

__device__ inline void halve_keys(const BackwardParams& call, HalvingSmem& smem, int kv_head,
                                  int tile) {
    const Sizes& sizes = call.sizes;
    const auto [batch, first_key] =
        row_tile<kBlockN>(tile, sizes.batch, sizes.seqlen_k, call.features.cu_seqlens_k);
    const Sequence sequence(call, batch);
    const int count = min(sequence.seqlen_k - first_key, kBlockN);
    const auto k = sequence.keys<const float>(call.k, kv_head).from(first_key);
    const auto v = sequence.keys<const float>(call.v, kv_head).from(first_key);
    KeyHalves& to = Workspace(call).keys(kv_head, tile);
    const TileUnit of_k = TilePieces<kBlockN, kHeadDim>(k, count).write(to.k, smem.of_warps[0]);
    const TileUnit of_v = TilePieces<kBlockN, kValueDim>(v, count).write(to.v, smem.of_warps[1]);
    if (threadIdx.x == 0) to.units = {of_k, of_v};
}

__device__ inline void halve_tile(const BackwardParams& call, HalvingSmem& smem) {
    const Workspace workspace(call);
    const int of_queries = call.sizes.heads * workspace.query_tiles;
    const int block = blockIdx.x, tile = block - of_queries;
    if (tile < 0) {
        halve_queries(call, smem, block / workspace.query_tiles, block % workspace.query_tiles);
    } else {
        halve_keys(call, smem, tile / workspace.key_tiles, tile % workspace.key_tiles);
    }
}

// Stores the sums of a tile's dQ.
__device__ inline void store_queries(const BackwardParams& call) {
    const int tiles = Workspace(call).query_tiles;
    const int head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const RowTile place =
        row_tile<kBlockM>(tile, call.sizes.batch, call.sizes.seqlen_q, call.features.cu_seqlens_q);
    const Sequence sequence(call, place.batch);
    const int count = min(sequence.seqlen_q - place.first_row, kBlockM);
    const auto dq = sequence.queries<float>(call.dq, head).from(place.first_row);
    const QuerySums& from = Workspace(call).queries(head, tile).dq;
    for (int i = threadIdx.x; i < QuerySums::kCount; i += kHalvingThreads) {
        const QuerySums::Quad sums = from.quads[i];
        // Of the first sum in the product.
        const int row = i % kWarpgroup / 32 * 16 + i % 32 / 4;
        const int col = i / kWarpgroup * 8 + i % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Pack<float, 2> pair = {sums[2 * half], sums[2 * half + 1]};
            if constexpr (QuerySums::kTransposed) {
                const int query = col % kBlockM, dim = col / kBlockM * kPanelCols + row + half * 8;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const Pack<float, 1> sum = {pair[e]};
                    if (query + e < count) write_columns<kHeadDim>(dq.row(query + e), sum, dim);
                }
            } else {
                const int query = row + half * 8;
                if (query < count) write_columns<kHeadDim>(dq.row(query), pair, col);
            }
        }
    }
}

__device__ inline void sum_up_sink(const BackwardParams& call, WarpSums<kHalvingThreads>& smem) {
    const Workspace workspace(call);
    const auto stats_of = [&](const Sequence& sequence, int head, int row) -> RowStats {
        const Statistics& rows = workspace.queries_from(sequence, head, row).statistics;
        return {rows.lse_log2[row % kBlockM], rows.d[row % kBlockM]};
    };
    write_sink_gradient<kHalvingThreads>(call, stats_of, smem);
}
