// What a warpgroup of bwd_6_float32 does with a tile of queries and the block's keys: the verbs of
// the loop there.
#pragma once

#include "call/columns.cuh"
#include "hopper/float32/bwd_6_block.cuh"
#include "hopper/float32/half_products.cuh"

// Barriers of parts of the block; __syncthreads has number 0.
enum NamedBarrier { kAllConsumers = 1, kAllWhoRead, kFirstOfWarpgroup };
// Each has a warp that sends out what it adds to dQ.
constexpr int kConsumersAndSenders = kConsumers * (kWarpgroup + 32);

// A probability is at most 1, and its halves are of so many times as much.
constexpr int kTopWeight = 14;
// Smaller gradients of scores are taken for such ones.
constexpr int kLeastGradientExponent = -96, kMostGradientExponent = 126;
// Columns of a product that is added up by itself.
constexpr int kPartCols = (SHARES_WEIGHTS ? 2 : 1) * kPanelCols;

// Whether P lies where dS will be from dV's product on, since there are no registers for it. Each
// warp reads what it wrote.
constexpr bool kSharesWeights = SHARES_WEIGHTS;

using Scores = WgmmaSums<kBlockM>;
using Weights = WgmmaOperand<kBlockM>;

// A warpgroup that computes.
struct Consumer {
    Smem& smem;
    const BackwardParams& call;
    const int warpgroup;
    const int warp_row;   // the first of the 16 rows that a warp has of 64
    const int first_row;  // of the thread's two, eight rows from each other

    RingPosition<kStages> at;
    WgmmaSums<kDepth> dk = {};  // before the softmax's scale
    WgmmaSums<kDims> dv = {};

    __device__ Consumer(Smem& smem, const BackwardParams& call, const KeyTile& work, int warpgroup)
        : smem(smem),
          call(call),
          warpgroup(warpgroup),
          warp_row(row_of_warp()),
          first_row(row_of_thread()) {
        if (threadIdx.x % 32 < 16) {
            const int row = warp_row + threadIdx.x % 32;
            smem.seeing[warpgroup][row] =
                SeeingRows(work.sequence.mask(call.features), work.first_key + row);
        }
        __syncwarp();
    }

    // Which of a tile's queries, or of a row's columns, [4 * eight + e] of its sums is of.
    __device__ static int col_of(int eight, int e) { return eight * 8 + col_of_thread() + e % 2; }
    __device__ const Statistics& rows() const { return smem.statistics[warpgroup][at.stage]; }
    __device__ const QueryRows& q() const { return smem.queries[warpgroup][at.stage].rows.q; }
    __device__ const OutRows& dout() const { return smem.queries[warpgroup][at.stage].rows.dout; }

    __device__ void wait_for_keys() { wait_for(smem.keys_full, 0, 0); }
    __device__ void wait_for_queries() { smem.q_rings[warpgroup].wait_full(at); }
    __device__ void wait_for_dout() { smem.dout_rings[warpgroup].wait_full(at); }
    __device__ void release_dout() {
        if (!QueryStage::kSumsTakeDout) release(smem.dout_rings[warpgroup], at);
    }
    // With what is to be added to dQ in their place.
    __device__ void release_queries() {
        ptx::proxy_fence();  // what was read of the statistics is in registers
        release(smem.q_rings[warpgroup], at);
        if (QueryStage::kSumsTakeDout) release(smem.dout_rings[warpgroup], at);
    }
    // Leaves a tile to exact_tiles.
    __device__ void pass_over() {
        if (threadIdx.x % kWarpgroup == 0) smem.statistics[warpgroup][at.stage].dq = nullptr;
        release_dout();
        release_queries();
    }

    __device__ void meet_warpgroup() const {
        ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + warpgroup);
    }

    // S^T = K Q^T, in units of halves.
    __device__ void make_scores(Scores& s) {
        issue_halves<kDepth, kBlockM>(s, DepthInColumns(smem.k), DepthInColumns(q()));
        wait_product<0>(s);
    }

    // P^T of the scores.
    __device__ void make_weights(Weights (&p)[kParts], Scores& s, bool masked) {
        const float scale = smem.units.k.size * rows().q.size * float(call.softmax_scale * kLog2E);
#pragma unroll
        for (int i = 0; i < kBlockM / 2; ++i) {
            const float lse = rows().lse_log2[col_of(i / 4, i)] - kTopWeight;
            s[i] = exp2_of(s[i] * scale - lse);
        }
        if (masked) hide(s, rows().first_row);
        halve<kBlockM>(p, s, 1);
        if (kSharesWeights) {
            share(p);
            ptx::proxy_fence();
            meet_warpgroup();
        }
    }
    // Issues part = w b with P^T or dS^T.
    template <int Cols, class B>
    __device__ void issue_weights(WgmmaSums<Cols>& part, const Weights (&w)[kParts], const B& b) {
        if constexpr (kSharesWeights) {
            issue_halves<kBlockM, Cols>(part, DepthInColumns(smem.ds[warpgroup]), b);
        } else {
            issue_halves<kBlockM, Cols>(part, InRegisters<kBlockM>{w}, b);
        }
    }
    __device__ void share(const Weights (&halves)[kParts]) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            write_rows<kBlockM>(smem.ds[warpgroup], halves[part], part * kBlockN + warp_row);
    }
    __device__ void hide(Scores& p, int first_query) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const SeeingRows rows = smem.seeing[warpgroup][first_row + half * 8];
#pragma unroll
            for (int i = 0; i < kBlockM / 2; ++i) {
                if (i / 2 % 2 == half && !rows.have(first_query + col_of(i / 4, i))) p[i] = 0;
            }
        }
    }

    // dV += P^T dO.
    template <int Col = 0>
    __device__ void add_value_gradients(const Weights (&p)[kParts]) {
        constexpr int kCols = min_of(kPartCols, kDims - Col);
        WgmmaSums<kCols> part;
        issue_weights<kCols>(part, p, DepthInRows(dout(), Col / kPanelCols));
        const float unit = rows().dout.size * (1.f / (1 << kTopWeight));
        wait_product<0>(part);
#pragma unroll
        for (int i = 0; i < kCols / 2; ++i) dv[Col / 2 + i] += part[i] * unit;
        if constexpr (Col + kCols < kDims) add_value_gradients<Col + kCols>(p);
    }

    // Issues dP^T = V dO^T, in units of halves.
    __device__ void issue_weight_gradients(Scores& dp) {
        issue_halves<kDims, kBlockM>(dp, DepthInColumns(smem.v), DepthInColumns(dout()));
    }

    // dS^T = P^T o (dP^T - D), in the unit that it returns the exponent of. Shared, too, where P^T
    // lay.
    __device__ int make_score_gradients(Weights (&ds)[kParts], Scores& dp, Weights (&p)[kParts]) {
        const float unit = smem.units.v.size * rows().dout.size;
        float largest = 0;
        hold_all(dp);
        if (kSharesWeights) {
#pragma unroll
            for (int part = 0; part < kParts; ++part)
                read_rows<kBlockM>(p[part], smem.ds[warpgroup], part * kBlockN + warp_row);
        }
#pragma unroll
        for (int i = 0; i < kBlockM / 2; ++i) {
            dp[i] = whole(p, i) * (dp[i] * unit - rows().d[col_of(i / 4, i)]);
            largest = fmaxf(largest, fabsf(dp[i]));
        }
        const int exponent = exponent_of<kLeastGradientExponent>(largest_of_warpgroup(largest));
        const int unit_of_halves = min(exponent, kMostGradientExponent) - kTopExponent;
        halve<kBlockM>(ds, dp, power_of_two(-unit_of_halves));
        share(ds);
        ptx::proxy_fence();
        meet_warpgroup();
        return unit_of_halves - kTopWeight;
    }
    // By the way all products with what is shared are done.
    __device__ float largest_of_warpgroup(float largest) {
        float (&of_warps)[kWarpgroup / 32] = smem.largest[warpgroup];
        largest = lanes_max<32>(largest);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x % kWarpgroup / 32] = largest;
        meet_warpgroup();
#pragma unroll
        for (const float other : of_warps) largest = fmaxf(largest, other);
        return largest;
    }

    // dK += dS^T Q.
    template <int Col = 0>
    __device__ void add_key_gradients(const Weights (&ds)[kParts], int exponent) {
        constexpr int kCols = min_of(kPartCols, kDepth - Col);
        WgmmaSums<kCols> part;
        issue_weights<kCols>(part, ds, DepthInRows(q(), Col / kPanelCols));
        const float unit = rows().q.size * power_of_two(exponent);
        wait_product<0>(part);
#pragma unroll
        for (int i = 0; i < kCols / 2; ++i) dk[Col / 2 + i] += part[i] * unit;
        if constexpr (Col + kCols < kDepth) add_key_gradients<Col + kCols>(ds, exponent);
    }

    // What is to be added to dQ, dS K, where the queries were.
    template <int Col = 0>
    __device__ void write_query_gradients(int exponent) {
        constexpr int kCols = min_of(kPartCols, kDepth - Col);
        WgmmaSums<kCols> part;
        issue_halves<kBlockN, kCols>(part, DepthInRows(smem.ds[warpgroup]),
                                     DepthInRows(smem.k, Col / kPanelCols));
        const float unit = smem.units.k.size * float(call.softmax_scale) * power_of_two(exponent);
        wait_product<0>(part);
        // No product reads queries any more, and after the last none what is shared.
        if (kSharesWeights || Col == 0) meet_warpgroup();
        QuerySums& to = smem.queries[warpgroup][at.stage].dq;
#pragma unroll
        for (int i = 0; i < kCols / 2; i += 4) {
            to.quads[(Col / 8 + i / 4) * kWarpgroup + threadIdx.x % kWarpgroup] = {
                part[i] * unit, part[i + 1] * unit, part[i + 2] * unit, part[i + 3] * unit};
        }
        if constexpr (Col + kCols < kDepth) write_query_gradients<Col + kCols>(exponent);
    }

    // Hands in what it has of the gradients of the keys.
    __device__ void hand_in() const {
        // Nobody reads what lay there.
        ptx::named_barrier_sync<kConsumersAndSenders>(kAllWhoRead);
        KeySums& to = smem.sums()[warpgroup];
        write_sums<kDepth>(to.dk, dk);
        write_sums<kDims>(to.dv, dv);
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
    }

  private:
    template <int Dims>
    __device__ void write_sums(SumRows<Dims>& to, const WgmmaSums<Dims>& sums) const {
#pragma unroll
        for (int i = 0; i < Dims / 2; i += 2) {
            float* const pair = &to[first_row + i / 2 % 2 * 8][col_of(i / 4, 0)];
            *reinterpret_cast<Pack<float, 2>*>(pair) = {sums[i], sums[i + 1]};
        }
    }
};

// Stores rows of what the warpgroups have together, by all their threads.
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
    // Who asks again keeps nothing in between.
    const KeyTile work = key_tile_of_block<kBlockN>(call, ptx::anew(blockIdx.x));
    const int count = min(end_of_keys(call, work.sequence) - work.first_key, kBlockN);
    const auto rows_of = [&](const Tensor& tensor) {
        return work.sequence.keys<float>(tensor, work.kv_head).from(work.first_key);
    };
    const float scale = call.softmax_scale;
    store_rows<kHeadDim, kDepth>(rows_of(call.dk), count, smem.sums(), &KeySums::dk, scale);
    store_rows<kValueDim, kDims>(rows_of(call.dv), count, smem.sums(), &KeySums::dv, 1);
}
