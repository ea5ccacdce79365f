// fwd_9_float32: float32 on Hopper's tensor cores for 16 bits, each element as a sum of two halves.
//
// Change from fwd_6_wgmma: wgmma knows no float32, and of tf32 it takes no V as it lies in memory.
// So a first launch makes two float16 of each element (half_tiles.cuh), in tiles as they will lie
// in shared memory, and each product becomes three. They take so long that a warpgroup's softmax
// hides beside those of the other, whose turn it is, and not beside its own too. Tensor cores cut
// off the sums that they add to; so what a tile of keys adds to O is summed by itself, and added
// afterwards.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (...,
//          value_dim); packed sequences: (tokens, heads, dim)
// Launches: to_halves; fwd_9_float32
// Owns     block: BLOCK_M queries of one head; warpgroup: 64 of them
// Shared   the tile of queries, a ring of STAGES tiles of keys and their values
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key, unless
//          there is a sink
// Needs    sm_90a
#include "call/key_tiles.cuh"
#include "hopper/float32/half_tiles.cuh"
#include "hopper/forward_turns.cuh"
#include "hopper/pipeline.cuh"
#include "scores/score_rules.cuh"

constexpr int kThreads = THREADS, kStages = STAGES, kHalvingThreads = HALVING_THREADS;
constexpr int kHalvingBlocks = 6;  // an SM has at least so many: if not asked to, ptxas may spill
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
static_assert((kConsumers + 1) * kWarpgroup == kThreads, "one warpgroup copies, others compute");
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");
static_assert(sizeof(QueryHalves) == QUERY_TILE_BYTES, "the host plans another workspace");
static_assert(sizeof(TileHalves) == KEY_TILE_BYTES, "the host plans another workspace");

// ---- the first launch: a block for each tile ----

// Calls write(row, col, piece) for all pieces of Rows rows, `count` of which exist.
template <int Rows, int Dims, class Write>
__device__ inline void for_pieces(const Matrix<const float>& from, int count, const Write& write) {
    constexpr int kAcross = kRowThreads<Dims>, kDown = kHalvingThreads / kAcross;
    static_assert(Rows % kDown == 0, "all threads have as many pieces");
#pragma unroll 2  // so many are on their way at once
    for (int first = 0; first < Rows; first += kDown) {
        const int row = first + threadIdx.x / kAcross, col = threadIdx.x % kAcross * kPieceCols;
        write(row, col, RowPiece<Dims>(from, row, count, col));
    }
}

// What a row of queries or keys is in units of: the exponent of that.
__device__ inline int unit_of(const RowPiece<kHeadDim>& piece) {
    return exponent_of<kLeastKeyExponent>(piece.largest_of_row()) - kTopExponent;
}

__device__ inline void halve_queries(const ForwardParams& call, int head, int tile) {
    const Sizes& sizes = call.sizes;
    const auto [batch, first_row] =
        row_tile<kBlockM>(tile, sizes.batch, sizes.seqlen_q, call.features.cu_seqlens_q);
    const Sequence sequence(call, batch);
    const auto q = sequence.queries<const float>(call.q, head);
    QueryHalves& to = Workspace(call).queries(head, tile);
    for_pieces<kBlockM, kHeadDim>(q.from(first_row), sequence.seqlen_q - first_row,
                                  [&](int row, int col, const RowPiece<kHeadDim>& piece) {
                                      const int unit = unit_of(piece);
                                      piece.write(to.rows[row / kWgmmaM], row % kWgmmaM, col,
                                                  power_of_two(-unit));
                                      if (col == 0) to.unit[row] = power_of_two(unit);
                                  });
}

__device__ inline void halve_keys(const ForwardParams& call, int kv_head, int tile) {
    const Sizes& sizes = call.sizes;
    const auto [batch, first_key] =
        row_tile<kBlockN>(tile, sizes.batch, sizes.seqlen_k, call.features.cu_seqlens_k);
    const Sequence sequence(call, batch);
    const int count = sequence.seqlen_k - first_key;
    const auto k = sequence.keys<const float>(call.k, kv_head);
    const auto v = sequence.keys<const float>(call.v, kv_head);
    TileHalves& to = Workspace(call).keys(kv_head, tile);
    for_pieces<kBlockN, kHeadDim>(k.from(first_key), count,
                                  [&](int key, int col, const RowPiece<kHeadDim>& piece) {
                                      const int unit = unit_of(piece);
                                      piece.write(to.k.rows, key, col, power_of_two(-unit));
                                      if (col == 0) to.k.unit[key] = power_of_two(unit);
                                  });
    for_pieces<kBlockN, kValueDim>(
        v.from(first_key), count, [&](int key, int col, const RowPiece<kValueDim>& piece) {
            const float largest = piece.largest_of_row();
            const bool finite = piece.row_is_finite();  // all threads of the row ask
            const bool held = finite && largest < kLargestValue;
            const int exponent = held ? exponent_of<kLeastValueExponent>(largest) : 0;
            piece.write(to.v, key, col, held ? power_of_two(kTopExponent - exponent) : 0);
            if (col == 0) {
                to.k.value_exponent[key] = exponent;
                to.k.value_reciprocal[key] = held ? power_of_two(-exponent) : -1;
            }
        });
}

extern "C" __global__ void __launch_bounds__(kHalvingThreads, kHalvingBlocks)
    to_halves(const __grid_constant__ ForwardParams params) {
    ptx::let_next_launch_begin();
    const Workspace workspace(params);
    const int of_queries = params.sizes.heads * workspace.query_tiles;
    const int block = blockIdx.x, tile = block - of_queries;
    if (tile < 0) {
        halve_queries(params, block / workspace.query_tiles, block % workspace.query_tiles);
    } else {
        halve_keys(params, tile / workspace.key_tiles, tile % workspace.key_tiles);
    }
}

// ---- the second: the producer, one thread ----

struct Smem {
    QueryHalves q;
    KeyHalves k[kStages];
    ValueRows v[kStages];
    Ring<kStages> k_ring, v_ring;
    ptx::Barrier queries_full;
};

using Keys = KeyTiles<kBlockN>;

// The keys that a block's queries see.
__device__ inline Keys keys_of(const ForwardParams& call, const QueryTile& work) {
    return {work.sequence.mask(call.features), work.first_row, kBlockM};
}

__device__ inline void produce(Smem& smem, const ForwardParams& call, const QueryTile& work) {
    const Keys keys = keys_of(call, work);
    const Workspace workspace(call);
    ptx::wait_for_launch_before();
    const auto& q = workspace.queries_from(work.sequence, work.head, work.first_row);
    ptx::barrier_arrive_expecting(smem.queries_full, QueryHalves::kBytes);
    ptx::copy_bytes(&smem.q, &q, QueryHalves::kBytes, smem.queries_full);

    const TileHalves* const first = &workspace.keys_from(work.sequence, work.kv_head, 0);
    const auto tile_at = [&](int key) -> const TileHalves& { return first[key / kBlockN]; };
    const auto send_keys = [&](RingPosition<kStages> at, int key) {
        if (key >= keys.end) return;
        smem.k_ring.wait_empty(at);
        ptx::copy_bytes(&smem.k[at.stage], &tile_at(key).k, KeyHalves::kBytes,
                        smem.k_ring.announce(at, KeyHalves::kBytes));
    };
    RingPosition<kStages> at;
    send_keys(at, keys.begin);
    for (int key = keys.begin; key < keys.end; key += kBlockN) {
        const RingPosition<kStages> of_values = at;
        at.advance();
        send_keys(at, key + kBlockN);  // they are needed a tile ahead of values
        smem.v_ring.wait_empty(of_values);
        ptx::copy_bytes(&smem.v[of_values.stage], &tile_at(key).v, ValueRows::kBytes,
                        smem.v_ring.announce(of_values, ValueRows::kBytes));
    }
}

// ---- the consumers ----

using Turns = ForwardTurns<kConsumers, 1>;  // barrier 0 is the block's

// Of the largest weight of a row.
constexpr int kTopWeight = 7;
// What a product with halves of values is in units of, beside the values' exponents.
constexpr float kPartUnit = 1.f / (1 << kTopExponent);

using Scores = WgmmaSums<kBlockN>;
using Output = WgmmaSums<kDims>;
using Weights = WgmmaOperand<kBlockN>;

// A warpgroup that computes: 64 queries.
struct Consumer {
    Smem& smem;
    const ForwardParams& call;
    const QueryTile& work;
    const int warpgroup;
    const ScoreRules rules;
    const Turns turns;
    const int first_row;  // of the thread's two, eight rows from each other, in the block's tile

    OnlineSoftmax softmax[2];
    Output o = {};
    RingPosition<kStages> k_at, v_at;

    __device__ Consumer(Smem& smem, const ForwardParams& call, const QueryTile& work, int warpgroup)
        : smem(smem),
          call(call),
          work(work),
          warpgroup(warpgroup),
          rules(call, work.sequence, work.head),
          turns(warpgroup),
          first_row(warpgroup * kWgmmaM + threadIdx.x % kWarpgroup / 32 * 16 +
                    threadIdx.x % 32 / 4) {}

    __device__ int row_of(int half) const { return work.first_row + first_row + half * 8; }
    // Which of a tile's keys, or of a row's columns, [4 * eight + e] of its sums is of.
    __device__ static int col_of(int eight, int e) {
        return eight * 8 + threadIdx.x % 4 * 2 + e % 2;
    }

    // The products of a warpgroup run during the softmax of the other.
    __device__ void consume() {
        const Keys range = keys_of(call, work);
        wait_for(smem.queries_full, 0, 0);
        int key = range.begin;
        if (key < range.end) {
            Scores s;
            Output part;
            Weights p[kParts];
            turns.wait();
            issue_scores(s);
            turns.pass();
            make_weights(p, s, key, range.masked(key));
            for (key += kBlockN; key < range.end; key += kBlockN) {
                turns.wait();
                issue_output(part, p);
                issue_scores(s);
                turns.pass();
                add_output<1>(part);
                make_weights(p, s, key, range.masked(key));
            }
            turns.wait();
            issue_output(part, p);
            turns.pass();
            add_output<0>(part);
        }
        store();
    }

    // Weights of the scores that are under way.
    __device__ void make_weights(Weights (&p)[kParts], Scores& s, int first_key, bool masked) {
        wait_product<0>(s);
        make_scores(s, first_key);
        if (masked) mask_scores(s, first_key);
        raise_maxima(s);
        weigh(s);
        add_others(s, first_key);
        release_and_advance(smem.k_ring, k_at);
        halve(p, s);
    }

    __device__ const KeyHalves& keys() const { return smem.k[k_at.stage]; }

    // A warp is done with a stage.
    __device__ static void release_and_advance(Ring<kStages>& ring, RingPosition<kStages>& at) {
        release(ring, at);
        at.advance();
    }

    // Issues S = Q K^T, the smallest products first.
    __device__ void issue_scores(Scores& s) {
        smem.k_ring.wait_full(k_at);
        const unsigned int q0 = depth_in_columns(smem.q.rows[warpgroup]);
        const unsigned int k0 = depth_in_columns(keys().rows);
        hold_all(s);
        ptx::wgmma_fence();
        if constexpr (kParts > 1) {
            add_scores<false>(s, q0 + rows_step(kWgmmaM), k0);
            add_scores<true>(s, q0, k0 + rows_step(kBlockN));
        }
        add_scores<(kParts > 1)>(s, q0, k0);
        ptx::wgmma_commit();
    }
    template <bool Add>
    __device__ static void add_scores(Scores& s, unsigned int q0, unsigned int k0) {
        using Product = WgmmaOf<kBlockN, operand_t>;
#pragma unroll
        for (int col = 0; col < kDepth; col += kWgmmaK) {
            const unsigned long long a = description(q0 + columns_step<QueryRows>(col));
            const unsigned long long b = description(k0 + columns_step<KeyRows>(col));
            if (Add || col > 0) {
                Product::template multiply<false, false, true>(s, a, b);
            } else {
                Product::template multiply<false, false, false>(s, a, b);
            }
        }
    }

    // Products become scores, in units of log 2, each with the exponent of its value.
    __device__ void make_scores(Scores& s, int first_key) const {
        const int last_key = work.sequence.seqlen_k - 1;
        const acc_t scale = kShapedScores ? 1 : rules.scale * acc_t(kLog2E);
        const float units[2] = {smem.q.unit[first_row] * scale, smem.q.unit[first_row + 8] * scale};
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
            const int half = i / 2 % 2, col = col_of(i / 4, i);
            const float unit = units[half] * keys().unit[col];
            if constexpr (kShapedScores) {
                s[i] = rules.score(s[i] * unit, row_of(half), min(first_key + col, last_key)) +
                       keys().value_exponent[col];
            } else {
                s[i] = s[i] * unit + keys().value_exponent[col];
            }
        }
    }
    __device__ void mask_scores(Scores& s, int first_key) const {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
            const int key = first_key + col_of(i / 4, i);
            if (!rules.sees(row_of(i / 2 % 2), key)) s[i] = negative_infinity();
        }
    }

    // Weights are up to 2^kTopWeight, so that small parts of small ones have their bits, too.
    __device__ void raise_maxima(const Scores& s) {
        float shrink[2];
        bool raised = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = negative_infinity();
#pragma unroll
            for (int i = 2 * half; i < kBlockN / 2; i += 4)
                largest = fmaxf(largest, fmaxf(s[i], s[i + 1]));
            largest = lanes_max<4>(largest) - kTopWeight;
            raised |= largest > softmax[half].max;
            shrink[half] = softmax[half].raise_max(largest);
        }
        if (!__any_sync(0xffffffffu, raised)) return;
#pragma unroll
        for (int i = 0; i < kDims / 2; ++i) o[i] *= shrink[i / 2 % 2];
    }

    // Scores become weights of values in units of their own; sums are of those of values
    // themselves.
    __device__ void weigh(Scores& s) {
        const float shifts[2] = {softmax[0].shift(), softmax[1].shift()};
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
            s[i] = exp2_of(s[i] - shifts[i / 2 % 2]);
            softmax[i / 2 % 2].sum += s[i] * fabsf(keys().value_reciprocal[col_of(i / 4, i)]);
        }
    }

    // Adds the values to O that halves cannot hold, and NaN and infinity to the rows that see them,
    // whatever their weight.
    __device__ void add_others(const Scores& s, int first_key) {
        bool others = false;
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i += 4)
            others |= !keys().has_value(col_of(i / 4, 0)) | !keys().has_value(col_of(i / 4, 1));
        if (!__any_sync(0xffffffffu, others)) return;

        const auto values = work.sequence.keys<const float>(call.v, work.kv_head);
#pragma unroll 1
        for (int key = 0; key < kBlockN; ++key) {
            if (keys().has_value(key)) continue;
            const float* const value = values.row(first_key + key);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float weight = weight_of(s, half, key);
                if (!rules.sees(row_of(half), first_key + key)) continue;
#pragma unroll
                for (int i = 2 * half; i < kDims / 2; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int col = col_of(i / 4, e);
                        if (col >= kValueDim) continue;
                        const float x = value[col];
                        o[i + e] += is_finite(x) ? weight * x : x;
                    }
            }
        }
    }
    // That of one key, which one of the four threads has that share a row.
    __device__ static float weight_of(const Scores& s, int half, int key) {
        float weight = 0;
#pragma unroll
        for (int i = 2 * half; i < kBlockN / 2; i += 4) {
            if (i / 4 == key / 8) weight = key % 2 == 0 ? s[i] : s[i + 1];
        }
        return __shfl_sync(0xffffffffu, weight, key % 8 / 2, 4);
    }

    __device__ static void halve(Weights (&p)[kParts], const Scores& s) {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i += 2) {
            const HalfPair large(s[i], s[i + 1]);
            const auto small = [&] {
                return ptx::pack_f16(s[i] - large.low(), s[i + 1] - large.high());
            };
            p[0][i / 8][i / 2 % 4] = large.pair;
            if (kParts > 1) p[kParts - 1][i / 8][i / 2 % 4] = small();
        }
    }

    // Issues the product that a tile adds to the output, the smallest products first.
    __device__ void issue_output(Output& part, const Weights (&p)[kParts]) {
        smem.v_ring.wait_full(v_at);
        const unsigned int v0 = depth_in_rows(smem.v[v_at.stage]);
        hold_all(part);
        ptx::wgmma_fence();
        if constexpr (kParts > 1) {
            add_product<false>(part, p[1], v0);
            add_product<true>(part, p[0], v0 + rows_step(kBlockN));
        }
        add_product<(kParts > 1)>(part, p[0], v0);
        ptx::wgmma_commit();
    }
    template <bool Add>
    __device__ static void add_product(Output& part, const Weights& p, unsigned int v0) {
        using Product = WgmmaOf<kDims, operand_t>;
#pragma unroll
        for (int key = 0; key < kBlockN; key += kWgmmaK) {
            const unsigned long long b = description(v0 + rows_step(key));
            if (Add || key > 0) {
                Product::template multiply<true, true>(part, p[key / kWgmmaK], b);
            } else {
                Product::template multiply<true, false>(part, p[key / kWgmmaK], b);
            }
        }
    }

    // Waits for it, and adds it.
    template <int Pending>
    __device__ void add_output(Output& part) {
        wait_product<Pending>(part);
        release_and_advance(smem.v_ring, v_at);
#pragma unroll
        for (int i = 0; i < kDims / 2; ++i) o[i] += part[i] * kPartUnit;
    }

    __device__ void store() {
        const auto out = work.sequence.queries<float>(call.o, work.head);
        float* const lse = static_cast<float*>(call.lse);
        const long long lse_row = work.sequence.first_row(work.head, call.sizes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float factor = end_row<4>(softmax[half], rules);
            const int row = row_of(half);
            if (row >= work.sequence.seqlen_q) continue;
            if (lse && threadIdx.x % 4 == 0) lse[lse_row + row] = lse_of(softmax[half]);
#pragma unroll
            for (int i = 2 * half; i < kDims / 2; i += 4)
                write_pair(out.row(row) + col_of(i / 4, 0), kValueDim - col_of(i / 4, 0),
                           {o[i] * factor, o[i + 1] * factor});
        }
    }
    // Sums may be large, and their logarithms known less well than those of their mantissas.
    __device__ static float lse_of(const OnlineSoftmax& row) {
        const int exponent = min(exponent_of<-126>(row.sum), 126);  // its power of two is a float
        const OnlineSoftmax near_one{row.max + exponent, row.sum * power_of_two(-exponent)};
        return near_one.lse();
    }
    // The first `count` of two.
    __device__ static void write_pair(float* to, int count, const Pack<float, 2>& pair) {
        if constexpr (kValueDim % 2 == 0 && kAlignBytes % sizeof(pair) == 0) {
            if (count > 0) *reinterpret_cast<Pack<float, 2>*>(to) = pair;
        } else {
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (e < count) to[e] = pair[e];
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fwd_9_float32(const __grid_constant__ ForwardParams params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) {
        constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
        smem.k_ring.init(kConsumerWarps);
        smem.v_ring.init(kConsumerWarps);
        ptx::barrier_init(smem.queries_full, 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();

    const QueryTile work = query_tile_of_block<kBlockM>(params);
    const bool exists = work.first_row < work.sequence.seqlen_q;  // of packed sequences some do not
    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        if (threadIdx.x == 0 && exists) produce(smem, params, work);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        if (exists) Consumer(smem, params, work, warpgroup - 1).consume();
    }
    ptx::wait_for_launch_before();
}
