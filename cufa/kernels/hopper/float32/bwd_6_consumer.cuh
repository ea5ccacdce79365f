// What a warpgroup of bwd_6_float32 does with a tile of queries and the block's keys: the verbs of
// the loop there.
#pragma once

#include "call/columns.cuh"
#include "hopper/float32/bwd_6_block.cuh"

// Barriers of parts of the block; __syncthreads has number 0.
enum NamedBarrier { kAllConsumers = 1, kFirstOfWarpgroup };

// A probability is at most 1, and its halves are of so many times as much.
constexpr int kTopWeight = 14;
// Smaller gradients of scores are taken for such ones.
constexpr int kLeastGradientExponent = -96, kMostGradientExponent = 126;
// Columns of a product that is added up by itself.
constexpr int kPartCols = kPanelCols;

// Whether P lies where dS will be from dV's product on, since there are no registers for it. Each
// warp reads what it wrote.
constexpr bool kSharesWeights = SHARES_WEIGHTS;

using Scores = WgmmaSums<kBlockM>;
using Weights = WgmmaOperand<kBlockM>;

// The products that make one, the smallest first, and which parts of its operands each is of.
constexpr int kProducts = kParts > 1 ? 3 : 1;
__device__ constexpr int left_part(int product) {
    return kParts > 1 && product == 0;
}
__device__ constexpr int right_part(int product) {
    return kParts > 1 && product == 1;
}

// Issues s = a b^T over Depth columns of halves.
template <int Depth, class A, class B>
__device__ inline void issue_halves_nt(Scores& s, const A& a, const B& b) {
    using Product = WgmmaOf<kBlockM, operand_t>;
    unsigned int a0 = depth_in_columns(a);
    const unsigned int b0 = depth_in_columns(b);
    ptx::hold(a0);  // or each step's sum would be kept in a register from tile to tile
    hold_all(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
        const unsigned int a_part = a0 + rows_step(left_part(product) * kWgmmaM);
        const unsigned int b_part = b0 + rows_step(right_part(product) * kBlockM);
#pragma unroll
        for (int col = 0; col < Depth; col += kWgmmaK) {
            const unsigned long long a_col = description(a_part + columns_step<A>(col));
            const unsigned long long b_col = description(b_part + columns_step<B>(col));
            if (product == 0 && col == 0) {
                Product::template multiply<false, false, false>(s, a_col, b_col);
            } else {
                Product::template multiply<false, false, true>(s, a_col, b_col);
            }
        }
    }
    ptx::wgmma_commit();
}

// Issues part = w b for Cols columns of b's rows from those of a panel on, of which there are as
// many as w has columns.
template <int Cols, class B>
__device__ inline void issue_halves_pn(WgmmaSums<Cols>& part, const Weights (&w)[kParts],
                                       const B& b, int panel) {
    using Product = WgmmaOf<Cols, operand_t>;
    unsigned int b0 = panel_depth_in_rows(b, panel);
    ptx::hold(b0);
    hold_all(part);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
        const unsigned int b_part = b0 + rows_step(right_part(product) * kBlockM);
#pragma unroll
        for (int row = 0; row < kBlockM; row += kWgmmaK) {
            const auto& a = w[left_part(product)][row / kWgmmaK];
            const unsigned long long b_row = description(b_part + rows_step(row));
            if (product == 0 && row == 0) {
                Product::template multiply<true, false>(part, a, b_row);
            } else {
                Product::template multiply<true, true>(part, a, b_row);
            }
        }
    }
    ptx::wgmma_commit();
}

// Issues part = a^T b with the depth in the rows of both, as in dQ = dS K with dS^T; of b for as
// many columns as the part has, from those of a panel on.
template <int Cols, class A, class B>
__device__ inline void issue_halves_tn(WgmmaSums<Cols>& part, const A& a, const B& b, int panel) {
    using Product = WgmmaOf<Cols, operand_t>;
    unsigned int a0 = depth_in_rows(a);
    const unsigned int b0 = panel_depth_in_rows(b, panel);
    ptx::hold(a0);
    hold_all(part);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
        const unsigned int a_part = a0 + rows_step(left_part(product) * kBlockN);
        const unsigned int b_part = b0 + rows_step(right_part(product) * kBlockN);
#pragma unroll
        for (int key = 0; key < kBlockN; key += kWgmmaK) {
            const unsigned long long a_key = description(a_part + rows_step(key));
            const unsigned long long b_key = description(b_part + rows_step(key));
            if (product == 0 && key == 0) {
                Product::template multiply<true, true, false>(part, a_key, b_key);
            } else {
                Product::template multiply<true, true, true>(part, a_key, b_key);
            }
        }
    }
    ptx::wgmma_commit();
}

// Sums in float32 as halves of so many times as much.
__device__ inline void halve(Weights (&halves)[kParts], const Scores& sums, float factor) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; i += 2) {
        const float low = sums[i] * factor, high = sums[i + 1] * factor;
        const HalfPair large(low, high);
        halves[0][i / 8][i / 2 % 4] = large.pair;
        if (kParts > 1) {
            halves[kParts - 1][i / 8][i / 2 % 4] =
                ptx::pack_f16(low - large.low(), high - large.high());
        }
    }
}
// The sum that number i of them was.
__device__ inline float whole(const Weights (&halves)[kParts], int i) {
    float sum = 0;
#pragma unroll
    for (int part = kParts - 1; part >= 0; --part) {
        const unsigned int pair = halves[part][i / 8][i / 2 % 4];
        sum += to_acc(float16{static_cast<unsigned short>(i % 2 ? pair >> 16 : pair)});
    }
    return sum;
}

// Where a thread adds its sums of a tile's dQ: to four columns of every eight of a row.
struct QueryPlace {
    float* first;  // null if there is no such row
    int first_col;

    __device__ QueryPlace(const Statistics& rows, int row_of_even, long long row_stride)
        : first_col(threadIdx.x % 4 / 2 * 4) {
        const int row = row_of_even + threadIdx.x % 2 * 8;
        first = row < rows.count ? rows.dq + row * row_stride + first_col : nullptr;
    }
    // Those from column Col on.
    template <int Col, int Count>
    __device__ void add(const float (&sums)[Count]) const {
        if (first == nullptr) return;
#pragma unroll
        for (int i = 0; i < Count; i += 4) {
            const int col = Col + 2 * i;
            const float four[4] = {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
            if constexpr (kHeadDim % 4 == 0 && kAlignBytes % sizeof(four) == 0) {
                if (col + first_col < kHeadDim) ptx::add_to_global(first + col, four);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (col + first_col + e < kHeadDim) atomicAdd(first + col + e, four[e]);
            }
        }
    }
};

struct Consumer {
    Smem& smem;
    const BackwardParams& call;
    const KeyTile& work;
    const int warpgroup;
    const Mask mask;
    const int warp_row;   // the first of the 16 rows that a warp has of 64
    const int first_row;  // of the thread's two, eight rows from each other

    RingPosition<kStages> at;
    WgmmaSums<kDepth> dk = {};  // before the softmax's scale
    WgmmaSums<kDims> dv = {};

    __device__ Consumer(Smem& smem, const BackwardParams& call, const KeyTile& work, int warpgroup)
        : smem(smem),
          call(call),
          work(work),
          warpgroup(warpgroup),
          mask(work.sequence.mask(call.features)),
          warp_row(threadIdx.x % kWarpgroup / 32 * 16),
          first_row(warp_row + threadIdx.x % 32 / 4) {}

    // Which of a tile's queries, or of a row's columns, [4 * eight + e] of its sums is of.
    __device__ static int col_of(int eight, int e) {
        return eight * 8 + threadIdx.x % 4 * 2 + e % 2;
    }
    __device__ const Statistics& rows() const { return smem.statistics[warpgroup][at.stage]; }
    __device__ const QueryRows& q() const { return smem.queries[warpgroup].q[at.stage]; }
    __device__ const OutRows& dout() const { return smem.queries[warpgroup].dout[at.stage]; }

    __device__ void wait_for_keys() { wait_for(smem.keys_full, 0, 0); }
    __device__ void wait_for_queries() { smem.q_rings[warpgroup].wait_full(at); }
    __device__ void wait_for_dout() { smem.dout_rings[warpgroup].wait_full(at); }
    __device__ void release_queries() {
        ptx::proxy_fence();  // what was read of the statistics is in registers
        release(smem.q_rings[warpgroup], at);
    }
    __device__ void release_dout() { release(smem.dout_rings[warpgroup], at); }

    __device__ QueryPlace place() const { return {rows(), first_row, call.dq.row_stride}; }
    // Leaves a tile to exact_tiles.
    __device__ void pass_over() {
        wait_for_dout();
        release_dout();
        release_queries();
    }

    __device__ void meet_warpgroup() const {
        ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + warpgroup);
    }

    // S^T = K Q^T, in units of halves.
    __device__ void make_scores(Scores& s) {
        issue_halves_nt<kDepth>(s, smem.k, q());
        wait_product<0>(s);
    }

    // P^T of the scores.
    __device__ void make_probabilities(Weights (&p)[kParts], Scores& s, bool masked) {
        const float scale = smem.units.k.size * rows().q.size * float(call.softmax_scale * kLog2E);
#pragma unroll
        for (int i = 0; i < kBlockM / 2; ++i) {
            const float lse = rows().lse_log2[col_of(i / 4, i)] - kTopWeight;
            s[i] = exp2_of(s[i] * scale - lse);
        }
        if (masked) hide(s, rows().first_row);
        halve(p, s, 1);
        if (kSharesWeights) share(p);
    }
    __device__ void share(const Weights (&halves)[kParts]) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            write_rows<kBlockM>(smem.ds[warpgroup], halves[part], part * kBlockN + warp_row);
    }
    __device__ void hide(Scores& p, int first_query) const {
#pragma unroll
        for (int i = 0; i < kBlockM / 2; ++i) {
            const int key = work.first_key + first_row + i / 2 % 2 * 8;
            if (!mask.in_range(first_query + col_of(i / 4, i), key)) p[i] = 0;
        }
    }

    // dV += P^T dO.
    template <int Col = 0>
    __device__ void add_value_gradients(const Weights (&p)[kParts]) {
        constexpr int kCols = min_of(kPartCols, kDims - Col);
        WgmmaSums<kCols> part;
        issue_halves_pn<kCols>(part, p, dout(), Col / kPanelCols);
        const float unit = rows().dout.size * (1.f / (1 << kTopWeight));
        wait_product<0>(part);
#pragma unroll
        for (int i = 0; i < kCols / 2; ++i) dv[Col / 2 + i] += part[i] * unit;
        if constexpr (Col + kCols < kDims) add_value_gradients<Col + kCols>(p);
    }

    // dP^T = V dO^T, in units of halves.
    __device__ void make_weight_gradients(Scores& dp) {
        issue_halves_nt<kDims>(dp, smem.v, dout());
        wait_product<0>(dp);
    }

    // dS^T = P^T o (dP^T - D), in the unit that it returns the exponent of. Shared, too, where P^T
    // lay.
    __device__ int make_score_gradients(Weights (&ds)[kParts], Scores& dp, Weights (&p)[kParts]) {
        const float unit = smem.units.v.size * rows().dout.size;
        float largest = 0;
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
        halve(ds, dp, power_of_two(-unit_of_halves));
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
        issue_halves_pn<kCols>(part, ds, q(), Col / kPanelCols);
        const float unit = rows().q.size * power_of_two(exponent);
        wait_product<0>(part);
#pragma unroll
        for (int i = 0; i < kCols / 2; ++i) dk[Col / 2 + i] += part[i] * unit;
        if constexpr (Col + kCols < kDepth) add_key_gradients<Col + kCols>(ds, exponent);
    }

    // dQ += dS K.
    template <int Col = 0>
    __device__ void add_query_gradients(int exponent, const QueryPlace& to) {
        constexpr int kCols = min_of(kPartCols, kDepth - Col);
        WgmmaSums<kCols> part;
        issue_halves_tn<kCols>(part, smem.ds[warpgroup], smem.k, Col / kPanelCols);
        const float unit = smem.units.k.size * float(call.softmax_scale) * power_of_two(exponent);
        wait_product<0>(part);
        if (kSharesWeights) meet_warpgroup();  // before P is shared where dS is
#pragma unroll
        for (int i = 0; i < kCols / 2; i += 4) exchange(part + i, unit);
        to.template add<Col>(part);
        if constexpr (Col + kCols < kDepth) add_query_gradients<Col + kCols>(exponent, to);
    }
    // Of a thread's four sums of eight columns it gives two to its neighbour, for two that are next
    // to its others: those of the one row or of the other.
    __device__ static void exchange(float* sums, float unit) {
        const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float kept = (odd ? sums[2 + e] : sums[e]) * unit;
            const float given = (odd ? sums[e] : sums[2 + e]) * unit;
            const float taken = __shfl_xor_sync(0xffffffffu, given, 1);
            sums[e] = odd ? taken : kept;
            sums[2 + e] = odd ? kept : taken;
        }
    }

    // Hands in what it has of the gradients of the keys.
    __device__ void hand_in() const {
        meet();  // nobody reads what lay there
        KeySums& to = smem.sums()[warpgroup];
        write_sums<kDepth>(to.dk, dk);
        write_sums<kDims>(to.dv, dv);
        meet();
    }

  private:
    __device__ static void meet() {
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
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
