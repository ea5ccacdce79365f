// fwd_7_fp8: FlashAttention-3 (Shah et al. 2024, section 3.3) on Hopper, operands in 8 bits.
//
// Change from fwd_6_wgmma: Q, K, V and the weights are e4m3, of which tensor cores multiply twice
// as many. Their wgmma reads V with the keys along the rows of memory only, so that a launch before
// turns it; and e4m3 has few exponents, so that weights are kept far above 1.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (...,
//          value_dim), O (batch, seqlen_q, heads, value_dim) of 16 bits; q_descale, k_descale and
//          v_descale (batch, kv_heads), what Q, K and V are to be multiplied with
// Owns     turn_values: block: a tile of values. fwd_7_fp8: block: tile after tile of BLOCK_M
//          queries of one head; warpgroup: 64 of its rows
// Shared   turn_values: its tile. fwd_7_fp8: rings of STAGES K and V tiles; for each warpgroup a
//          ring of QUERY_STAGES Q tiles, and STORE_COLS columns of O on their way out
// Needs    sm_90a; addresses and strides that are multiples of 16 bytes; a workspace
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key
#include "fp8_values.cuh"
#include "schedule.cuh"
#include "wgmma_softmax.cuh"

using out_t = OUT_SCALAR;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kStages = STAGES, kQueryStages = QUERY_STAGES, kStoreCols = STORE_COLS;
constexpr int kConsumers = kBlockM / kWgmmaM;
static_assert((kConsumers + 1) * kWarpgroup == THREADS, "one warpgroup copies, the others compute");
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
constexpr int kTurnThreads = TURN_THREADS;
// Sums of O come in sixteens of columns, as they leave it in 16 bits.
constexpr int kDepth = round_up(kHeadDim, kWgmmaK);
constexpr int kDims = round_up(kValueDim, kWgmmaDepth<out_t>);

struct Params {
    TensorMap q, k, o;
    ForwardParams call;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "the host passes a different struct");

using QueryRows = PanelTile<kWgmmaM, kHeadDim>;
using KeyRows = PanelTile<kBlockN, kHeadDim>;
using Values = ValueTile<kBlockN, kDims>;
using StoredRows = PanelTile<kWgmmaM, kStoreCols, out_t>;

struct Smem {
    KeyRows k[kStages];
    QueryRows q[kConsumers][kQueryStages];
    StoredRows out[kConsumers];
    Values v[kStages];
    Ring<kStages> k_ring, v_ring;
    Ring<kQueryStages> q_ring[kConsumers];
    WorkTile work[kConsumers][kQueryStages];  // which tile the queries are of
    unsigned int v_nan[kStages];              // whether there was NaN in the values
};

// What turn_values leaves to the next launch: tiles of values, whether there was NaN in each, and
// the counter that hands out tiles of queries.
struct Workspace {
    Values* values;
    unsigned int *nan, *counter;
    int tiles;  // of each KV head

    __device__ explicit Workspace(const ForwardParams& call)
        : values(static_cast<Values*>(call.workspace)),
          tiles(ceil_div(call.sizes.seqlen_k, kBlockN)) {
        const long long all =
            static_cast<long long>(call.sizes.batch) * call.sizes.kv_heads * tiles;
        nan = reinterpret_cast<unsigned int*>(values + all);
        counter = nan + all;
    }
    __device__ long long index(const ForwardParams& call, int batch, int kv_head, int tile) const {
        return (static_cast<long long>(batch) * call.sizes.kv_heads + kv_head) * tiles + tile;
    }
};

extern "C" __global__ void __launch_bounds__(kTurnThreads)
    turn_values(const __grid_constant__ Params params) {
    const ForwardParams& call = params.call;
    const Workspace workspace(call);
    if (blockIdx.x == 0 && threadIdx.x == 0) *workspace.counter = 0;
    if (workspace.tiles == 0) return;
    const int tile = blockIdx.x % workspace.tiles, head = blockIdx.x / workspace.tiles;
    const Sequence sequence(call, head / call.sizes.kv_heads);
    const auto from = sequence.keys<const scalar_t>(call.v, head % call.sizes.kv_heads);
    const bool nan =
        turn<kTurnThreads>(workspace.values[blockIdx.x], from, tile * kBlockN, call.sizes.seqlen_k);
    if (threadIdx.x == 0) workspace.nan[blockIdx.x] = nan;
}

using Order = TileOrder<kBlockM, SECTION_BYTES>;
using KeyTiles = KeyTileRange<kBlockM, kBlockN>;
using Scores = WgmmaSums<kBlockN>;
using Weights = WgmmaOperand<kBlockN>;

__device__ inline KeyTiles key_tiles_of(const ForwardParams& call, const WorkTile& work) {
    return KeyTiles(work.sequence(call).mask(call.features), work.first_row);
}

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

__device__ inline void send_keys(Smem& smem, const Params& params, RingPosition<kStages> at,
                                 const WorkTile& work, int tile) {
    smem.k_ring.wait_empty(at);
    ptx::Barrier& full = smem.k_ring.announce(at, KeyRows::kBytes);
    copy_tile(smem.k[at.stage], params.k, full, work.batch, work.kv_head, tile * kBlockN);
}

__device__ inline void send_values(Smem& smem, const Workspace& workspace, long long index,
                                   RingPosition<kStages> at) {
    const unsigned int nan = workspace.nan[index];  // early: the answer takes a while
    smem.v_ring.wait_empty(at);
    smem.v_nan[at.stage] = nan;
    ptx::Barrier& full = smem.v_ring.announce(at, Values::kBytes);
    ptx::copy_bytes(&smem.v[at.stage], &workspace.values[index], Values::kBytes, full);
}

__device__ inline void produce(Smem& smem, const Params& params) {
    const ForwardParams& call = params.call;
    const Workspace workspace(call);
    const Order order(call);
    const TileCounter counter{workspace.counter, order.heads * order.tiles};
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> at;  // a tile of keys and its values have the same place

    unsigned int index = blockIdx.x;
    for (;;) {
        const WorkTile work = order.at(index);
        if (!work.exists()) break;
        index = counter.next();  // early: the answer takes a while
        const KeyTiles keys = key_tiles_of(call, work);
        int tile = keys.end - 1;
        if (!keys.none()) send_keys(smem, params, at, work, tile);
        send_queries(smem, params, q_at, work);
        // Keys are needed a tile ahead of values.
        for (; tile >= keys.begin; --tile) {
            RingPosition<kStages> next = at;
            next.advance();
            if (tile > keys.begin) send_keys(smem, params, next, work, tile - 1);
            send_values(smem, workspace, workspace.index(call, work.batch, work.kv_head, tile), at);
            at = next;
        }
    }
    send_queries(smem, params, q_at, WorkTile::none());
}

// ---- the consumers: a warpgroup for 64 rows ----

// Barriers of parts of the block; __syncthreads has number 0.
enum NamedBarrier { kFirstTurn = 1, kFirstStore = kFirstTurn + kConsumers };

using Turns = TurnsOf<kConsumers, kFirstTurn>;

// A descale of the head that a tile is of; 1 if the call has none.
__device__ inline float descale_of(const ForwardParams& call, const void* descale,
                                   const WorkTile& work) {
    const int index = work.batch * call.sizes.kv_heads + work.kv_head;
    return descale ? static_cast<const float*>(descale)[index] : 1;
}

// What the products of a head are multiplied with to be scores.
__device__ inline float score_scale(const ForwardParams& call, const WorkTile& work) {
    return static_cast<float>(call.softmax_scale) *
           descale_of(call, call.features.q_descale, work) *
           descale_of(call, call.features.k_descale, work);
}

struct Consumer {
    Smem& smem;
    const Params& params;
    const int warpgroup;
    const Turns turns;
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> k_at, v_at;
    // Of the tile that is worked on.
    float softmax_scale = 0;
    Scale scale{0};

    __device__ Consumer(Smem& smem, const Params& params, int warpgroup)
        : smem(smem), params(params), warpgroup(warpgroup), turns(warpgroup) {}

    // The row of Q and O that is the first of a thread's two; the other is 8 below it.
    __device__ int row_of(const WorkTile& work) const {
        unsigned int thread = threadIdx.x;
        ptx::hold(thread);  // or each sum would be kept in a register from tile to tile
        return work.first_row + thread / 32 * 16 - kWarpgroup / 2 + thread % 32 / 4;
    }

    __device__ Mask mask_of(const WorkTile& work) const {
        return work.sequence(params.call).mask(params.call.features);
    }

    // Waits for the queries of the next tile of which any row sees a key. Those of the others have
    // output 0.
    __device__ WorkTile receive() {
        for (;;) {
            smem.q_ring[warpgroup].wait_full(q_at);
            const WorkTile work = smem.work[warpgroup][q_at.stage];
            __syncwarp();
            if (!work.exists() || !key_tiles_of(params.call, work).none()) return work;
            release(smem.q_ring[warpgroup], q_at);
            store(WgmmaSums<kDims>{}, RowPair{}, work);
        }
    }

    // From here on scores are those of this tile's head.
    __device__ void begin(const WorkTile& work) {
        softmax_scale = score_scale(params.call, work);
        scale = Scale(softmax_scale);
    }

    // Issues the product for the scores of one tile of keys.
    __device__ void issue_scores(Scores& s) {
        smem.k_ring.wait_full(k_at);
        issue_product_nt<kDepth, kBlockN>(s, smem.q[warpgroup][q_at.stage], smem.k[k_at.stage]);
    }

    // Issues the product that adds a tile's part to the output.
    __device__ void issue_output(WgmmaSums<kDims>& o, const Weights& p) {
        smem.v_ring.wait_full(v_at);
        issue_product_pv<kBlockN, kDims>(o, p, smem.v[v_at.stage]);
    }

    // The queries are done with once the last tile's scores are there.
    template <int Pending>
    __device__ void wait_scores(Scores& s, bool last) {
        wait_product<Pending>(s);
        release(smem.k_ring, k_at);
        if (last) release(smem.q_ring[warpgroup], q_at);
        if constexpr (kSoftcap) bound(s, softmax_scale, params.call.features.softcap);
    }

    // The output has the part of `tile` now.
    template <int Pending>
    __device__ void wait_output(WgmmaSums<kDims>& o, const WorkTile& work, int tile) {
        wait_product<Pending>(o);
        if (__builtin_expect(smem.v_nan[v_at.stage] != 0, false)) add_nan(o, work, tile);
        __syncwarp();  // all of the warp have read it
        release(smem.v_ring, v_at);
    }

    // A value that is NaN must reach the rows that see its key, whatever their weight, and no
    // other. In the product it was zero.
    __device__ void add_nan(WgmmaSums<kDims>& o, const WorkTile& work, int tile) const {
        const Sequence sequence = work.sequence(params.call);
        const auto v = sequence.keys<const scalar_t>(params.call.v, work.kv_head);
        const Mask mask = mask_of(work);
        const int row = row_of(work);
        for (int i = 0; i < kBlockN; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = tile * kBlockN + i;
                if (!mask.in_range(row + 8 * half, key)) continue;
#pragma unroll
                for (int i = 2 * half; i < kDims / 2; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int dim = i / 4 * 8 + threadIdx.x % 4 * 2 + e;
                        if (dim < kValueDim && !is_finite(v.row(key)[dim]))
                            o[i + e] = __int_as_float(0x7fffffff);
                    }
            }
    }

    __device__ void mask_scores(Scores& s, const WorkTile& work, int tile) const {
        apply_mask(s, mask_of(work), row_of(work), tile * kBlockN, scale.masked());
    }

    // The weights of the first tile of keys that a tile of queries looks at.
    __device__ RowPair first_weights(Weights& p, Scores& s, const WorkTile& work, int tile,
                                     bool last) {
        RowPair softmax;
        wait_scores<0>(s, last);
        mask_scores(s, work, tile);
        softmax.begin(s, scale);
        round_to_weights<kBlockN>(p, s);
        return softmax;
    }

    // The scores of a tile of keys at once with the output of the tile before; then the weights of
    // this tile.
    template <bool Masked>
    __device__ void attend(WgmmaSums<kDims>& o, RowPair& softmax, Weights& p, const WorkTile& work,
                           int tile, bool last) {
        Scores s;
        float shrink[2];
        turns.wait();
        issue_scores(s);
        issue_output(o, p);
        turns.pass();

        wait_scores<1>(s, last);
        if (Masked) mask_scores(s, work, tile);
        const bool raised = softmax.proceed(s, scale, shrink);

        wait_output<0>(o, work, tile + 1);
        if (__builtin_expect(raised, false)) rescale(o, shrink);
        round_to_weights<kBlockN>(p, s);
    }

    // Divides the output by the sums of the weights, and sends it out.
    __device__ void store(const WgmmaSums<kDims>& sums, RowPair softmax, const WorkTile& work) {
        const float v_descale = descale_of(params.call, params.call.features.v_descale, work);
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& row = softmax.rows[half];
            row.total<4>();
            scale[half] = v_descale;
            if constexpr (kSink) scale[half] *= row.add(sink_log2(work.head));
            scale[half] *= row.normalizer();
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
            WgmmaOperand<kCols, out_t> rounded;
            round_to_operand<kCols, out_t>(rounded, part);
            send_out<kCols>(rounded, work, col);
        }
    }

    // The head's sink is one more score of each of its rows.
    __device__ float sink_log2(int head) const {
        return static_cast<const float*>(params.call.features.sink)[head] * float(kLog2E);
    }

    // Sends out some columns of the output through the warpgroup's part of shared memory, once
    // those before have left it.
    template <int Cols>
    __device__ void send_out(const WgmmaOperand<Cols, out_t>& values, const WorkTile& work,
                             int first_col) {
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

    __device__ void store_lse(const RowPair& softmax, const WorkTile& work) const {
        float* lse = static_cast<float*>(params.call.lse);
        if (!lse || threadIdx.x % 4 != 0) return;
        const Sequence sequence = work.sequence(params.call);
        lse += sequence.first_row(work.head, params.call.sizes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_of(work) + 8 * half;
            if (row < sequence.seqlen_q) lse[row] = softmax.rows[half].lse();
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
    turns.wait();
    consumer.issue_scores(s);
    turns.pass();
    for (;;) {
        WgmmaSums<kDims> o = {};
        const KeyTiles keys = key_tiles_of(params.call, work);
        int tile = keys.end - 1;
        const auto last = [&] { return tile == keys.begin; };
        consumer.begin(work);
        RowPair softmax = consumer.first_weights(p, s, work, tile, last());
        --tile;
        for (; tile >= max(keys.whole_end, keys.begin); --tile)
            consumer.attend<true>(o, softmax, p, work, tile, last());
        for (; tile >= max(keys.whole_begin, keys.begin); --tile)
            consumer.attend<false>(o, softmax, p, work, tile, last());
        if constexpr (kWindow) {
            for (; tile >= keys.begin; --tile)
                consumer.attend<true>(o, softmax, p, work, tile, last());
        }

        const WorkTile next = consumer.receive();
        if (!next.exists()) {
            turns.wait();
            consumer.issue_output(o, p);
            turns.pass();
            consumer.wait_output<0>(o, work, keys.begin);
            return consumer.store(o, softmax, work);
        }
        // The first scores of the next tile at once with the last of this one's output.
        turns.wait();
        consumer.issue_output(o, p);
        consumer.issue_scores(s);
        turns.pass();
        consumer.wait_output<1>(o, work, keys.begin);
        consumer.store(o, softmax, work);
        work = next;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fwd_7_fp8(const __grid_constant__ Params params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) {
        const TensorMap* const maps[] = {&params.q, &params.k, &params.o};
        for (const TensorMap* map : maps) ptx::prefetch_tensor_map(*map);
        constexpr int kWarps = kWarpgroup / 32;
        smem.k_ring.init(kConsumers * kWarps);
        smem.v_ring.init(kConsumers * kWarps);
        for (auto& ring : smem.q_ring) ring.init(kWarps);
        ptx::barrier_init_fence();
    }
    __syncthreads();

    // The same for a warp in the compiler's eyes too: what depends on it goes to uniform registers.
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        if (threadIdx.x == 0) produce(smem, params);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        consume(smem, params, warpgroup - 1);
        ptx::wait_stores_read();
    }
}
