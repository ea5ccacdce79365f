// fwd_6_wgmma: FlashAttention-3 (Shah et al. 2024, Algorithms 1 and 2) on Hopper.
//
// Change from fwd_5_mma: a thread that does nothing but copy, by the copy engine, and warpgroups
// that do nothing but compute, by wgmma, which reads its operands from shared memory and runs
// beside what issued it. While the tensor cores work on the next scores and the last output, a
// warpgroup exponentiates the scores that it has; and warpgroups take turns, so that the products
// of one run during the softmax of the other. A block stays for many tiles.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (...,
//          value_dim)
// Owns     block: tile after tile of BLOCK_M queries of one head; warpgroup: 64 of its rows
// Shared   rings of STAGES K and V tiles; for each warpgroup a ring of QUERY_STAGES Q tiles, and
//          STORE_COLS columns of O on their way out
// Needs    sm_90a; addresses and strides that are multiples of 16 bytes
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key
#include "online_softmax.cuh"
#include "schedule.cuh"
#include "wgmma_tiles.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kStages = STAGES, kQueryStages = QUERY_STAGES, kStoreCols = STORE_COLS;
constexpr int kConsumers = kBlockM / kWgmmaM;
static_assert((kConsumers + 1) * kWarpgroup == THREADS, "one warpgroup copies, the others compute");
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
constexpr int kDepth = round_up(kHeadDim, kWgmmaK), kDims = round_up(kValueDim, kWgmmaK);

struct Params {
    TensorMap q, k, v, o;
    ForwardParams call;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "the host passes a different struct");

// Warps beside the producer that look for NaN and infinity where a mask cuts through a tile.
constexpr int kInspectors = kCausal ? kWarpgroup / 32 - 1 : 0;

using QueryRows = PanelTile<kWgmmaM, kHeadDim>;
using KeyTile = PanelTile<kBlockN, kHeadDim>;
using ValueTile = PanelTile<kBlockN, kValueDim>;
using StoredRows = PanelTile<kWgmmaM, kStoreCols>;

struct Smem {
    KeyTile k[kStages];
    ValueTile v[kStages];
    QueryRows q[kConsumers][kQueryStages];
    StoredRows out[kConsumers];
    Ring<kStages> k_ring, v_ring;
    Ring<kQueryStages> q_ring[kConsumers];
    ptx::Barrier v_inspected[kStages];
    WorkTile work[kConsumers][kQueryStages];             // which tile the queries are of
    unsigned int v_nonfinite[kStages][kWarpgroup / 32];  // what each inspector found
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

__device__ inline void send_queries(Smem& smem, const Params& params,
                                    RingPosition<kQueryStages>& at, WorkTile work) {
#pragma unroll 1  // registers are what a producer lacks
    for (int w = 0; w < kConsumers; ++w) {
        smem.q_ring[w].wait_empty(at);
        smem.work[w][at.stage] = work;
        ptx::Barrier& full = smem.q_ring[w].announce(at, work.exists() ? QueryRows::kBytes : 0);
        if (work.exists()) {
            copy_tile(smem.q[w][at.stage], params.q, full, work.batch, work.head,
                      work.first_row + w * kWgmmaM);
        }
    }
    at.advance();
}

template <class Tile>
__device__ inline void send_tile(Tile (&tiles)[kStages], Ring<kStages>& ring,
                                 RingPosition<kStages> at, const TensorMap& map, WorkTile work,
                                 int tile) {
    ring.wait_empty(at);
    ptx::Barrier& full = ring.announce(at, Tile::kBytes);
    copy_tile(tiles[at.stage], map, full, work.batch, work.kv_head, tile * kBlockN);
}

__device__ inline void produce(Smem& smem, const Params& params) {
    const Sizes& sizes = params.call.sizes;
    const Mask<kCausal> mask{sizes.seqlen_q, sizes.seqlen_k};
    const Order order(sizes);
    const TileCounter counter{static_cast<unsigned int*>(params.call.workspace),
                              order.heads * order.tiles};
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> at;  // a tile of keys and its values have the same place

    unsigned int index = blockIdx.x;
    for (;;) {
        const WorkTile work = order.at(index);
        if (!work.exists()) break;
        index = counter.next();  // early: the answer takes a while
        int tile = KeyTiles(mask, work.first_row).count - 1;
        if (tile >= 0) send_tile(smem.k, smem.k_ring, at, params.k, work, tile);
        send_queries(smem, params, q_at, work);
        // Keys are needed a tile ahead of values.
        for (; tile >= 0; --tile) {
            RingPosition<kStages> next = at;
            next.advance();
            if (tile > 0) send_tile(smem.k, smem.k_ring, next, params.k, work, tile - 1);
            send_tile(smem.v, smem.v_ring, at, params.v, work, tile);
            at = next;
        }
    }
    send_queries(smem, params, q_at, {-1, 0, 0, 0});
}

// A warp is done with a stage: it has read it, or its part of a product has.
template <int Stages>
__device__ inline void release(Ring<Stages>& ring, RingPosition<Stages>& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
    at.advance();
}

// ---- the inspectors: the warps beside the producer ----

// Says of every tile of values that a mask cuts through whether there is NaN or infinity in it,
// while the consumers still work on its scores.
__device__ inline void inspect(Smem& smem, const Params& params, int inspector) {
    const Mask<kCausal> mask{params.call.sizes.seqlen_q, params.call.sizes.seqlen_k};
    const int lane = threadIdx.x % 32;
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> v_at;
    for (;;) {
        smem.q_ring[0].wait_full(q_at);
        const WorkTile work = smem.work[0][q_at.stage];
        __syncwarp();
        release(smem.q_ring[0], q_at);
        if (!work.exists()) return;

        const KeyTiles keys(mask, work.first_row);
        for (int tile = keys.count - 1; tile >= 0; --tile) {
            smem.v_ring.wait_full(v_at);
            bool found = false;
            if (tile >= keys.unmasked) {
                constexpr int kLookers = kInspectors == 0 ? 32 : kInspectors * 32;
                found = finds_nonfinite<kLookers>(smem.v[v_at.stage], inspector * 32 + lane);
            }
            found = __any_sync(0xffffffffu, found);
            if (lane == 0) {
                smem.v_nonfinite[v_at.stage][inspector] = found;
                ptx::barrier_arrive(smem.v_inspected[v_at.stage]);
            }
            release(smem.v_ring, v_at);
        }
    }
}

// ---- the consumers: a warpgroup for 64 rows ----

// Barriers of parts of the block; __syncthreads has number 0.
enum NamedBarrier {
    kFirstTurn = 1,
    kFirstStore = kFirstTurn + kConsumers,
    kAllConsumers = kFirstStore + kConsumers
};

// Warpgroups issue their products in turn. While one waits for its turn, or for its products, the
// other's softmax runs.
struct Turns {
    int warpgroup;

    __device__ explicit Turns(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == kConsumers - 1) pass();
    }
    __device__ void wait() const {
        if (kConsumers > 1) ptx::named_barrier_sync<2 * kWarpgroup>(kFirstTurn + warpgroup);
    }
    __device__ void pass() const {
        const int next = warpgroup == kConsumers - 1 ? 0 : warpgroup + 1;
        if (kConsumers > 1) ptx::named_barrier_arrive<2 * kWarpgroup>(kFirstTurn + next);
    }
};

// What turns a product of a query and a key into a score in units of log 2.
struct Scale {
    float factor;   // never 0, by which -inf would become NaN
    float inverse;  // NaN if the largest score is the smallest product

    __device__ explicit Scale(double softmax_scale)
        : factor(softmax_scale == 0 ? kTiny : softmax_scale * kLog2E),
          inverse(factor > 0 ? 1 / factor : __int_as_float(0x7fffffff)) {}

    // The product whose score is -inf.
    __device__ float masked() const {
        return factor < 0 ? -negative_infinity() : negative_infinity();
    }

  private:
    static constexpr float kTiny = 1e-30f;
};

// The softmax of a thread's two rows.
struct RowPair {
    OnlineSoftmax rows[2];

    // Takes in the first tile of products and turns them into weights.
    __device__ void begin(Scores& s, Scale scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows[half].max = lanes_max<4>(largest_of(s, half, scale));
        }
        exponentiate(s, scale);
    }

    // Takes in one tile of products and turns them into weights. Returns whether maxima were
    // raised, so that O must shrink by `shrink`.
    __device__ bool proceed(Scores& s, Scale scale, float (&shrink)[2]) {
        const bool raised = __any_sync(0xffffffffu, exceeds(s, 0, scale) | exceeds(s, 1, scale));
        if (__builtin_expect(raised, false)) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                shrink[half] = rows[half].raise_max(lanes_max<4>(largest_of(s, half, scale)));
            }
        }
        exponentiate(s, scale);
        return raised;
    }

  private:
    __device__ void exponentiate(Scores& s, Scale scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float shift = rows[half].shift();
            float sum = 0;
#pragma unroll
            for (int i = 2 * half; i < kBlockN / 2; i += 4)
#pragma unroll
                for (int e = i; e < i + 2; ++e) {
                    s[e] = exp2_of(s[e] * scale.factor - shift);
                    sum += s[e];
                }
            rows[half].sum += sum;
        }
    }

    // Whether one of this thread's products in a row may pass the maximum by more than the slack.
    // Floats compare like integers unless both are negative, and three integers are compared at
    // once.
    __device__ bool exceeds(const Scores& s, int half, Scale scale) const {
        const float limit = (rows[half].max + kSlack) * scale.inverse;
        int largest = __float_as_int(s[2 * half]);
#pragma unroll
        for (int i = 2 * half; i < kBlockN / 2; i += 4) {
            largest = max(max(largest, __float_as_int(s[i])), __float_as_int(s[i + 1]));
        }
        return !(limit >= 0) | (largest > __float_as_int(limit));
    }

    __device__ static float largest_of(const Scores& s, int half, Scale scale) {
        const bool mirrored = scale.factor < 0;
        float largest = negative_infinity();
#pragma unroll
        for (int i = 2 * half; i < kBlockN / 2; i += 4) {
            largest = fmaxf(largest, mirrored ? -s[i] : s[i]);
            largest = fmaxf(largest, mirrored ? -s[i + 1] : s[i + 1]);
        }
        return largest * fabsf(scale.factor);
    }
};

struct Consumer {
    Smem& smem;
    const Params& params;
    const Mask<kCausal> mask;
    const Scale scale;
    const int warpgroup;
    const Turns turns;
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> k_at, v_at;

    __device__ Consumer(Smem& smem, const Params& params, int warpgroup)
        : smem(smem),
          params(params),
          mask{params.call.sizes.seqlen_q, params.call.sizes.seqlen_k},
          scale(params.call.softmax_scale),
          warpgroup(warpgroup),
          turns(warpgroup) {}

    // The row of Q and O that a thread's half (0: row g, 1: row g + 8) of its fragments belongs to.
    __device__ int row_of(WorkTile work, int half) const {
        unsigned int thread = threadIdx.x;
        ptx::hold(thread);  // or each sum would be kept in a register from tile to tile
        return work.first_row + thread / 32 * 16 - kWarpgroup / 2 + half * 8 + thread % 32 / 4;
    }

    // Waits for the queries of the next tile of which any row sees a key. Those of the others have
    // output 0.
    __device__ WorkTile receive() {
        for (;;) {
            smem.q_ring[warpgroup].wait_full(q_at);
            const WorkTile work = smem.work[warpgroup][q_at.stage];
            if (!work.exists() || KeyTiles(mask, work.first_row).count > 0) return work;
            __syncwarp();
            release(smem.q_ring[warpgroup], q_at);
            store(WgmmaSums<kDims>{}, RowPair{}, work);
        }
    }

    // Issues the product for the scores of one tile of keys.
    __device__ void issue_scores(Scores& s) {
        smem.k_ring.wait_full(k_at);
        issue_product_nt<kDepth, kBlockN>(s, smem.q[warpgroup][q_at.stage], smem.k[k_at.stage]);
    }

    // Issues the product that adds a tile's part to the output.
    __device__ void issue_output(WgmmaSums<kDims>& o, const Weights& p) {
        smem.v_ring.wait_full(v_at);
        issue_product_pn<kBlockN, kDims>(o, p, smem.v[v_at.stage]);
    }

    template <int Pending>
    __device__ void wait_scores(Scores& s, int tile) {
        wait_product<Pending>(s);
        release(smem.k_ring, k_at);
        if (tile == 0) release(smem.q_ring[warpgroup], q_at);
    }

    template <int Pending>
    __device__ void wait_output(WgmmaSums<kDims>& o) {
        wait_product<Pending>(o);
        release(smem.v_ring, v_at);
    }

    // Scores of keys that a row does not see become -inf.
    __device__ void apply_mask(Scores& s, WorkTile work, int tile) const {
        const float masked = scale.masked();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first_key = tile * kBlockN + threadIdx.x % 4 * 2;
            const int seen = mask.keys_seen(row_of(work, half)) - first_key;
#pragma unroll
            for (int i = 2 * half; i < kBlockN / 2; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (i / 4 * 8 + e >= seen) s[i + e] = masked;
                }
        }
    }

    // The weights of the first tile of keys that a tile of queries looks at.
    __device__ RowPair first_weights(WgmmaSums<kDims>& o, Weights& p, Scores& s, WorkTile work,
                                     int tile) {
        RowPair softmax;
        wait_scores<0>(s, tile);
        apply_mask(s, work, tile);
        softmax.begin(s, scale);
        round_to_operand<kBlockN>(p, s);
        if (kCausal) take_out_nonfinite(o, work, tile);
        return softmax;
    }

    // The scores of a tile of keys at once with the output of the tile before; then the weights of
    // this tile.
    template <bool Masked>
    __device__ void attend(WgmmaSums<kDims>& o, RowPair& softmax, Weights& p, WorkTile work,
                           int tile) {
        Scores s;
        float shrink[2];
        turns.wait();
        issue_scores(s);
        issue_output(o, p);
        turns.pass();

        wait_scores<1>(s, tile);
        if (Masked) apply_mask(s, work, tile);
        const bool raised = softmax.proceed(s, scale, shrink);

        wait_output<0>(o);
        if (__builtin_expect(raised, false)) rescale(o, shrink);
        round_to_operand<kBlockN>(p, s);
        if (kCausal && Masked) take_out_nonfinite(o, work, tile);
    }

    // Where a mask cuts through a tile, a value that is NaN or infinite must reach the rows that
    // see its key and no other; but in the product 0 * NaN is NaN. Such values are added here to
    // the outputs of the rows that see them, whatever their weight, and are zero in the product.
    __device__ void take_out_nonfinite(WgmmaSums<kDims>& o, WorkTile work, int tile) {
        wait_for(smem.v_inspected[v_at.stage], v_at.parity);
        unsigned int found = 0;
#pragma unroll
        for (int i = 0; i < kInspectors; ++i) found |= smem.v_nonfinite[v_at.stage][i];
        if (!found) return;

        ValueTile& v = smem.v[v_at.stage];
        for (int key = 0; key < kBlockN; ++key)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (tile * kBlockN + key >= mask.keys_seen(row_of(work, half))) continue;
#pragma unroll
                for (int i = 2 * half; i < kDims / 2; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const scalar_t value = *v.at(key, i / 4 * 8 + threadIdx.x % 4 * 2 + e);
                        if (!is_finite(value)) o[i + e] += to_acc(value);
                    }
            }
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
        clear_nonfinite<kWarpgroup>(v);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
    }

    __device__ static void rescale(WgmmaSums<kDims>& o, const float (&shrink)[2]) {
#pragma unroll
        for (int i = 0; i < kDims / 2; ++i) o[i] *= shrink[i / 2 % 2];
    }

    // Divides the output by the sums of the weights, and sends it out.
    __device__ void store(const WgmmaSums<kDims>& sums, RowPair softmax, WorkTile work) {
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            softmax.rows[half].total<4>();
            scale[half] = softmax.rows[half].normalizer();
        }
        store_lse(softmax, work);
#pragma unroll
        for (int col = 0; col < kDims; col += kStoreCols) {
            constexpr int kCols = min_of(kStoreCols, kDims);
            WgmmaSums<kCols> part = {};
#pragma unroll
            for (int i = 0; i < kCols / 2 && col / 2 + i < kDims / 2; ++i) {
                part[i] = sums[col / 2 + i] * scale[i / 2 % 2];
            }
            WgmmaOperand<kCols> rounded;
            round_to_operand<kCols>(rounded, part);
            send_out<kCols>(rounded, work, col);
        }
    }

    // Sends out some columns of the output through the warpgroup's part of shared memory, once
    // those before have left it.
    template <int Cols>
    __device__ void send_out(const WgmmaOperand<Cols>& values, WorkTile work, int first_col) {
        const bool leader = threadIdx.x % kWarpgroup == 0;
        StoredRows& rows = smem.out[warpgroup];
        if (leader) ptx::wait_stores_read();
        ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup);
        write_rows<Cols>(rows, values, threadIdx.x % kWarpgroup / 32 * 16);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup);
        if (leader) {
            store_tile(params.o, rows, work.batch, work.head, work.first_row + warpgroup * kWgmmaM,
                       first_col);
        }
    }

    __device__ void store_lse(const RowPair& softmax, WorkTile work) const {
        float* lse = static_cast<float*>(params.call.lse);
        if (!lse || threadIdx.x % 4 != 0) return;
        lse += first_row_of(work.batch, work.head, params.call.sizes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_of(work, half);
            if (row < params.call.sizes.seqlen_q) lse[row] = softmax.rows[half].lse();
        }
    }
};

__device__ inline void consume(Smem& smem, const Params& params, int warpgroup) {
    Consumer consumer(smem, params, warpgroup);
    const Turns& turns = consumer.turns;
    Scores s;
    Weights p;

    WorkTile work = consumer.receive();
    if (!work.exists()) return;
    KeyTiles keys(consumer.mask, work.first_row);
    turns.wait();
    consumer.issue_scores(s);
    turns.pass();
    for (;;) {
        WgmmaSums<kDims> o = {};
        RowPair softmax = consumer.first_weights(o, p, s, work, keys.count - 1);
        int tile = keys.count - 2;
        for (; tile >= keys.unmasked; --tile) consumer.attend<true>(o, softmax, p, work, tile);
        for (; tile >= 0; --tile) consumer.attend<false>(o, softmax, p, work, tile);

        const WorkTile next = consumer.receive();
        if (!next.exists()) {
            turns.wait();
            consumer.issue_output(o, p);
            turns.pass();
            consumer.wait_output<0>(o);
            return consumer.store(o, softmax, work);
        }
        // The first scores of the next tile at once with the last of this one's output.
        turns.wait();
        consumer.issue_output(o, p);
        consumer.issue_scores(s);
        turns.pass();
        consumer.wait_output<1>(o);
        consumer.store(o, softmax, work);
        work = next;
        keys = KeyTiles(consumer.mask, work.first_row);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fwd_6_wgmma(const __grid_constant__ Params params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) {
        const TensorMap* const maps[] = {&params.q, &params.k, &params.v, &params.o};
        for (const TensorMap* map : maps) {
            ptx::prefetch_tensor_map(*map);
        }
        constexpr int kWarps = kWarpgroup / 32;
        smem.k_ring.init(kConsumers * kWarps);
        smem.v_ring.init(kConsumers * kWarps + kInspectors);
        for (int w = 0; w < kConsumers; ++w)
            smem.q_ring[w].init(kWarps + (w == 0 ? kInspectors : 0));
        for (ptx::Barrier& barrier : smem.v_inspected)
            ptx::barrier_init(barrier, kInspectors == 0 ? 1 : kInspectors);
        ptx::barrier_init_fence();
    }
    __syncthreads();

    const int warpgroup = threadIdx.x / kWarpgroup;
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        const int inspector = static_cast<int>(threadIdx.x) / 32 - 1;
        if (threadIdx.x == 0) produce(smem, params);
        if (inspector >= 0 && inspector < kInspectors) inspect(smem, params, inspector);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        consume(smem, params, warpgroup - 1);
        ptx::wait_stores_read();
    }
}
