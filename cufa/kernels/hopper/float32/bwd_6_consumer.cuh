// What a warpgroup of bwd_6_float32 does with a tile of queries and the block's keys: the verbs of
// the main loop.
#pragma once

#include "call/columns.cuh"
#include "hopper/float32/bwd_6_block.cuh"
#include "hopper/float32/key_scores.cuh"

// Named barriers; __syncthreads has number 0.
enum NamedBarrier { kAllConsumers = 1, kAllWhoRead, kFirstOfWarpgroup };
// Each consumer has a warp that sends out its part of dQ.
constexpr int kConsumersAndSenders = kConsumers * (kWarpgroup + 32);

// Whether the next part of a tile's gradients is computed while one is added.
constexpr bool kPartsAhead = PARTS_AHEAD;
// Whether the product for dK also takes dS from shared memory, as that for dQ does. With both
// operands from shared memory, 64 columns are too few to be fast.
constexpr bool kSharesGradients = SHARES_GRADIENTS;
constexpr int kHeadPartCols = (kSharesGradients ? 2 : 1) * kPanelCols;

// The parts of what a tile adds to gradients, each its own product: first the parts of dV, then of
// dK, then of dQ.
constexpr int kValueParts = ceil_div(kDims, kPanelCols);
constexpr int kHeadParts = ceil_div(kDepth, kHeadPartCols);
constexpr int kFirstOfQueries = kValueParts + kHeadParts, kPartCount = kFirstOfQueries + kHeadParts;
__device__ constexpr int first_col_of(int part) {
    if (part < kValueParts) return part * kPanelCols;
    return (part - kValueParts) % kHeadParts * kHeadPartCols;
}
__device__ constexpr int cols_of(int part) {
    if (part < kValueParts) return min_of(kPanelCols, kDims - first_col_of(part));
    return min_of(kHeadPartCols, kDepth - first_col_of(part));
}

using Scores = WgmmaSums<kBlockM>;
using Weights = WgmmaOperand<kBlockM>;

// A consumer.
struct Consumer : KeyScores<kBlockM> {
    Smem& smem;
    const int warpgroup;

    RingPosition<kStages> at;
    WgmmaSums<kDepth> dk = {};  // before the softmax's scale
    WgmmaSums<kDims> dv = {};   // without the scale of kept probabilities

    __device__ Consumer(Smem& smem, const BackwardParams& call, const KeyTile& work, int warpgroup)
        : KeyScores<kBlockM>(call, work), smem(smem), warpgroup(warpgroup) {
        note_seeing(smem.seeing[warpgroup]);
    }

    __device__ const Statistics& rows() const { return smem.statistics[warpgroup][at.stage]; }
    __device__ const QueryRows& q() const { return smem.queries[warpgroup][at.stage].rows.q; }
    __device__ const OutRows& dout() const { return smem.queries[warpgroup][at.stage].rows.dout; }

    __device__ void wait_for_keys() { wait_for(smem.keys_full, 0, 0); }
    __device__ void wait_for_queries() { smem.q_rings[warpgroup].wait_full(at); }
    __device__ void wait_for_dout() { smem.dout_rings[warpgroup].wait_full(at); }
    __device__ void release_dout() {
        if (!QueryStage::kSumsTakeDout) release(smem.dout_rings[warpgroup], at);
    }
    // Releases the stage of queries, in which their dQ now lies.
    __device__ void release_queries() {
        ptx::proxy_fence();  // what was read of the statistics is in registers
        release(smem.q_rings[warpgroup], at);
        if (QueryStage::kSumsTakeDout) release(smem.dout_rings[warpgroup], at);
    }
    // Leaves a tile to exact_tiles.
    __device__ void leave_to_exact() {
        if (threadIdx.x % kWarpgroup == 0)
            smem.statistics[warpgroup][at.stage].left_to_exact = true;
        release_dout();
        release_queries();
    }

    __device__ void meet_warpgroup() const {
        ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + warpgroup);
    }

    // Issues dP^T = V dO^T, in units of halves.
    __device__ void issue_weight_gradients(Scores& dp) {
        issue_halves<kDims, kBlockM>(dp, DepthInColumns(smem.v), DepthInColumns(dout()));
    }

    // S^T = K Q^T, in units of halves; afterwards dP^T is there, too.
    __device__ void make_scores(Scores& s) {
        issue_halves<kDepth, kBlockM>(s, DepthInColumns(smem.k), DepthInColumns(q()));
        wait_product<0>(s);
    }

    // P^T and dS^T of a tile, from S^T and dP^T.
    template <class Walk>
    __device__ void differentiate(Scores& s, Scores& dp, const Walk& walk) const {
        KeyScores::differentiate(s, dp, rows(), smem.units, smem.seeing[warpgroup], walk);
    }

    // Makes operands of both, and shares dS^T. Returns the exponent of its unit.
    __device__ int make_operands(Weights (&p)[kHalves], Weights (&ds)[kHalves],
                                 const Scores& weights, const Scores& gradients) {
        // All meet, so all products that read the shared dS are done.
        const int exponent = KeyScores::make_operands(
            p, ds, weights, gradients, smem.largest[warpgroup], kFirstOfWarpgroup + warpgroup);
        share(ds);
        return exponent;
    }

    // dV += P^T dO and dK += dS^T Q; the tile's part of dQ, dS K, replaces its queries.
    __device__ void add_gradients(const Weights (&p)[kHalves], const Weights (&ds)[kHalves],
                                  int exponent) {
        WgmmaSums<cols_of(0)> first;
        issue_part<0>(first, p, ds);
        add_parts<0>(first, p, ds, exponent);
    }

    // Hands in the warpgroup's sums of the gradients of the keys.
    __device__ void hand_in() const {
        // Nobody reads the tiles there any more.
        ptx::named_barrier_sync<kConsumersAndSenders>(kAllWhoRead);
        KeySums& to = smem.sums()[warpgroup];
        write_sums<kDepth>(to.dk, dk);
        write_sums<kDims>(to.dv, dv);
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
    }

  private:
    template <int Part>
    __device__ void issue_part(WgmmaSums<cols_of(Part)>& sums, const Weights (&p)[kHalves],
                               const Weights (&ds)[kHalves]) {
        constexpr int kCols = cols_of(Part), kPanel = first_col_of(Part) / kPanelCols;
        if constexpr (Part == kValueParts) {
            ptx::proxy_fence();
            meet_warpgroup();  // dS^T is there
        }
        if constexpr (Part < kValueParts) {
            issue_halves<kBlockM, kCols>(sums, InRegisters<kBlockM>{p},
                                         DepthInRows(dout(), kPanel));
        } else if constexpr (Part >= kFirstOfQueries) {
            issue_halves<kBlockN, kCols>(sums, DepthInRows(smem.ds[warpgroup]),
                                         DepthInRows(smem.k, kPanel));
        } else if constexpr (kSharesGradients) {
            issue_halves<kBlockM, kCols>(sums, DepthInColumns(smem.ds[warpgroup]),
                                         DepthInRows(q(), kPanel));
        } else {
            issue_halves<kBlockM, kCols>(sums, InRegisters<kBlockM>{ds}, DepthInRows(q(), kPanel));
        }
    }
    template <int Part>
    __device__ void add_part(const WgmmaSums<cols_of(Part)>& sums, int exponent) {
        constexpr int kCols = cols_of(Part), kCol = first_col_of(Part);
        if constexpr (Part < kValueParts) {
            const float unit = rows().dout.size * (1.f / (1 << kTopWeight));
#pragma unroll
            for (int i = 0; i < kCols / 2; ++i) dv[kCol / 2 + i] += sums[i] * unit;
            if constexpr (Part == kValueParts - 1) release_dout();
        } else if constexpr (Part < kFirstOfQueries) {
            const float unit = rows().q.size * power_of_two(exponent);
#pragma unroll
            for (int i = 0; i < kCols / 2; ++i) dk[kCol / 2 + i] += sums[i] * unit;
        } else {
            const float unit = smem.units.k.size * call.softmax_scale * power_of_two(exponent);
            // No product reads queries any more.
            if constexpr (Part == kFirstOfQueries) meet_warpgroup();
            QuerySums& to = smem.queries[warpgroup][at.stage].dq;
#pragma unroll
            for (int i = 0; i < kCols / 2; i += 4) {
                to.quads[(kCol / 8 + i / 4) * kWarpgroup + threadIdx.x % kWarpgroup] = {
                    sums[i] * unit, sums[i + 1] * unit, sums[i + 2] * unit, sums[i + 3] * unit};
            }
        }
    }
    // Adds a part whose product is under way, and the parts after it.
    template <int Part>
    __device__ void add_parts(WgmmaSums<cols_of(Part)>& sums, const Weights (&p)[kHalves],
                              const Weights (&ds)[kHalves], int exponent) {
        if constexpr (Part + 1 == kPartCount) {
            wait_product<0>(sums);
            add_part<Part>(sums, exponent);
        } else {
            WgmmaSums<cols_of(Part + 1)> next;
            if constexpr (kPartsAhead) {
                issue_part<Part + 1>(next, p, ds);
                wait_product<1>(sums);
                add_part<Part>(sums, exponent);
            } else {
                wait_product<0>(sums);
                add_part<Part>(sums, exponent);
                issue_part<Part + 1>(next, p, ds);
            }
            add_parts<Part + 1>(next, p, ds, exponent);
        }
    }

    __device__ void share(const Weights (&halves)[kHalves]) {
#pragma unroll
        for (int part = 0; part < kHalves; ++part)
            write_rows<kBlockM>(smem.ds[warpgroup], halves[part], part * kBlockN + warp_row);
    }

    template <int Dims>
    __device__ void write_sums(SumRows<Dims>& to, const WgmmaSums<Dims>& sums) const {
#pragma unroll
        for (int i = 0; i < Dims / 2; i += 2) {
            float* const pair = &to[first_row + i / 2 % 2 * 8][col_of(i / 4, 0)];
            *reinterpret_cast<Pack<float, 2>*>(pair) = {sums[i], sums[i + 1]};
        }
    }
};

// Stores rows of the sum over warpgroups, by all their threads.
template <int TensorDims, int Dims>
__device__ inline void store_rows(const Matrix<float>& rows, int count, const Smem::Sums& sums,
                                  SumRows<Dims> KeySums::* which, float scale) {
    using Chunk = Pack<float, 4>;
    constexpr int kAcross = Dims / 4;
    for (int at = threadIdx.x - kWarpgroup; at < count * kAcross; at += kConsumers * kWarpgroup) {
        const int row = at / kAcross, col = at % kAcross * 4;
        Chunk sum = {};
#pragma unroll
        for (const KeySums& of_warpgroup : sums) {
            const auto& more = reinterpret_cast<const Chunk&>((of_warpgroup.*which)[row][col]);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += more[e] * scale;
        }
        write_columns<TensorDims>(rows.row(row), sum, col);
    }
}

__device__ inline void store_key_gradients(Smem& smem, const BackwardParams& call) {
    // Looked up again, so that it takes no registers in between.
    const KeyTile work = key_tile(call, ptx::anew(blockIdx.x));
    const int count = min(end_of_keys(call, work.sequence) - work.first_key, kBlockN);
    const auto rows_of = [&](const Tensor& tensor) {
        return work.sequence.keys<float>(tensor, work.kv_head).from(work.first_key);
    };
    const float scale = call.softmax_scale, of_kept = kept_scale(call.features);
    store_rows<kHeadDim, kDepth>(rows_of(call.dk), count, smem.sums(), &KeySums::dk, scale);
    store_rows<kValueDim, kDims>(rows_of(call.dv), count, smem.sums(), &KeySums::dv, of_kept);
}
