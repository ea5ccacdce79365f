// Partial results of a tile of queries whose keys are split among blocks. The block with the last
// part merges all others into its own, or a launch of its own merges all (merged_parts.cuh):
// exactly (Milakov and Gimelshein 2018, section 3.1), and always in the same order, so that every
// run gives the same bits. Where blocks merge, parts are handed out in order, so that a block only
// waits for blocks that have begun.
#pragma once

#include "hopper/forward/wgmma_forward_block.cuh"

// How sums of a thread's two rows are joined with those of another part.
struct JoiningRows {
    float shrink[2], weight[2];

    // Joins the softmax of the other part with `joined`.
    __device__ JoiningRows(RowPair& joined, const RowPair& other) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& row = joined.rows[half];
            shrink[half] = row.raise_max(other.rows[half].max);
            weight[half] = exp2_of(other.rows[half].max - row.shift());
            row.sum += other.rows[half].sum * weight[half];
        }
    }
    __device__ float join(float sum, float other, int half) const {
        return sum * shrink[half] + other * weight[half];
    }
};

// A warpgroup's sums of O, laid out by thread. Dims are their columns.
template <int Dims>
struct SumsOfPart {
    using Four = Pack<float, 4>;
    Four sums[Dims / 8][kWarpgroup];

    __device__ void write(const WgmmaSums<Dims>& o) {
#pragma unroll
        for (int i = 0; i < Dims / 8; ++i)
            sums[i][threadIdx.x % kWarpgroup] = {o[4 * i], o[4 * i + 1], o[4 * i + 2],
                                                 o[4 * i + 3]};
    }
};

// The result of a warpgroup.
template <int Dims>
struct alignas(16) RowsOfPart : SumsOfPart<Dims> {
    using typename SumsOfPart<Dims>::Four;
    using SumsOfPart<Dims>::sums;
    RowPair softmax[kWarpgroup];

    __device__ void write(const WgmmaSums<Dims>& o, const RowPair& found) {
        SumsOfPart<Dims>::write(o);
        softmax[threadIdx.x % kWarpgroup] = found;
    }

    __device__ void add_to(WgmmaSums<Dims>& o, RowPair& joined) const {
        const int thread = threadIdx.x % kWarpgroup;
        const JoiningRows rows(joined, softmax[thread]);
#pragma unroll
        for (int i = 0; i < Dims / 8; ++i) {
            const Four four = sums[i][thread];
#pragma unroll
            for (int e = 0; e < 4; ++e) o[4 * i + e] = rows.join(o[4 * i + e], four[e], e / 2);
        }
    }
};

// Whether `work` is one of several parts of a tile. A vote tells the compiler that all lanes take
// the same branch.
__device__ inline bool holds_part(const WorkTile& work) {
    return __any_sync(0xffffffffu, work.is_part());
}

// All parts, in the workspace after the count of tiles taken: first how many parts of each tile are
// written, then the parts.
template <int Dims>
struct KeyParts {
    unsigned int (*there)[kConsumers];  // a tile's count is at its first part
    RowsOfPart<Dims> (*rows)[kConsumers];
    int count;

    __device__ explicit KeyParts(const ForwardParams& call)
        : count(call.parting.count - call.parting.whole) {
        unsigned char* const begin =
            static_cast<unsigned char*>(call.workspace) + kWorkspaceAlignment;
        there = reinterpret_cast<unsigned int (*)[kConsumers]>(begin);
        rows = reinterpret_cast<RowsOfPart<Dims>(*)[kConsumers]>(
            begin + round_up(count * static_cast<int>(sizeof *there), kWorkspaceAlignment));
    }

    // Called by all threads of one block.
    template <int Threads>
    __device__ void clear_counts() const {
        for (int i = threadIdx.x; i < count; i += Threads)
            for (unsigned int& of_warpgroup : there[i]) of_warpgroup = 0;
    }

    // Writes a warpgroup's part of a tile or, if it is the last part, merges all others into it.
    // Returns whether it is the last. Votes tell the compiler that a warp's lanes take the same
    // branch.
    __device__ bool join(WgmmaSums<Dims>& o, RowPair& softmax, const WorkTile& work,
                         int warpgroup) const {
        const int others = uniform(work.parts) - 1, barrier = kFirstStore + warpgroup;
        const bool first_warp = __any_sync(0xffffffffu, threadIdx.x % kWarpgroup < 32);
        unsigned int& left = there[work.first_part][warpgroup];
        if (__any_sync(0xffffffffu, work.part < others)) {
            rows[work.first_part + work.part][warpgroup].write(o, softmax);
            ptx::named_barrier_sync<kWarpgroup>(barrier);
            if (first_warp && ptx::elect_lane()) ptx::add_release(&left, 1);
            return false;
        }
        const Watchdog watchdog;
        const auto some_missing = [&] {
            return threadIdx.x % 32 == 0 && ptx::load_acquire(&left) < others;
        };
        while (first_warp && __any_sync(0xffffffffu, some_missing()))
            watchdog.check("parts", others, &left, Caller::here());
        ptx::named_barrier_sync<kWarpgroup>(barrier);
#pragma unroll 1
        for (int part = 0; part < others; ++part)
            rows[work.first_part + part][warpgroup].add_to(o, softmax);
        return true;
    }
};

// The launch before, of one block: without a tile taken, and without a part written.
template <int Dims>
__device__ inline void clear_counts_of_parts(const Params& params) {
    ptx::let_next_launch_begin();
    if constexpr (kPartsKeys) {
        if (threadIdx.x == 0) *tiles_taken(params.call) = 0;
        KeyParts<Dims>(params.call).template clear_counts<kThreads>();
    }
}
