// What a warpgroup of bwd_7_float32_wide does with a tile of queries and the block's keys: the
// verbs of the main loop.
#pragma once

#include "call/columns.cuh"
#include "hopper/float32/addition_turns.cuh"
#include "hopper/float32/bwd_7_block.cuh"
#include "hopper/panel_ranges.cuh"

// Scores of more depth are two products: tensor cores truncate the sums that they add to, step by
// step of the depth. dP - D, of which little may be left, has twice the error otherwise.
constexpr int kMostDepth = 128;

// Named barriers; __syncthreads has number 0.
enum NamedBarrier { kAllConsumers = 1, kFirstOfWarpgroup };

// A product for dK or dV has two panels of columns if there are as many: it then reads its left
// operand, which is in shared memory, too, half as often.
constexpr int kProductPanels = 2;

// The columns of a warpgroup's part of a tensor with Dims of them, and of its product that begins
// with one of its panels.
template <int Dims>
__device__ constexpr int cols_of(PanelRange part) {
    return part.count == 0 ? 0 : min_of(part.cols(), Dims - part.first_col());
}
template <int Dims>
__device__ constexpr int cols_of(PanelRange part, int panel) {
    return min_of(kProductPanels * kPanelCols, cols_of<Dims>(part) - panel * kPanelCols);
}
// A warpgroup's sums of a gradient of the keys; the first warpgroup has none of a single panel.
template <int Cols>
struct PartSums {
    WgmmaSums<Cols> sums = {};
};
template <>
struct PartSums<0> {};

// S or dP of all of a tile's queries, as a warpgroup computes them.
using TileScores = WgmmaSums<kBlockM>;
// The same in two parts of the depth.
using ScoreParts = TileScores[2];
// Of the queries for which a warpgroup makes P and dS.
template <Role kRole>
using HalfScores = KeyScores<kHalfM, kRole * kHalfM>;

template <Role kRole>
struct Consumer : HalfScores<kRole> {
    using Half = HalfScores<kRole>;
    using Half::call, Half::work, Half::warp_row, Half::first_row;
    using typename Half::Scores, typename Half::Weights;

    static constexpr int kOwnDepth = kRole == kWeights ? kDepth : kDims;  // of its scores
    static constexpr int kHeadPanels = ceil_div(kDepth, kPanelCols);
    static constexpr int kValuePanels = ceil_div(kDims, kPanelCols);
    static constexpr PanelRange kKeyPart = more_for_first(kRole, kHeadPanels);
    static constexpr PanelRange kValuePart = more_for_second(kRole, kValuePanels);
    static constexpr PanelRange kQueryPart = more_for_second(kRole, kHeadPanels);

    Smem& smem;
    RingPosition<kStages> at;
    AdditionTurns turns;
    PartSums<cols_of<kDepth>(kKeyPart)> dk;   // before the softmax's scale
    PartSums<cols_of<kDims>(kValuePart)> dv;  // without the scale of kept probabilities

    __device__ Consumer(Smem& smem, const BackwardParams& call, const KeyTile& work)
        : Half(call, work), smem(smem), turns(work) {
        if (kRole == kWeights) this->note_seeing(smem.seeing);  // both meet before they read it
    }

    __device__ const Statistics& rows() const { return smem.statistics[at.stage]; }

    __device__ void wait_for_keys() { wait_for(smem.keys_full, 0, 0); }

    // Issues S^T = K Q^T or dP^T = V dO^T, in units of halves.
    __device__ void issue_scores(ScoreParts& parts) {
        if constexpr (kRole == kWeights) {
            smem.q_ring.wait_full(at);
            issue_parts(parts, DepthInColumns(smem.k), DepthInColumns(smem.q[at.stage]));
        } else {
            smem.dout_ring.wait_full(at);
            issue_parts(parts, DepthInColumns(smem.v), DepthInColumns(smem.dout[at.stage]));
        }
    }
    // Waits for what this warpgroup has not waited for yet.
    __device__ void wait_for_others() {
        if constexpr (kRole == kWeights) {
            smem.dout_ring.wait_full(at);
        } else {
            smem.q_ring.wait_full(at);
        }
    }

    // Waits for the scores, which are then in the first part.
    __device__ void wait_for_scores(ScoreParts& parts) {
        wait_product<0>(parts[0]);
        if constexpr (kOwnDepth > kMostDepth) {
            hold_all(parts[1]);
#pragma unroll
            for (int i = 0; i < kBlockM / 2; ++i) parts[0][i] += parts[1][i];
        }
    }

    // Passes on the turn to add to dQ of the tile before, while products run: this takes a while.
    __device__ void pass_turn() {
        if (!turns.has_one()) return;
        ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + kRole);  // all threads have added
        threadIdx.x % kWarpgroup == 0 ? turns.pass() : turns.drop();
    }

    // Leaves a tile to exact_tiles.
    __device__ void leave_to_exact() {
        turns.take(*rows().tile);
        release(smem.dout_ring, at);
        release_queries();
    }

    // Gives its scores of half of the queries to the other warpgroup, and takes those of the other.
    __device__ void exchange(const TileScores& own, Scores& s, Scores& dp) {
        constexpr int kCount = kHalfM / 2, kKept = kRole * kCount, kGiven = kCount - kKept;
        const int thread = threadIdx.x % kWarpgroup;
        Scores& kept = kRole == kWeights ? s : dp;
        Scores& taken = kRole == kWeights ? dp : s;
        meet_all();  // no product reads P^T or dS^T, which were here before
#pragma unroll
        for (int i = 0; i < kCount; i += 4)
            smem.scores.sums[kRole][i / 4][thread] = {own[kGiven + i], own[kGiven + i + 1],
                                                      own[kGiven + i + 2], own[kGiven + i + 3]};
        meet_all();  // all have given theirs
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const auto four = smem.scores.sums[1 - kRole][i / 4][thread];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                taken[i + e] = four[e];
                kept[i + e] = own[kKept + i + e];
            }
        }
    }

    // P^T and dS^T of its queries, from S^T and dP^T.
    template <class Walk>
    __device__ void differentiate(Scores& s, Scores& dp, const Walk& walk) const {
        Half::differentiate(s, dp, rows(), smem.units, smem.seeing, walk);
    }

    // Makes operands of both, and shares them. Returns the exponent of the unit of dS.
    __device__ int share(const Scores& weights, const Scores& gradients) {
        Weights p[kHalves], ds[kHalves];
        // All meet, so all have taken the scores that were there.
        const int exponent =
            this->make_operands(p, ds, weights, gradients, smem.largest, kAllConsumers);
#pragma unroll
        for (int part = 0; part < kHalves; ++part) {
            const int row = part * kBlockN + warp_row, query = kRole * kHalfM;
            write_rows<kHalfM>(smem.scores.halves.p, p[part], row, query);
            write_rows<kHalfM>(smem.scores.halves.ds, ds[part], row, query);
        }
        ptx::proxy_fence();
        meet_all();  // P^T and dS^T are there
        return exponent;
    }

    // dV += P^T dO, from panel Panel on: tensor cores truncate the sums that they add to, so each
    // product is added afterwards.
    template <int Panel = 0>
    __device__ void add_value_gradients() {
        if constexpr (Panel < kValuePart.count) {
            constexpr int kCols = cols_of<kDims>(kValuePart, Panel);
            WgmmaSums<kCols> sums;
            issue_halves<kBlockM, kCols>(
                sums, DepthInColumns(smem.scores.halves.p),
                DepthInRows(smem.dout[at.stage], kValuePart.begin + Panel));
            wait_product<0>(sums);
            const float unit = rows().dout.size * (1.f / (1 << kTopWeight));
#pragma unroll
            for (int i = 0; i < kCols / 2; ++i)
                dv.sums[Panel * kPanelCols / 2 + i] += sums[i] * unit;
            add_value_gradients<Panel + kProductPanels>();
        } else {
            release(smem.dout_ring, at);
        }
    }

    // dK += dS^T Q, likewise.
    template <int Panel = 0>
    __device__ void add_key_gradients(int exponent) {
        if constexpr (Panel < kKeyPart.count) {
            constexpr int kCols = cols_of<kDepth>(kKeyPart, Panel);
            WgmmaSums<kCols> sums;
            issue_halves<kBlockM, kCols>(sums, DepthInColumns(smem.scores.halves.ds),
                                         DepthInRows(smem.q[at.stage], kKeyPart.begin + Panel));
            wait_product<0>(sums);
            const float unit = rows().q.size * power_of_two(exponent);
#pragma unroll
            for (int i = 0; i < kCols / 2; ++i)
                dk.sums[Panel * kPanelCols / 2 + i] += sums[i] * unit;
            add_key_gradients<Panel + kProductPanels>(exponent);
        }
    }

    // Adds dQ^T = K^T dS^T to its sums, 64 dims at a time. The queries may be overwritten
    // meanwhile.
    __device__ void add_query_gradients(int exponent) {
        QueryHalves& tile = *rows().tile;
        release_queries();
        const float unit = smem.units.k.size * call.softmax_scale * power_of_two(exponent);
        if (kQueryPart.count == 0) turns.take(tile);
#pragma unroll
        for (int i = 0; i < kQueryPart.count; ++i) {
            const int panel = kQueryPart.begin + i;
            TileScores sums;
            issue_halves<kBlockN, kBlockM>(sums, DepthInRows(smem.k, panel),
                                           DepthInRows(smem.scores.halves.ds));
            if (i == 0) turns.take(tile);
            wait_product<0>(sums);
            add_panel(&tile.dq.quads[panel * (kBlockM / 8) * kWarpgroup], sums, unit);
        }
    }

    // Stores this warpgroup's part of the gradients of the keys.
    __device__ void store() const {
        // Looked up again, so that it takes no registers in between.
        const KeyTile work = key_tile(call, ptx::anew(blockIdx.x));
        store<kHeadDim>(call.dk, work, dk, kKeyPart, call.softmax_scale);
        store<kValueDim>(call.dv, work, dv, kValuePart, kept_scale(call.features));
    }

  private:
    template <class A, class B>
    __device__ static void issue_parts(ScoreParts& parts, const A& a, const B& b) {
        if constexpr (kOwnDepth > kMostDepth) {
            constexpr int kHalf = round_up(kOwnDepth / 2, kWgmmaK);
            issue_halves<kHalf, kBlockM>(parts[0], a, b);
            issue_halves<kOwnDepth, kBlockM, kHalf>(parts[1], a, b);
        } else {
            issue_halves<kOwnDepth, kBlockM>(parts[0], a, b);
        }
    }

    __device__ void release_queries() {
        ptx::proxy_fence();  // what was read of the statistics is in registers
        release(smem.q_ring, at);
    }

    __device__ static void meet_all() { ptx::named_barrier_sync<kComputingThreads>(kAllConsumers); }

    __device__ static void add_panel(QuerySums::Quad* to, const TileScores& sums, float unit) {
#pragma unroll
        for (int i = 0; i < kBlockM / 2; i += 4) {
            const float four[] = {sums[i] * unit, sums[i + 1] * unit, sums[i + 2] * unit,
                                  sums[i + 3] * unit};
            ptx::add_to_global(to[i / 4 * kWarpgroup + threadIdx.x % kWarpgroup].v, four);
        }
    }

    template <int TensorDims, int Cols>
    __device__ void store(const Tensor& tensor, const KeyTile& work, const PartSums<Cols>& part,
                          PanelRange range, float scale) const {
        if constexpr (Cols > 0) {
            const auto to = work.sequence.keys<float>(tensor, work.kv_head).from(work.first_key);
            const int count = end_of_keys(call, work.sequence) - work.first_key;
#pragma unroll
            for (int i = 0; i < Cols / 2; i += 2) {
                const int key = first_row + i / 2 % 2 * 8,
                          col = range.first_col() + Half::col_of(i / 4, 0);
                const Pack<float, 2> pair = {part.sums[i] * scale, part.sums[i + 1] * scale};
                if (key < count) write_columns<TensorDims>(to.row(key), pair, col);
            }
        }
    }
};
