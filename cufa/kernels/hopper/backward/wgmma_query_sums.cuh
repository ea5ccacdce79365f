// The sums of a tile of dQ in global memory, in the layout of the warpgroups that add to them.
#pragma once

#include "hopper/backward/wgmma_key_work.cuh"
#include "hopper/wgmma_products.cuh"

// How a warpgroup's sums of a part of dQ lie in memory: in groups of four of a thread, those of a
// warp next to each other.
struct FoursOfThreads {
    // Adds a warpgroup's sums to a part in global memory, or sets it.
    template <int Count>
    __device__ static void add(float* part, const float (&sums)[Count], bool set) {
        float* fours = own_fours<Count>(part);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) {
            float* to = fours + i * 32 * 4;
            if (set) {
                *reinterpret_cast<Pack<float, 4>*>(to) = four_of(sums, i);
            } else {
                ptx::add_to_global(to, four_of(sums, i).v);
            }
        }
    }

    // Writes a warpgroup's sums in the layout of global memory.
    template <int Count>
    __device__ static void write(float* part, const float (&sums)[Count]) {
        unsigned int thread = threadIdx.x % kWarpgroup;
        ptx::hold(thread);  // or the address would stay in a register from tile to tile
        auto* fours = reinterpret_cast<Pack<float, 4>*>(part) + own_four<Count>(thread);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) fours[i * 32] = four_of(sums, i);
    }

    // Adds those of a part in global memory to a warpgroup's sums.
    template <int Count>
    __device__ static void collect(float (&sums)[Count], const float* part) {
        const float* fours = own_fours<Count>(part);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) {
            const auto four = *reinterpret_cast<const Pack<float, 4>*>(fours + i * 32 * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[4 * i + e] += four[e];
        }
    }

  protected:
    // The index of a thread's first four in a part, of Count sums a thread.
    template <int Count>
    __device__ static int own_four(int thread) {
        return thread / 32 * (Count / 4 * 32) + thread % 32;
    }
    // Writes two rounded elements of a row, if they exist.
    __device__ static void write_pair(const Matrix<scalar_t>& dq, int row, int col, int rows,
                                      unsigned int pair) {
        if (row >= rows || col >= kHeadDim) return;
        scalar_t* to = dq.row(row) + col;
        if (kHeadDim % 2 == 0 || col + 1 < kHeadDim) {
            *reinterpret_cast<unsigned int*>(to) = pair;
        } else {
            *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(pair);
        }
    }

  private:
    template <int Count>
    __device__ static Pack<float, 4> four_of(const float (&sums)[Count], int i) {
        return {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
    }
    template <int Count, class Float>
    __device__ static Float* own_fours(Float* part) {
        return part + own_four<Count>(threadIdx.x % kWarpgroup) * 4;
    }
};

// Where a sum of a tile belongs.
struct SumPlace {
    int query, dim;
};

// A tile of dQ^T in the layout of the warpgroups: parts that are panels of 64 dims by BlockM
// queries or, if Halved, halves of the last panel, each with half of the queries. A part has slabs
// of 16 dims, one of each warp. Dims that only pad a panel have no slab.
template <int BlockM, int Panels, bool Halved>
struct QuerySums : FoursOfThreads {
    static constexpr int kLargestPart = kPanelCols * BlockM;
    static constexpr int kSlabDims = kWgmmaM / (kWarpgroup / 32);
    static constexpr int kDims = round_up(kHeadDim, kSlabDims);
    static constexpr int kTile = kDims * BlockM;
    static constexpr bool kPadded = kDims != Panels * kPanelCols;

    struct Part {
        float* sums;
        int dims;  // that have slabs

        // Whether the warp has sums of them. If not, it must leave the part alone.
        __device__ bool has_own_slab() const {
            return !kPadded || static_cast<int>(threadIdx.x % kWarpgroup / 32) * kSlabDims < dims;
        }
    };
    __device__ static Part panel_of(float* tile, int panel) {
        return {tile + panel * kLargestPart, dims_of(panel)};
    }
    __device__ static Part half_of(float* tile, int half) {
        return {panel_of(tile, Panels - 1).sums + half * kHalfFours * 4, dims_of(Panels - 1)};
    }
    // The bytes of a panel's slabs, which follow each other.
    __device__ static int panel_bytes(int panel) {
        return dims_of(panel) * BlockM * static_cast<int>(sizeof(float));
    }
    // Whether a warpgroup has a part of a tile.
    __device__ static bool has_part(int, int, int) { return true; }

    // Where sum `e` of a four belongs.
    __device__ static SumPlace place_of(int four, int e = 0) {
        const bool in_half = Halved && four >= kFirstOfHalves;
        const int in_halves = four - kFirstOfHalves;
        const int in_part = in_half ? in_halves % kHalfFours : four;
        const int half = in_half ? in_halves / kHalfFours : 0;
        const int cols = in_half ? BlockM / 2 : BlockM, slab_fours = kSlabDims * cols / 4;
        const int first_dim = in_half ? (Panels - 1) * kPanelCols : 0;
        return {half * cols + in_part % slab_fours / 32 * 8 + four % 4 * 2 + e % 2,
                first_dim + in_part / slab_fours * kSlabDims + four % 32 / 4 + e / 2 * 8};
    }

    // Writes a part of dQ's first rows, rounded.
    template <int Count>
    __device__ static void round(const float* tile, const float* part, const float (&sums)[Count],
                                 const Matrix<scalar_t>& dq, int rows, float scale) {
        const int first_four =
            (part - tile) / 4 + own_four<Count>(threadIdx.x % kWarpgroup / 32 * 32);
        const auto [first_row, first_col] = place_of(first_four);
        const int row = first_row + threadIdx.x % 32 / 4;
        const int col = first_col + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            // Eight dims of eight queries become eight queries of eight dims.
            const unsigned int pair =
                ptx::transpose_matrix(round_pair(sums[2 * i] * scale, sums[2 * i + 1] * scale));
            write_pair(dq, row + i / 2 * 8, col + i % 2 * 8, rows, pair);
        }
    }

  private:
    static constexpr int kFirstOfHalves = (Panels - 1) * (kLargestPart / 4);
    static constexpr int kHalfFours = Halved ? (kTile / 4 - kFirstOfHalves) / 2 : 1;

    __device__ static int dims_of(int panel) {
        return min(max(kDims - panel * kPanelCols, 0), kPanelCols);
    }
};

// A tile of dQ, not transposed, all of which one warpgroup has: 64 queries, 16 of each warp. The
// warpgroups have tiles in turn.
struct WholeQuerySums : FoursOfThreads {
    static constexpr int kDims = round_up(kHeadDim, kWgmmaK);
    static constexpr int kTile = kDims * kWgmmaM;
    static constexpr int kLargestPart = kTile;

    struct Part {
        float* sums;
        __device__ static bool has_own_slab() { return true; }
    };
    __device__ static Part panel_of(float* tile, int) { return {tile}; }
    __device__ static Part half_of(float* tile, int) { return {tile}; }
    __device__ static int panel_bytes(int) { return kTile * static_cast<int>(sizeof(float)); }
    __device__ static bool has_part(int warpgroup, int head, int tile) {
        return (head + tile) % kConsumers == warpgroup;
    }

    __device__ static SumPlace place_of(int four, int e) {
        constexpr int kWarpFours = kDims / 8 * 32;
        return {four / kWarpFours * 16 + four % 32 / 4 + e / 2 * 8,
                four % kWarpFours / 32 * 8 + four % 4 * 2 + e % 2};
    }

    template <int Count>
    __device__ static void round(const float*, const float*, const float (&sums)[Count],
                                 const Matrix<scalar_t>& dq, int rows, float scale) {
        const int row = row_of_thread(), col = col_of_thread();
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            const unsigned int pair = round_pair(sums[2 * i] * scale, sums[2 * i + 1] * scale);
            write_pair(dq, row + i % 2 * 8, col + i / 2 * 8, rows, pair);
        }
    }
};
