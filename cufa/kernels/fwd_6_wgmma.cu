// fwd_6_wgmma: FlashAttention-3 (Shah et al. 2024, Algorithms 1 and 2) on Hopper.
//
// Change from fwd_5_mma: a warp that does nothing but copy, by the copy engine, and warpgroups that
// do nothing but compute, by wgmma, which reads its operands from shared memory and runs beside what
// issued it. While the tensor cores work on the next scores and the last output, a warpgroup
// exponentiates the scores that it has; and warpgroups take turns, so that the products of one run
// during the softmax of the other. A block stays for many tiles.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (...,
//          value_dim)
// Owns     block: tile after tile of BLOCK_M queries of one head; warpgroup: 64 of its rows
// Shared   Q tile of each warpgroup, rings of STAGES K and V tiles
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key
#include "online_softmax.cuh"
#include "schedule.cuh"
#include "wgmma_tiles.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kStages = STAGES;
constexpr int kConsumers = kBlockM / kWgmmaM;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
constexpr int kDepth = round_up(kHeadDim, kWgmmaK), kDims = round_up(kValueDim, kWgmmaK);

struct Params {
    TensorMap q, k, v;
    ForwardParams call;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "the host passes a different struct");

using QueryRows = PanelTile<kWgmmaM, kHeadDim>;
using KeyTile = PanelTile<kBlockN, kHeadDim>;
using ValueTile = PanelTile<kBlockN, kValueDim>;

struct Smem {
    QueryRows q[kConsumers];
    KeyTile k[kStages];
    ValueTile v[kStages];
    Ring<kStages> k_ring, v_ring;
    Ring<1> q_ring[kConsumers];
    WorkTile work[kConsumers];  // to which q belongs
};

using Order = TileOrder<kBlockM, kCausal, SECTION_BYTES>;
using Scores = WgmmaSums<kBlockN>;
using Weights = WgmmaOperand<kBlockN>;

// A maximum is raised only when scores pass it by more than this, in log 2. Until then
// probabilities reach up to 2^8, which float32 sums and 16-bit weights hold as precisely as those
// up to 1.
constexpr float kSlack = 8;

// The tiles of keys that a tile of queries looks at, from the last to the first: those from
// `unmasked` on are masked for some of its rows.
struct KeyTiles {
    int count, unmasked;

    __device__ KeyTiles(Mask<kCausal> mask, int first_row) {
        const int last_row = min(first_row + kBlockM, mask.seqlen_q) - 1;
        count = ceil_div(mask.keys_seen(last_row), kBlockN);
        unmasked = mask.keys_seen(first_row) / kBlockN;
    }
};

// ---- the producer: one thread ----

__device__ inline void send_queries(Smem& smem, const Params& params, RingPosition<1>& at,
                                    WorkTile work) {
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
        smem.q_ring[w].wait_empty(at);
        smem.work[w] = work;
        ptx::Barrier& full = smem.q_ring[w].announce(at, work.exists() ? QueryRows::kBytes : 0);
        if (work.exists()) {
            copy_tile(smem.q[w], params.q, full, work.batch, work.head,
                      work.first_row + w * kWgmmaM);
        }
    }
    at.advance();
}

template <class Tile>
__device__ inline void send_tile(Tile (&tiles)[kStages], Ring<kStages>& ring,
                                 RingPosition<kStages>& at, const TensorMap& map, WorkTile work,
                                 int tile) {
    ring.wait_empty(at);
    ptx::Barrier& full = ring.announce(at, Tile::kBytes);
    copy_tile(tiles[at.stage], map, full, work.batch, work.kv_head, tile * kBlockN);
    at.advance();
}

__device__ inline void produce(Smem& smem, const Params& params) {
    const Sizes& sizes = params.call.sizes;
    const Mask<kCausal> mask{sizes.seqlen_q, sizes.seqlen_k};
    const Order order(sizes);
    const TileCounter counter{static_cast<unsigned int*>(params.call.workspace),
                              static_cast<unsigned int>(order.heads * order.tiles)};
    RingPosition<1> q_at;
    RingPosition<kStages> k_at, v_at;

    int index = blockIdx.x;
    for (WorkTile work = order.at(index); work.exists(); work = order.at(index)) {
        index = counter.next();  // early: the answer takes a while
        const KeyTiles keys(mask, work.first_row);
        int tile = keys.count - 1;
        if (tile >= 0) send_tile(smem.k, smem.k_ring, k_at, params.k, work, tile);
        send_queries(smem, params, q_at, work);
        for (; tile > 0; --tile) {
            send_tile(smem.k, smem.k_ring, k_at, params.k, work, tile - 1);
            send_tile(smem.v, smem.v_ring, v_at, params.v, work, tile);
        }
        if (tile == 0) send_tile(smem.v, smem.v_ring, v_at, params.v, work, 0);
    }
    send_queries(smem, params, q_at, {-1, 0, 0, 0});
}

// ---- the consumers: a warpgroup for 64 rows ----

// Warpgroups issue their products in turn. While one waits for its turn, or for its products, the
// other's softmax runs.
struct Turns {
    int warpgroup;

    __device__ explicit Turns(int warpgroup) : warpgroup(warpgroup) {
        if (kConsumers > 1 && warpgroup == kConsumers - 1) pass();
    }
    __device__ void wait() const {
        if (kConsumers > 1) ptx::named_barrier_sync<2 * kWarpgroup>(1 + warpgroup);
    }
    __device__ void pass() const {
        const int next = warpgroup == kConsumers - 1 ? 0 : warpgroup + 1;
        if (kConsumers > 1) ptx::named_barrier_arrive<2 * kWarpgroup>(1 + next);
    }
};

// A warp is done with a stage once its part of a product is.
template <int Stages>
__device__ inline void release(Ring<Stages>& ring, RingPosition<Stages>& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
    at.advance();
}

// The softmax of a thread's two rows.
struct RowPair {
    OnlineSoftmax rows[2];

    // Takes in one tile of scores and turns them into weights. Returns whether maxima were raised, so
    // that O must shrink by `shrink`.
    __device__ bool exponentiate(Scores& s, float scale_log2, float (&shrink)[2]) {
        float largest[2];
        bool raised = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest[half] = largest_of(s, half) * scale_log2;
            raised |= largest[half] > rows[half].max + kSlack;
        }
        raised = __any_sync(0xffffffffu, raised);
        if (raised) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                shrink[half] = rows[half].raise_max(largest[half]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float shift = rows[half].shift();
            float sum = 0;
#pragma unroll
            for (int i = 2 * half; i < kBlockN / 2; i += 4)
#pragma unroll
                for (int e = i; e < i + 2; ++e) {
                    s[e] = exp2_of(s[e] * scale_log2 - shift);
                    sum += s[e];
                }
            rows[half].sum += sum;
        }
        return raised;
    }

  private:
    __device__ static float largest_of(const Scores& s, int half) {
        float largest = negative_infinity();
#pragma unroll
        for (int i = 2 * half; i < kBlockN / 2; i += 4) {
            largest = fmaxf(largest, fmaxf(s[i], s[i + 1]));
        }
        return lanes_max<4>(largest);
    }
};

struct Consumer {
    Smem& smem;
    const ForwardParams& call;
    const Mask<kCausal> mask;
    const float scale_log2;
    const int warpgroup;
    const Turns turns;
    RingPosition<1> q_at;
    RingPosition<kStages> k_at, v_at;

    __device__ Consumer(Smem& smem, const ForwardParams& call, int warpgroup)
        : smem(smem),
          call(call),
          mask{call.sizes.seqlen_q, call.sizes.seqlen_k},
          scale_log2(call.softmax_scale * kLog2E),
          warpgroup(warpgroup),
          turns(warpgroup) {}

    // The row of Q and O that a thread's half (0: row g, 1: row g + 8) of its fragments belongs to.
    __device__ int row_of(WorkTile work, int half) const {
        return work.first_row + threadIdx.x / 32 * 16 - kWarpgroup / 2 + half * 8 +
               threadIdx.x % 32 / 4;
    }

    // Waits for the queries of the next tile of which any row sees a key. Those of the others have
    // output 0.
    __device__ WorkTile receive() {
        for (;;) {
            smem.q_ring[warpgroup].wait_full(q_at);
            const WorkTile work = smem.work[warpgroup];
            if (!work.exists() || KeyTiles(mask, work.first_row).count > 0) return work;
            __syncwarp();
            release(smem.q_ring[warpgroup], q_at);
            store(WgmmaSums<kDims>{}, RowPair{}, work);
        }
    }

    // Issues the product for the scores of one tile of keys.
    __device__ void issue_scores(Scores& s) {
        smem.k_ring.wait_full(k_at);
        turns.wait();
        issue_product_nt<kDepth, kBlockN>(s, smem.q[warpgroup], smem.k[k_at.stage]);
    }

    // Issues the product that adds a tile's part to the output.
    __device__ void issue_output(WgmmaSums<kDims>& o, const Weights& p) {
        smem.v_ring.wait_full(v_at);
        issue_product_pn<kBlockN, kDims>(o, p, smem.v[v_at.stage]);
        turns.pass();
    }

    template <int Pending>
    __device__ void wait_scores(Scores& s, int tile) {
        wait_product<Pending>(s);
        release(smem.k_ring, k_at);
        if (tile == 0) release(smem.q_ring[warpgroup], q_at);
    }

    __device__ void wait_output(WgmmaSums<kDims>& o) {
        wait_product<0>(o);
        release(smem.v_ring, v_at);
    }

    // Scores of keys that a row does not see become -inf.
    __device__ void apply_mask(Scores& s, WorkTile work, int tile) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first_key = tile * kBlockN + threadIdx.x % 4 * 2;
            const int seen = mask.keys_seen(row_of(work, half)) - first_key;
#pragma unroll
            for (int i = 2 * half; i < kBlockN / 2; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (i / 4 * 8 + e >= seen) s[i + e] = negative_infinity();
                }
        }
    }

    // A tile's first scores and weights, while there is no output to work on.
    __device__ RowPair begin(Weights& p, WorkTile work, int tile) {
        Scores s;
        RowPair softmax;
        float shrink[2];
        issue_scores(s);
        turns.pass();
        wait_scores<0>(s, tile);
        apply_mask(s, work, tile);
        softmax.exponentiate(s, scale_log2, shrink);
        round_to_operand<kBlockN>(p, s);
        return softmax;
    }

    // The scores of one tile of keys at once with the output of the tile before; then the weights
    // of this tile.
    template <bool Masked>
    __device__ void attend(WgmmaSums<kDims>& o, RowPair& softmax, Weights& p, WorkTile work,
                           int tile) {
        Scores s;
        float shrink[2];
        issue_scores(s);
        issue_output(o, p);

        wait_scores<1>(s, tile);
        if (Masked) apply_mask(s, work, tile);
        const bool raised = softmax.exponentiate(s, scale_log2, shrink);
#ifdef WAITK
        if (tile > 0) smem.k_ring.wait_full(k_at);
#endif

        wait_output(o);
        if (raised) rescale(o, shrink);
        round_to_operand<kBlockN>(p, s);
    }

    // The first scores of the next tile of queries at once with the last of a tile's output.
    __device__ RowPair turn_over(WgmmaSums<kDims>& o, const RowPair& softmax, Weights& p,
                                 WorkTile work, WorkTile next, int tile) {
        Scores s;
        RowPair next_softmax;
        float shrink[2];
        issue_scores(s);
        issue_output(o, p);

        wait_scores<1>(s, tile);
        apply_mask(s, next, tile);
        next_softmax.exponentiate(s, scale_log2, shrink);

        wait_output(o);
        round_to_operand<kBlockN>(p, s);
        store(o, softmax, work);
        return next_softmax;
    }

    __device__ void finish(WgmmaSums<kDims>& o, const RowPair& softmax, const Weights& p,
                           WorkTile work) {
        turns.wait();
        issue_output(o, p);
        wait_output(o);
        store(o, softmax, work);
    }

    __device__ static void rescale(WgmmaSums<kDims>& o, const float (&shrink)[2]) {
#pragma unroll
        for (int i = 0; i < kDims / 2; ++i) o[i] *= shrink[i / 2 % 2];
    }

    __device__ void store(const WgmmaSums<kDims>& values, RowPair softmax, WorkTile work) const {
        const auto o = matrix_of<scalar_t>(call.o, work.batch, work.head);
        float* lse = static_cast<float*>(call.lse);
        if (lse) lse += first_row_of(work.batch, work.head, call.sizes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& row_softmax = softmax.rows[half];
            row_softmax.total<4>();
            const int row = row_of(work, half);
            if (row >= call.sizes.seqlen_q) continue;
            if (lse && threadIdx.x % 4 == 0) lse[row] = row_softmax.lse();
            const float scale = row_softmax.normalizer();
#pragma unroll
            for (int i = 2 * half; i < kDims / 2; i += 4) {
                const int col = i / 4 * 8 + threadIdx.x % 4 * 2;
                const float low = values[i] * scale, high = values[i + 1] * scale;
                if (kValueDim % 2 == 0) {
                    if (col < kValueDim) {
                        *reinterpret_cast<unsigned int*>(o.row(row) + col) = round_pair(low, high);
                    }
                } else {
                    if (col < kValueDim) o.row(row)[col] = from_acc<scalar_t>(low);
                    if (col + 1 < kValueDim) o.row(row)[col + 1] = from_acc<scalar_t>(high);
                }
            }
        }
    }
};

__device__ inline void consume(Smem& smem, const Params& params, int warpgroup) {
    Consumer consumer(smem, params.call, warpgroup);
    WorkTile work = consumer.receive();
    if (!work.exists()) return;
    KeyTiles keys(consumer.mask, work.first_row);
    Weights p;
    RowPair softmax = consumer.begin(p, work, keys.count - 1);
    for (;;) {
        WgmmaSums<kDims> o = {};
        int tile = keys.count - 2;
        for (; tile >= keys.unmasked; --tile) consumer.attend<true>(o, softmax, p, work, tile);
        for (; tile >= 0; --tile) consumer.attend<false>(o, softmax, p, work, tile);

        const WorkTile next = consumer.receive();
        if (!next.exists()) return consumer.finish(o, softmax, p, work);
        keys = KeyTiles(consumer.mask, next.first_row);
        softmax = consumer.turn_over(o, softmax, p, work, next, keys.count - 1);
        work = next;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fwd_6_wgmma(const __grid_constant__ Params params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) {
        constexpr int kReaders = kConsumers * kWarpgroup / 32;
        smem.k_ring.init(kReaders);
        smem.v_ring.init(kReaders);
        for (Ring<1>& ring : smem.q_ring) ring.init(kWarpgroup / 32);
        ptx::barrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x < kWarpgroup) {
        ptx::registers_decrease<kProducerRegisters>();
        if (threadIdx.x == 0) produce(smem, params);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        consume(smem, params, threadIdx.x / kWarpgroup - 1);
    }
}
