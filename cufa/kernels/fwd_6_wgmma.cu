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
#include "schedule.cuh"
#include "wgmma_softmax.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kStages = STAGES, kQueryStages = QUERY_STAGES, kStoreCols = STORE_COLS;
constexpr int kConsumers = kBlockM / kWgmmaM;
// With one stage of queries two warpgroups would wait for the next ones together; of three, one
// computes meanwhile.
constexpr bool kOutputFirst = kQueryStages == 1 && kConsumers <= 2;
static_assert((kConsumers + 1) * kWarpgroup == THREADS, "one warpgroup copies, the others compute");
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
constexpr int kDepth = round_up(kHeadDim, kWgmmaK), kDims = round_up(kValueDim, kWgmmaK);

struct Params {
    TensorMap q, k, v, o;
    ForwardParams call;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "the host passes a different struct");

// Whether a tile of keys may have some that count for none or not for all of the rows, and yet be
// in memory: beyond the last key of all, the copy engine fills in zeros.
constexpr bool kCutTiles = kRangeMask || kPacked || kUsedKeys;
// Warps beside the producer that look for NaN and infinity in those tiles.
constexpr int kInspectors = kCutTiles ? kWarpgroup / 32 - 1 : 0;

using QueryRows = PanelTile<kWgmmaM, kHeadDim>;
using KeyRows = PanelTile<kBlockN, kHeadDim>;
using ValueRows = PanelTile<kBlockN, kValueDim>;
using StoredRows = PanelTile<kWgmmaM, kStoreCols>;

struct Smem {
    KeyRows k[kStages];
    ValueRows v[kStages];
    QueryRows q[kConsumers][kQueryStages];
    StoredRows out[kConsumers];
    Ring<kStages> k_ring, v_ring;
    Ring<kQueryStages> q_ring[kConsumers];
    ptx::Barrier v_inspected[kStages];
    WorkTile work[kConsumers][kQueryStages];             // which tile the queries are of
    unsigned int v_nonfinite[kStages][kWarpgroup / 32];  // what each inspector found
};

using Order = TileOrder<kBlockM, SECTION_BYTES>;
using Scores = WgmmaSums<kBlockN>;
using Weights = WgmmaOperand<kBlockN>;

using KeyTiles = KeyTileRange<kBlockM, kBlockN>;

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
            copy_tile(smem.q[w][at.stage], params.q, full, kPacked ? 0 : work.batch, work.head,
                      work.sequence(params.call).first_q + work.first_row + w * kWgmmaM);
        }
    }
    at.advance();
}

template <class Tile>
__device__ inline void send_tile(Tile (&tiles)[kStages], Ring<kStages>& ring,
                                 RingPosition<kStages> at, const TensorMap& map, WorkTile work,
                                 int first_key) {
    ring.wait_empty(at);
    ptx::Barrier& full = ring.announce(at, Tile::kBytes);
    copy_tile(tiles[at.stage], map, full, kPacked ? 0 : work.batch, work.kv_head, first_key);
}

// A block asks for its next tile of queries when this many tiles of keys are left of the one that
// it has: the answer takes a while, but whoever asks early gets long work that others would be done
// with sooner.
constexpr int kAskAhead = 4;

__device__ inline void produce(Smem& smem, const Params& params) {
    const Order order(params.call);
    const TileCounter counter{static_cast<unsigned int*>(params.call.workspace),
                              order.heads * order.tiles};
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> at;  // a tile of keys and its values have the same place

    unsigned int index = blockIdx.x;
    for (;;) {
        const WorkTile work = order.at(index);
        if (!work.exists()) break;
        const Sequence sequence = work.sequence(params.call);
        if (kPacked && work.first_row >= sequence.seqlen_q) {
            index = counter.next();
            continue;
        }
        const KeyTiles keys = key_tiles_of(params.call, work);
        const int first_key = sequence.first_k;
        int tile = keys.end - 1;
        if (!keys.none())
            send_tile(smem.k, smem.k_ring, at, params.k, work, first_key + tile * kBlockN);
        send_queries(smem, params, q_at, work);
        // Keys are needed a tile ahead of values.
        const auto send_down_to = [&](int begin) {
            for (; tile >= begin; --tile) {
                RingPosition<kStages> next = at;
                next.advance();
                const int key = first_key + tile * kBlockN;
                if (tile > keys.begin)
                    send_tile(smem.k, smem.k_ring, next, params.k, work, key - kBlockN);
                send_tile(smem.v, smem.v_ring, at, params.v, work, key);
                at = next;
            }
        };
        send_down_to(keys.begin + kAskAhead);
        index = counter.next();
        send_down_to(keys.begin);
    }
    send_queries(smem, params, q_at, WorkTile::none());
}

// ---- the inspectors: the warps beside the producer ----

// Says of every tile of values that a mask cuts through whether there is NaN or infinity in it,
// while the consumers still work on its scores.
__device__ inline void inspect(Smem& smem, const Params& params, int inspector) {
    const int lane = threadIdx.x % 32;
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> v_at;
    for (;;) {
        smem.q_ring[0].wait_full(q_at);
        const WorkTile work = smem.work[0][q_at.stage];
        __syncwarp();
        release(smem.q_ring[0], q_at);
        if (!work.exists()) return;

        const KeyTiles keys = key_tiles_of(params.call, work);
        for (int tile = keys.end - 1; tile >= keys.begin; --tile) {
            smem.v_ring.wait_full(v_at);
            bool found = false;
            if (!keys.is_whole(tile)) {
                constexpr int kLookers = kInspectors == 0 ? 32 : kInspectors * 32;
                found = finds_nonfinite<kLookers>(smem.v[v_at.stage], inspector * 32 + lane);
            }
            found = __any_sync(0xffffffffu, found);
            __syncwarp();  // a vote says nothing of what was read
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

using Turns = TurnsOf<kConsumers, kFirstTurn>;

struct Consumer {
    Smem& smem;
    const Params& params;
    const Scale scale;
    const int warpgroup;
    const Turns turns;
    RingPosition<kQueryStages> q_at;
    RingPosition<kStages> k_at, v_at;

    __device__ Consumer(Smem& smem, const Params& params, int warpgroup)
        : smem(smem),
          params(params),
          scale(params.call.softmax_scale),
          warpgroup(warpgroup),
          turns(warpgroup) {}

    // The row of Q and O that a thread's half (0: row g, 1: row g + 8) of its fragments belongs to.
    __device__ int row_of(WorkTile work, int half) const {
        unsigned int thread = threadIdx.x;
        ptx::hold(thread);  // or each sum would be kept in a register from tile to tile
        return work.first_row + thread / 32 * 16 - kWarpgroup / 2 + half * 8 + thread % 32 / 4;
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

    // The queries are done with once the last tile's scores are there.
    template <int Pending>
    __device__ void wait_scores(Scores& s, bool last) {
        wait_product<Pending>(s);
        release(smem.k_ring, k_at);
        if (last) release(smem.q_ring[warpgroup], q_at);
        if constexpr (kSoftcap) bound(s, params.call.softmax_scale, params.call.features.softcap);
    }

    template <int Pending>
    __device__ void wait_output(WgmmaSums<kDims>& o) {
        wait_product<Pending>(o);
        release(smem.v_ring, v_at);
    }

    __device__ void mask_scores(Scores& s, WorkTile work, int tile) const {
        apply_mask(s, mask_of(work), row_of(work, 0), tile * kBlockN, scale.masked());
    }

    // The weights of the first tile of keys that a tile of queries looks at.
    __device__ RowPair first_weights(WgmmaSums<kDims>& o, Weights& p, Scores& s, WorkTile work,
                                     int tile, bool last) {
        RowPair softmax;
        wait_scores<0>(s, last);
        mask_scores(s, work, tile);
        softmax.begin(s, scale);
        round_to_operand<kBlockN>(p, s);
        if (kCutTiles) take_out_nonfinite(o, work, tile);
        return softmax;
    }

    // The scores of a tile of keys at once with the output of the tile before; then the weights of
    // this tile.
    template <bool Masked>
    __device__ void attend(WgmmaSums<kDims>& o, RowPair& softmax, Weights& p, WorkTile work,
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

        wait_output<0>(o);
        if (__builtin_expect(raised, false)) rescale(o, shrink);
        round_to_operand<kBlockN>(p, s);
        if (kCutTiles && Masked) take_out_nonfinite(o, work, tile);
    }

    // All tiles of keys, the first one's scores being under way. What is left to do is the output
    // of the last.
    __device__ RowPair attend_to_all(WgmmaSums<kDims>& o, Weights& p, Scores& s, WorkTile work,
                                     KeyTiles keys) {
        int tile = keys.end - 1;
        const auto last = [&] { return tile == keys.begin; };
        RowPair softmax = first_weights(o, p, s, work, tile, last());
        --tile;
        for (; tile >= max(keys.whole_end, keys.begin); --tile)
            attend<true>(o, softmax, p, work, tile, last());
        for (; tile >= max(keys.whole_begin, keys.begin); --tile)
            attend<false>(o, softmax, p, work, tile, last());
        if constexpr (kWindow) {
            for (; tile >= keys.begin; --tile) attend<true>(o, softmax, p, work, tile, last());
        }
        return softmax;
    }

    __device__ void issue_first_scores(Scores& s) {
        turns.wait();
        issue_scores(s);
        turns.pass();
    }

    __device__ void finish_output(WgmmaSums<kDims>& o, const Weights& p) {
        turns.wait();
        issue_output(o, p);
        turns.pass();
        wait_output<0>(o);
    }

    // Where a mask cuts through a tile, a value that is NaN or infinite must reach the rows that
    // see its key and no other; but in the product 0 * NaN is NaN. Such values are added here to
    // the outputs of the rows that see them, whatever their weight, and are zero in the product.
    __device__ void take_out_nonfinite(WgmmaSums<kDims>& o, WorkTile work, int tile) {
        wait_for(smem.v_inspected[v_at.stage], v_at.parity, v_at.stage);
        unsigned int found = 0;
#pragma unroll
        for (int i = 0; i < kInspectors; ++i) found |= smem.v_nonfinite[v_at.stage][i];
        if (!found) return;

        ValueRows& v = smem.v[v_at.stage];
        const Mask mask = mask_of(work);
        for (int key = 0; key < kBlockN; ++key)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!mask.in_range(row_of(work, half), tile * kBlockN + key)) continue;
#pragma unroll
                for (int i = 2 * half; i < kDims / 2; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const scalar_t value = *v.at(key, i / 4 * 8 + threadIdx.x % 4 * 2 + e);
                        if (!is_finite(value)) o[i + e] += to_acc(value);
                    }
            }
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
        clear_nonfinite<kConsumers * kWarpgroup>(v, threadIdx.x - kWarpgroup);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
    }

    // Divides the output by the sums of the weights, and sends it out.
    __device__ void store(const WgmmaSums<kDims>& sums, RowPair softmax, WorkTile work) {
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            OnlineSoftmax& row = softmax.rows[half];
            row.total<4>();
            scale[half] = 1;
            if constexpr (kSink) scale[half] = row.add(sink_log2(work.head));
            scale[half] *= row.sum == 0 ? 0 : ptx::reciprocal_fast(row.sum);
        }
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
        store_lse(softmax, work);  // last: the fence before a copy waits for what was written
    }

    // The head's sink is one more score of each of its rows.
    __device__ float sink_log2(int head) const {
        return static_cast<const float*>(params.call.features.sink)[head] * float(kLog2E);
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
        const Sequence sequence = work.sequence(params.call);
        const int row = work.first_row + warpgroup * kWgmmaM;
        if (kPacked && row + kWgmmaM > sequence.seqlen_q) {
            // The copy engine would write beyond the sequence.
            write_first_rows<kValueDim, kWarpgroup>(
                sequence.queries<scalar_t>(params.call.o, work.head), rows, sequence.seqlen_q - row,
                row, first_col, threadIdx.x % kWarpgroup);
        } else if (leader) {
            store_tile(params.o, rows, kPacked ? 0 : work.batch, work.head, sequence.first_q + row,
                       first_col);
        }
    }

    __device__ void store_lse(const RowPair& softmax, WorkTile work) const {
        float* lse = static_cast<float*>(params.call.lse);
        if (!lse || threadIdx.x % 4 != 0) return;
        const Sequence sequence = work.sequence(params.call);
        lse += sequence.first_row(work.head, params.call.sizes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_of(work, half);
            if (row < sequence.seqlen_q) lse[row] = softmax.rows[half].lse();
        }
    }
};

__device__ inline void consume(Smem& smem, const Params& params, int warpgroup) {
    Consumer consumer(smem, params, warpgroup);
    Scores s;
    Weights p;

    WorkTile work = consumer.receive();
    if (!work.exists()) return;
    KeyTiles keys = key_tiles_of(params.call, work);
    consumer.issue_first_scores(s);
    for (;;) {
        WgmmaSums<kDims> o = {};
        const RowPair softmax = consumer.attend_to_all(o, p, s, work, keys);
        if constexpr (kOutputFirst) {
            // The next queries come while the output is on its way.
            consumer.finish_output(o, p);
            consumer.store(o, softmax, work);
            work = consumer.receive();
            if (!work.exists()) return;
            keys = key_tiles_of(params.call, work);
            consumer.issue_first_scores(s);
        } else {
            const WorkTile next = consumer.receive();
            if (!next.exists()) {
                consumer.finish_output(o, p);
                return consumer.store(o, softmax, work);
            }
            // They are here: the first scores of the next tile at once with the last of this one's
            // output.
            consumer.turns.wait();
            consumer.issue_output(o, p);
            consumer.issue_scores(s);
            consumer.turns.pass();
            consumer.wait_output<1>(o);
            consumer.store(o, softmax, work);
            work = next;
            keys = key_tiles_of(params.call, work);
        }
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

    // The same for a warp in the compiler's eyes too: what depends on it goes to uniform registers.
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
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
