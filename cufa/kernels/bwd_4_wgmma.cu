// bwd_4_wgmma: FlashAttention-3's backward (Shah et al. 2024, section 3) on Hopper.
//
// Change from bwd_3_mma: a warp that does nothing but copy, by the copy engine, and two warpgroups
// that compute, by wgmma, each for 64 keys. S^T and dP^T are products of shared memory; P^T and
// dS^T stay in registers for dV += P^T dO and dK += dS^T Q. dS^T also goes to shared memory, where
// both warpgroups' parts meet in dQ^T = K^T dS^T, which is added to sums in global memory. A
// warpgroup does so one tile later, so that neither waits for the other and one multiplies while
// the other exponentiates. A block stays for many tiles of keys: while one's gradients are stored,
// the next one's products run. Where many queries see a key, a warpgroup puts all gradients into an
// outbox, from which the copy engine adds dQ to the sums: who does so itself waits until memory
// takes what it adds. Over head dim 128, with values of up to that, dK leaves registers for S or
// for dP, but not for both.
//
// Launches: with a mask_mod seen_tiles, which finds out what it shows of each tile of scores, so
// that tiles of which that is nothing are left out; row_sums (the rows' statistics, and dQ's sums
// set to zero unless the first block to add does so), key_tiles, round_keys (if blocks have parts
// of the heads), round_queries (unless the last block does that); sink_gradient if that is wanted.
// Each begins while the one before ends.
//
// Shapes   dO, O as Q with value_dim; dQ, dK, dV as Q, K, V
// Owns     block: 128 keys of one KV head at a time, for all query heads that share them or a part
//          of those; warpgroup: 64 of them
// Shared   rings of KEY_STAGES K and V tiles, which become dK and dV unless there are outboxes; of
//          STAGES Q and dO tiles with the rows' statistics; of dS^T tiles
// Global   workspace: sums of dQ, statistics, parts of dK and dV, counts (wgmma_query_sums.cuh)
// Writes   dQ, dK, dV
#include "wgmma_backward.cuh"
#include "wgmma_seen_queries.cuh"

constexpr int kBlockM = BLOCK_M, kStages = STAGES;
constexpr int kKeyStages = KEY_STAGES;
constexpr int kBlockN = kConsumers * kWgmmaM;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kHelperThreads = HELPER_THREADS;
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
// Whether gradients leave through an outbox of each warpgroup; otherwise warpgroups add to dQ
// themselves, and dK and dV leave from where the keys were.
constexpr bool kOutboxes = HAS_OUTBOXES;
static_assert(!kOutboxes || kAdding == kAsTheyCome, "nobody would know when they are added");
// With short tiles of queries a thread has registers for P as operand beside S and dP: dV's product
// then need not wait for dP.
constexpr bool kShortTiles = kBlockM <= kPanelCols;
constexpr bool kValuesEarly = kShortTiles;
// Whether slopes wait for dS^T where that will be shared. Those of a soft cap alone follow from P.
constexpr bool kSlopesWait = kSlopes && kScoreMod;
constexpr bool kSlopesFromWeights = kSlopes && !kScoreMod;
static_assert(kScoresTogether || !kSlopesFromWeights, "that needs P before it is rounded");
// Whether dO has barriers of its own, so that S begins once Q is there. Otherwise it is no faster.
constexpr bool kOutApart = kShortTiles && kScoresTogether;
// Each warpgroup has a panel of dims of dQ if tiles of queries are short, and so there are two.
constexpr int kHeadCols = kShortTiles && kHeadDim <= kPanelCols ? 2 * kPanelCols : kHeadDim;
// A row of dS^T in a panel: narrow if queries would leave a part of a panel empty.
constexpr int kScoreRowBytes = kBlockM % kPanelCols == 0 ? kPanelRowBytes : kNarrowRowBytes;
constexpr int kHead = round_up(kHeadCols, kWgmmaK), kValue = round_up(kValueDim, kWgmmaK);

struct Params {
    TensorMap q, k, v, dout, dk, dv;
    BackwardParams call;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "the host passes a different struct");

using KeyRows = PanelTile<kWgmmaM, kHeadCols>;
using ValueRows = PanelTile<kWgmmaM, kValueDim>;
using QueryRows = PanelTile<kBlockM, kHeadCols>;
using OutRows = PanelTile<kBlockM, kValueDim>;
using ScoreRows = PanelTile<kWgmmaM, kBlockM, scalar_t, kScoreRowBytes>;
using Keys = KeyOrder<kBlockN>;
using Tiles = QueryTiles<kBlockM, kBlockN>;
using RangeWalk = QueryWalk<Tiles>;
using Statistics = RowStatistics<kBlockM>;

// The warpgroups part a tile of dQ^T: each has a panel of dims, if there are as many, and half the
// queries of the odd one.
constexpr int kPanels = KeyRows::kPanels;
constexpr bool kWholePanel = kPanels >= kConsumers, kHalfPanel = kPanels % kConsumers != 0;
static_assert(kPanels / kConsumers == kWholePanel, "a warpgroup has at most one panel of dQ");
using Sums = QuerySums<kBlockM, kPanels, kHalfPanel>;
using QueryWorkspace = Workspace<kBlockM, Sums>;
struct QueryPart {
    WgmmaSums<kBlockM> panel;
    WgmmaSums<kBlockM / 2> half;
};

struct Queries {
    QueryRows q;
    OutRows dout;
};

// What a warpgroup sends out by the copy engine: its part of a tile of dQ^T, or the gradients of
// its keys or values. None of them is larger than the first.
struct Outbox {
    alignas(kOutboxes ? kSwizzleBytes : sizeof(float)) float sums[kOutboxes ? Sums::kPanel : 1];

    __device__ float* queries() { return sums; }
    __device__ KeyRows& keys() { return reinterpret_cast<KeyRows&>(sums); }
    __device__ ValueRows& values() { return reinterpret_cast<ValueRows&>(sums); }
};
static_assert(!kOutboxes || sizeof(Outbox) >= KeyRows::kBytes);
static_assert(!kOutboxes || sizeof(Outbox) >= ValueRows::kBytes);
// And where to: dQ is added to sums, the others are those of some work.
struct Label {
    enum Content { kNothing, kQueries, kValues, kKeys } content;
    float* sums;
    KeyWork work;
};

struct Smem {
    KeyRows k[kKeyStages][kConsumers];
    ValueRows v[kKeyStages][kConsumers];
    Queries queries[kStages];
    ScoreRows ds[kStages][kConsumers];
    Statistics rows[kStages];
    KeyWork work[kKeyStages];
    LabelledRing<kStages> ring;
    Ring<kStages> ds_ring;
    Ring<kKeyStages> keys_ring;
    ptx::Barrier gradients[kKeyStages];  // whether they lie where the keys were
    OrderRing<kStages> order[kConsumers];
    Ring<1> outbox_rings[kConsumers];
    Label labels[kConsumers];
    ptx::Barrier dout_full[kStages];
    Outbox outboxes[kConsumers];
};

using Scores = WgmmaSums<kBlockM>;
using Weights = WgmmaOperand<kBlockM>;

// The parts of tiles that a mask_mod shows. In the workspace they come after all else.
using Seen = SeenTiles<kBlockM, kBlockN>;
using SeenWalk = SeenQueryWalk<Seen, Tiles, kBlockM>;
using LabelledWalk = LabelledQueryWalk<Tiles, kStages>;
__device__ inline SeenPart* seen_parts(const BackwardParams& call) {
    return reinterpret_cast<SeenPart*>(QueryWorkspace(call).taken + 1);
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    seen_tiles(const __grid_constant__ Params params) {
    const long long tile = warp_of_grid<kHelperThreads>();
    if (kMaskMod && tile < Seen::count(params.call))
        Seen::find(seen_parts(params.call), params.call, tile);
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    row_sums(const __grid_constant__ Params params) {
    ptx::let_next_launch_begin();
    if (blockIdx.x == 0 && threadIdx.x == 0) *QueryWorkspace(params.call).taken = 0;
    if (params.call.sizes.seqlen_q == 0) return;
    prepare_rows<kHelperThreads, kBlockM, Sums>(params.call);
}

__device__ inline Tiles query_tiles_of(const BackwardParams& call, const KeyWork& work) {
    return Tiles(work.mask(call), work.first_key);
}

// ---- the producer: one thread ----

__device__ inline void send_keys(Smem& smem, const Params& params, KeyWork work,
                                 RingPosition<kKeyStages>& to) {
    smem.keys_ring.wait_empty(to);
    smem.work[to.stage] = work;
    constexpr int kBytes = kConsumers * (KeyRows::kBytes + ValueRows::kBytes);
    ptx::Barrier& full = smem.keys_ring.announce(to, kBytes);
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
        const int first_key = work.sequence(params.call).first_k + work.first_key + w * kWgmmaM;
        copy_tile(smem.k[to.stage][w], params.k, full, work.map_batch(), work.kv_head(), first_key);
        copy_tile(smem.v[to.stage][w], params.v, full, work.map_batch(), work.kv_head(), first_key);
    }
    to.advance();
}

// Says that there are no keys left.
__device__ inline void send_end(Smem& smem, RingPosition<kKeyStages> to) {
    smem.keys_ring.wait_empty(to);
    smem.work[to.stage] = KeyWork::none();
    smem.keys_ring.announce(to, 0);
}

template <class Walk>
__device__ inline void send_queries(Smem& smem, const Params& params, KeyWork work, const Walk& at,
                                    RingPosition<kStages>& to) {
    const Sequence sequence = work.sequence(params.call);
    const QueryWorkspace workspace(params.call);
    const int first_row = sequence.first_q + at.tile * kBlockM;
    Queries& queries = smem.queries[to.stage];
    smem.ring.wait_empty(to);
    if constexpr (kMaskMod) smem.ring.label(to, at.label());
    ptx::Barrier& full = smem.ring.announce(
        to, QueryRows::kBytes + sizeof(Statistics) + !kOutApart * OutRows::kBytes);
    ptx::Barrier& dout_full = kOutApart ? smem.dout_full[to.stage] : full;
    if (kOutApart) ptx::barrier_arrive_expecting(dout_full, OutRows::kBytes);
    copy_tile(queries.q, params.q, full, work.map_batch(), at.head, first_row);
    ptx::copy_bytes(&smem.rows[to.stage], &workspace.rows_of(sequence, at.head, at.tile),
                    sizeof(Statistics), full);
    copy_tile(queries.dout, params.dout, dout_full, work.map_batch(), at.head, first_row);
    to.advance();
}

// Those that a mask_mod shows some of the keys.
__device__ inline void send_seen(Smem& smem, const Params& params, const KeyWork& work,
                                 const Tiles& tiles, RingPosition<kStages>& to) {
    for (SeenWalk at(params.call, seen_parts(params.call), work, tiles); !at.at_end();
         at.advance()) {
        send_queries(smem, params, work, at, to);
    }
}

// Takes keys until there are none left: each time when the queries of those before are on their
// way and no earlier, so that it is the block that is done first that takes the next. Blocks that
// wait for others count even their first: who takes some then does so after those that it will wait
// for, whichever blocks have an SM.
__device__ inline void produce(Smem& smem, const Params& params) {
    const Sizes& sizes = params.call.sizes;
    const auto take = [&] {
        const TileCounter counter{QueryWorkspace(params.call).taken, Keys::count(sizes)};
        const unsigned int index = kTurns ? counter.any() : counter.next();
        // A shuffle tells the compiler that it is uniform, and so what is computed from it: copies
        // would take turns with each of their operands otherwise.
        return Keys::at(__shfl_sync(1u, index, 0), params.call);
    };
    RingPosition<kKeyStages> keys_to;
    RingPosition<kStages> to;
    for (KeyWork work = kTurns ? take() : Keys::first(params.call); work.exists();) {
        if (work.has_keys(params.call)) {
            const Tiles tiles = query_tiles_of(params.call, work);
            send_keys(smem, params, work, keys_to);
            if constexpr (kMaskMod) {
                if (tiles.begin < tiles.end) send_seen(smem, params, work, tiles, to);
            } else {
                for (RangeWalk at(tiles, sizes, work.part); !at.at_end(); at.advance()) {
                    send_queries(smem, params, work, at, to);
                }
            }
            if (Keys::next(work, sizes)) continue;
        }
        work = take();
    }
    send_end(smem, keys_to);
}

// ---- another thread, if blocks take turns to add to dQ ----

// Waits for the consumers' turns.
__device__ inline void take_turns(Smem& smem, const Params& params) {
    RingPosition<kStages> to;
    for (RingPosition<kKeyStages> keys_at;; keys_at.advance()) {
        smem.keys_ring.wait_full(keys_at);
        const KeyWork work = smem.work[keys_at.stage];
        smem.keys_ring.release(keys_at);
        if (!work.exists()) return;
        const Tiles tiles = query_tiles_of(params.call, work);
        take_turns<kBlockM, kBlockN>(smem.order, to, QueryWorkspace(params.call), params.call, work,
                                     RangeWalk(tiles, params.call.sizes, work.part));
    }
}

// ---- the sender: another warp or, if blocks take turns, one for each consumer ----

// Stores the gradients of each tile of keys from where the keys were, those of Count consumers from
// the first on, unless these wrote their parts; before, it passes on the first one's turns.
template <int Count>
__device__ inline void send_gradients(Smem& smem, const Params& params, int first) {
    RingPosition<kStages> turn;
    for (RingPosition<kKeyStages> at;; at.advance()) {
        smem.keys_ring.wait_full(at);
        const KeyWork& work = smem.work[at.stage];
        if (!work.exists()) return;
        if (kTurns && threadIdx.x % 32 == 0) {
            const Tiles tiles = query_tiles_of(params.call, work);
            pass_turns(smem.order[first], turn, QueryWorkspace(params.call), first, params.call,
                       work, RangeWalk(tiles, params.call.sizes, work.part));
        }
        __syncwarp();
        wait_for(smem.gradients[at.stage], at.parity, at.stage);
#pragma unroll
        for (int w = first; kParts == 1 && w < first + Count; ++w) {
            send_out<kValueDim, 32>(params.dv, params.call.dv, smem.v[at.stage][w], params.call,
                                    work, w * kWgmmaM, 0);
            send_out<kHeadDim, 32>(params.dk, params.call.dk, smem.k[at.stage][w], params.call,
                                   work, w * kWgmmaM, 0);
        }
        __syncwarp();
        if (threadIdx.x % 32 != 0) continue;
        ptx::wait_stores_read();
        smem.keys_ring.release(at);
    }
}

// ---- or a warp for each that sends what is in its outbox to where its label says ----

__device__ inline void send(Smem& smem, const Params& params, int consumer) {
    const int key = consumer * kWgmmaM;
    Outbox& outbox = smem.outboxes[consumer];
    const Label& label = smem.labels[consumer];
    Ring<1>& ring = smem.outbox_rings[consumer];
    for (RingPosition<1> from;; from.advance()) {
        ring.wait_full(from);
        if (label.content == Label::kNothing) return;
        if (label.content == Label::kValues) {
            send_out<kValueDim, 32>(params.dv, params.call.dv, outbox.values(), params.call,
                                    label.work, key, 0);
        } else if (label.content == Label::kKeys) {
            send_out<kHeadDim, 32>(params.dk, params.call.dk, outbox.keys(), params.call,
                                   label.work, key, 0);
        } else if (threadIdx.x % 32 == 0) {
            ptx::add_to_global(label.sums, outbox.queries(), Sums::kPanel * sizeof(float));
            ptx::commit_stores();
        }
        __syncwarp();
        if (threadIdx.x % 32 != 0) continue;
        ptx::wait_stores_read();
        ring.release(from);
    }
}

// ---- the consumers: a warpgroup for 64 keys ----

// Barriers of parts of the block; __syncthreads has number 0.
enum NamedBarrier { kAllConsumers = 1, kFirstTurn, kFirstOfWarpgroup = kFirstTurn + kConsumers };

// Warpgroups take turns from a tile's first product to its weights, so that the tensor cores serve
// one while the other waits for its dQ. Without, they would fall into step, both at their softmax.
struct Turns {
    int warpgroup;

    __device__ explicit Turns(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == kConsumers - 1) pass();
    }
    __device__ void wait() const {
        ptx::named_barrier_sync<2 * kWarpgroup>(kFirstTurn + warpgroup);
    }
    __device__ void pass() const {
        const int next = kConsumers - 1 - warpgroup;
        ptx::named_barrier_arrive<2 * kWarpgroup>(kFirstTurn + next);
    }
};

struct Consumer {
    Smem& smem;
    const Params& params;
    const int warpgroup;
    const Turns turns;
    KeySoftmax<kBlockM> softmax;
    // What each tile of queries asks of the keys' work: read once, since shared memory is slow.
    int first_place;
    bool sets_sums;
    RingPosition<kKeyStages> keys_at;
    RingPosition<kStages> at;
    RingPosition<1> outbox_to;
    float* tile_before;  // the sums of dQ of the tile before, of which dS lies a stage before
    bool last_before;    // whether these are the last keys that it sees
    bool took_out;       // whether there was NaN or infinity in masked tiles of queries

    __device__ Consumer(Smem& smem, const Params& params, int warpgroup)
        : smem(smem), params(params), warpgroup(warpgroup), turns(warpgroup) {}

    // Takes up the next tile of keys, if there is one.
    __device__ bool receive() {
        smem.keys_ring.wait_full(keys_at);
        const int first_key = work().first_key + warpgroup * kWgmmaM;
        softmax = KeySoftmax<kBlockM>(params.call, work().mask(params.call), first_key);
        first_place = QueryWorkspace(params.call).first_place_of(work().sequence(params.call));
        sets_sums = Keys::sets_sums(work());
        tile_before = nullptr;
        took_out = false;
        return work().exists();
    }

    __device__ const KeyWork& work() const { return smem.work[keys_at.stage]; }

    // The first of the 16 rows that a warp has of its warpgroup's 64.
    __device__ static int warp_row() { return threadIdx.x % kWarpgroup / 32 * 16; }

    // Where a mask cuts through a tile, NaN or infinity in a row or a key must not reach those that
    // it does not see; but 0 * NaN is NaN, and a product over the whole tile would multiply by it.
    // So it is taken out of the operands. Keys need not keep it.
    __device__ void clean_keys(const Tiles& tiles) {
        if (!tiles.any_masked()) return;
        take_out_of_keys<kWarpgroup>(smem.k[keys_at.stage][warpgroup],
                                     smem.v[keys_at.stage][warpgroup], threadIdx.x % kWarpgroup);
        ptx::proxy_fence();
        ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
    }

    // Queries need not keep it either, since D is NaN; values get theirs from dO in the end.
    __device__ void clean_queries() {
        smem.ring.wait_full(at);
        wait_for_dout();
        if (!__any_sync(0xffffffffu, smem.rows[at.stage].nonfinite)) return;
        Queries& queries = smem.queries[at.stage];
        take_out_of_queries<kConsumers * kWarpgroup>(queries.q, queries.dout, kAllConsumers);
        took_out = true;
    }

    // Prepares for a tile that a mask cuts through.
    template <class Walk>
    __device__ void begin_masked(const Walk& walk) {
        clean_queries();
        if constexpr (kMaskMod) softmax.find_seen(place_of(walk));
    }

    // Takes up a tile of queries: lets the products begin with its rows' statistics.
    __device__ void begin_scores(Scores& s) {
        smem.ring.wait_full(at);
        softmax.begin_scores(s, smem.rows[at.stage]);
        if (kScoresBeginWithLse) hold_all(s);
    }
    __device__ void begin_weight_gradients(Scores& dp) {
        softmax.begin_gradients(dp, smem.rows[at.stage]);
        hold_all(dp);
    }

    // Issues S^T = K Q^T - LSE.
    __device__ void issue_scores(Scores& s) {
        issue_product_nt<kHead, kBlockM, kScoresBeginWithLse>(s, smem.k[keys_at.stage][warpgroup],
                                                              smem.queries[at.stage].q);
    }

    // Issues dP^T = V dO^T - D.
    __device__ void issue_weight_gradients(Scores& dp) {
        wait_for_dout();
        issue_product_nt<kValue, kBlockM, true>(dp, smem.v[keys_at.stage][warpgroup],
                                                smem.queries[at.stage].dout);
    }

    template <class Walk>
    __device__ void exponentiate(Scores& s, const Walk& walk) {
        if (kSlopesWait) smem.ds_ring.wait_empty(at);
        if (walk.masked()) {
            shape<true>(s, walk);
            softmax.exponentiate<true>(s, smem.rows[at.stage], walk.tile);
        } else {
            shape<false>(s, walk);
            softmax.exponentiate<false>(s, smem.rows[at.stage], walk.tile);
        }
    }

    // P is as it was computed, or rounded.
    template <class P, class Walk>
    __device__ void differentiate(Scores& dp, const P& p, const Walk& walk) const {
        const Statistics& rows = smem.rows[at.stage];
        if (walk.masked()) {
            softmax.template differentiate<true, kSlopesFromWeights>(dp, p, rows, walk.tile);
        } else {
            softmax.template differentiate<false, kSlopesFromWeights>(dp, p, rows, walk.tile);
        }
        if constexpr (kSlopesWait)
            softmax.apply_slopes(dp, smem.ds[at.stage][warpgroup], warp_row());
    }

    // Issues dV += P^T dO.
    __device__ void issue_value_gradients(WgmmaSums<kValue>& dv, const Weights& p) {
        issue_product_pn<kBlockM, kValue>(dv, p, smem.queries[at.stage].dout);
    }

    // Issues dK += dS^T Q.
    __device__ void issue_key_gradients(WgmmaSums<kHead>& dk, const Weights& ds) {
        issue_product_pn<kBlockM, kHead>(dk, ds, smem.queries[at.stage].q);
    }

    // The same with dS^T where it was shared. Nobody but this warpgroup needs to be done with that.
    __device__ void issue_key_gradients(WgmmaSums<kHead>& dk) {
        ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + warpgroup);
        const auto& ds = smem.ds[at.stage][warpgroup];
        issue_product_nn<kBlockM, kHead>(dk, ds, smem.queries[at.stage].q);
    }

    // Shows dS^T to the other warpgroup.
    __device__ void share(const Weights& ds) {
        smem.ds_ring.wait_empty(at);
        write_rows<kBlockM>(smem.ds[at.stage][warpgroup], ds, warp_row());
        ptx::proxy_fence();
        ptx::barrier_arrive(smem.ds_ring.full[at.stage]);
    }

    // Issues this warpgroup's part of dQ^T = K^T dS^T, of all keys, for the tile before. At the
    // first tile that is a product of K with what is there, the queries, and is not used: a branch
    // around it would make all products wait for each other.
    __device__ void issue_query_gradients(QueryPart& dq) {
        using Shared = ScoreRows[kConsumers];
        static_assert(sizeof(Shared) <= sizeof(Queries), "there is not as much");
        const RingPosition<kStages> from = before(at);
        const bool is_there = tile_before != nullptr;
        if (is_there) smem.ds_ring.wait_full(from);
        const Shared& ds =
            is_there ? smem.ds[from.stage] : reinterpret_cast<Shared&>(smem.queries[at.stage]);
        const auto& k = smem.k[keys_at.stage];
        if constexpr (kWholePanel) issue_product_tn<kBlockM>(dq.panel, k, warpgroup, ds, 0);
        if constexpr (kHalfPanel) {
            issue_product_tn<kBlockM / 2>(dq.half, k, kPanels - 1, ds, warpgroup * (kBlockM / 2));
        }
    }

    // Adds this warpgroup's part of dQ of the tile before to its sums, or those to it.
    __device__ void add_query_gradients(QueryPart& dq) {
        if (tile_before == nullptr) return;
        const RingPosition<kStages> from = before(at);
        release(smem.ds_ring, from);
        if constexpr (kOutboxes) {
            wait_for_outbox();
            Sums::write(smem.outboxes[warpgroup].queries(), dq.panel);
            return post({Label::kQueries, Sums::panel_of(tile_before, warpgroup), {}});
        }
        if (kTurns) smem.order[warpgroup].wait_full(from);
        float* const panel = Sums::panel_of(tile_before, warpgroup);
        float* const half = Sums::half_of(tile_before, warpgroup);
        if (kRounds && last_before) {
            if constexpr (kWholePanel) round_query_gradients(dq.panel, panel);
            if constexpr (kHalfPanel) round_query_gradients(dq.half, half);
        } else {
            if constexpr (kWholePanel) Sums::add(panel, dq.panel, sets_sums);
            if constexpr (kHalfPanel) Sums::add(half, dq.half, sets_sums);
        }
        if (kTurns) arrive_by_warp(smem.order[warpgroup].added[from.stage]);
    }

    // Ends with a tile of queries.
    template <class Walk>
    __device__ void finish(const Walk& walk) {
        release(smem.ring, at);
        at.advance();
        const QueryWorkspace workspace(params.call);
        tile_before = workspace.sums_at(workspace.place_from(first_place, walk.head, walk.tile));
        last_before = walk.tiles.last_of(walk.tile);
    }

    // Adds NaN and infinity in dO to the gradients of this warpgroup's values.
    __device__ void add_taken_out(WgmmaSums<kValue>& dv, const Tiles& tiles) const {
        if (!took_out) return;
        add_nonfinite<kValue>(dv, params.call, work().sequence(params.call),
                              work().heads(params.call.sizes), tiles, softmax, 0);
    }

    // Hands out the gradients of this warpgroup's values.
    __device__ void hand_out_values(const WgmmaSums<kValue>& dv) {
        if constexpr (kParts > 1) {
            key_sums().write_values<kValue>(params.call, work(), warpgroup * kWgmmaM, 0, dv);
        } else if constexpr (kOutboxes) {
            wait_for_outbox();
            write_rounded<kValue>(smem.outboxes[warpgroup].values(), dv);
            post({Label::kValues, nullptr, work()});
        } else {
            write_rounded<kValue>(smem.v[keys_at.stage][warpgroup], dv);
        }
    }

    // Hands out those of its keys: where these were once the other warpgroup is done with them too.
    __device__ void hand_out_keys(WgmmaSums<kHead>& dk) {
        const float scale = kParts > 1 ? 1 : params.call.softmax_scale;  // parts are scaled later
#pragma unroll
        for (int i = 0; i < kHead / 2; ++i) dk[i] *= scale;
        if constexpr (kParts > 1) {
            key_sums().write_keys<kHead>(params.call, work(), warpgroup * kWgmmaM, 0, dk);
            give_up_keys();
        } else if constexpr (kOutboxes) {
            const KeyWork done = work();
            give_up_keys();
            wait_for_outbox();
            write_rounded<kHead>(smem.outboxes[warpgroup].keys(), dk);
            post({Label::kKeys, nullptr, done});
        } else {
            ptx::named_barrier_sync<kConsumers * kWarpgroup>(kAllConsumers);
            write_rounded<kHead>(smem.k[keys_at.stage][warpgroup], dk);
            ptx::proxy_fence();
            give_up_keys();
        }
        keys_at.advance();
    }

    // Says that there is nothing left.
    __device__ void leave() {
        if constexpr (!kOutboxes) return;
        wait_for_outbox();
        post({Label::kNothing, nullptr, {}});
    }

  private:
    template <class Walk>
    __device__ TilePlace place_of(const Walk& walk) const {
        return {params.call.features, work().batch, walk.head, walk.tile * kBlockM};
    }

    // Makes products scores, if those are more.
    template <bool Masked, class Walk>
    __device__ void shape(Scores& s, const Walk& walk) {
        const TilePlace place = place_of(walk);
        if constexpr (kSlopesWait) {
            softmax.shape<Masked>(s, smem.ds[at.stage][warpgroup], warp_row(), place);
        } else if constexpr (kScoreMod) {
            softmax.shape<Masked>(s, place);
        } else if constexpr (kSoftcap) {
            softmax.bound(s);
        }
    }

    template <int Count>
    __device__ void round_query_gradients(float (&dq)[Count], float* part) {
        const QueryWorkspace workspace(params.call);
        const auto [head, tile] = workspace.tile_of(tile_before, first_place);
        const Sequence sequence = work().sequence(params.call);
        const int first_row = tile * kBlockM;
        auto rows = sequence.queries<scalar_t>(params.call.dq, head);
        rows.data = rows.row(first_row);
        Sums::round(tile_before, part, dq, sets_sums, rows, sequence.seqlen_q - first_row,
                    params.call.softmax_scale);
    }

    __device__ KeySums key_sums() const { return QueryWorkspace(params.call).key_sums; }

    // Says that this thread is done with the keys, and that gradients lie there if they do.
    __device__ void give_up_keys() {
        if constexpr (kOutboxes) {
            release(smem.keys_ring, keys_at);
        } else {
            ptx::barrier_arrive(smem.gradients[keys_at.stage]);
        }
    }

    __device__ void wait_for_dout() {
        if (kOutApart) wait_for(smem.dout_full[at.stage], at.parity, at.stage);
    }

    __device__ void wait_for_outbox() { smem.outbox_rings[warpgroup].wait_empty(outbox_to); }

    // Closes the outbox.
    __device__ void post(const Label& label) {
        if (threadIdx.x % kWarpgroup == 0) smem.labels[warpgroup] = label;
        ptx::proxy_fence();
        ptx::barrier_arrive(smem.outbox_rings[warpgroup].full[0]);
        outbox_to.advance();
    }

    template <int Dims, class Rows>
    __device__ static void write_rounded(Rows& rows, const WgmmaSums<Dims>& sums) {
        WgmmaOperand<Dims> rounded;
        round_to_operand<Dims>(rounded, sums);
        write_rows<Dims>(rows, rounded, warp_row());
    }
};

// Waits for a part of dQ^T.
template <int Pending>
__device__ inline void wait_part(QueryPart& dq) {
    if constexpr (kWholePanel) wait_product<Pending>(dq.panel);
    if constexpr (kHalfPanel) wait_product<Pending>(dq.half);
}

// Sums up the gradients of a warpgroup's keys over all tiles of queries. dQ of the last is left.
template <class Walk>
__device__ inline void attend(Consumer& consumer, WgmmaSums<kHead>& dk, WgmmaSums<kValue>& dv,
                              Walk walk) {
    const Turns& turns = consumer.turns;
    for (; !walk.at_end(); walk.advance()) {
        Scores s, dp;
        QueryPart dq;
        Weights p, ds;
        if (walk.masked()) consumer.begin_masked(walk);
        consumer.begin_scores(s);
        consumer.begin_weight_gradients(dp);
        turns.wait();
        consumer.issue_scores(s);
        consumer.issue_weight_gradients(dp);

        wait_product<1>(s);
        consumer.exponentiate(s, walk);
        if (kValuesEarly) {
            round_to_operand<kBlockM>(p, s);
            consumer.issue_value_gradients(dv, p);
        }
        turns.pass();

        wait_product<kValuesEarly ? 1 : 0>(dp);
        consumer.differentiate(dp, s, walk);
        round_to_operand<kBlockM>(ds, dp);
        if (!kValuesEarly) {
            round_to_operand<kBlockM>(p, s);
            consumer.issue_value_gradients(dv, p);
        }
        consumer.share(ds);
        consumer.issue_query_gradients(dq);
        consumer.issue_key_gradients(dk, ds);

        wait_part<1>(dq);
        consumer.add_query_gradients(dq);
        wait_product<0>(dk);
        hold_all(dv);
        consumer.finish(walk);
    }
}

// The same with registers for S or for dP: P is rounded before dP's product begins, and once dS^T
// is shared it is read from there.
template <class Walk>
__device__ inline void attend_in_turn(Consumer& consumer, WgmmaSums<kHead>& dk,
                                      WgmmaSums<kValue>& dv, Walk walk) {
    const Turns& turns = consumer.turns;
    for (; !walk.at_end(); walk.advance()) {
        Weights p, kept, ds;
        Scores s;
        if (walk.masked()) consumer.begin_masked(walk);
        consumer.begin_scores(s);
        turns.wait();
        consumer.issue_scores(s);

        wait_product<0>(s);
        consumer.exponentiate(s, walk);
        round_to_operand<kBlockM>(p, s);
        copy_operand<kBlockM>(kept, p);

        Scores dp;
        consumer.begin_weight_gradients(dp);
        consumer.issue_weight_gradients(dp);
        consumer.issue_value_gradients(dv, p);
        turns.pass();

        wait_product<1>(dp);
        consumer.differentiate(dp, kept, walk);
        round_to_operand<kBlockM>(ds, dp);
        consumer.share(ds);
        wait_product<0>(dv);

        QueryPart dq;
        consumer.issue_query_gradients(dq);
        consumer.issue_key_gradients(dk);
        wait_part<1>(dq);
        consumer.add_query_gradients(dq);
        wait_product<0>(dk);
        consumer.finish(walk);
    }
}

// Where in its tiles of queries a consumer is.
__device__ inline auto walk_of(const Consumer& consumer, const Tiles& tiles) {
    if constexpr (kMaskMod) {
        return LabelledWalk(consumer.smem.ring, consumer.at, tiles);
    } else {
        return RangeWalk(tiles, consumer.params.call.sizes, consumer.work().part);
    }
}

__device__ inline void consume(Smem& smem, const Params& params, int warpgroup) {
    Consumer consumer(smem, params, warpgroup);
    while (consumer.receive()) {
        WgmmaSums<kHead> dk = {};
        WgmmaSums<kValue> dv = {};
        const Tiles tiles = query_tiles_of(params.call, consumer.work());
        const auto walk = walk_of(consumer, tiles);
        if (walk.at_end()) {
            consumer.hand_out_values(dv);
        } else {
            consumer.clean_keys(tiles);
            kScoresTogether ? attend(consumer, dk, dv, walk)
                            : attend_in_turn(consumer, dk, dv, walk);
            consumer.add_taken_out(dv, tiles);
            QueryPart dq;
            consumer.issue_query_gradients(dq);
            consumer.hand_out_values(dv);
            wait_part<0>(dq);
            consumer.add_query_gradients(dq);
        }
        consumer.hand_out_keys(dk);
    }
    consumer.leave();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    key_tiles(const __grid_constant__ Params params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) {
        constexpr int kWarps = kConsumers * kWarpgroup / 32;
        smem.ring.init(kWarps);
        if (kOutApart) {
            for (ptx::Barrier& full : smem.dout_full) ptx::barrier_init(full, 1);
        }
        smem.ds_ring.init(kWarps, kConsumers * kWarpgroup);
        smem.keys_ring.init(kOutboxes ? kWarps : kTurns ? kConsumers + 1 : 1);
        for (ptx::Barrier& written : smem.gradients) {
            ptx::barrier_init(written, kConsumers * kWarpgroup);
        }
        if (kTurns) {
            for (OrderRing<kStages>& order : smem.order) order.init();
        }
        if (kOutboxes) {
            for (Ring<1>& ring : smem.outbox_rings) ring.init(1, kWarpgroup);
        }
        ptx::barrier_init_fence();
    }
    __syncthreads();
    ptx::let_next_launch_begin();
    ptx::wait_for_launch_before();

    // A shuffle tells the compiler that all lanes of a warp have the same.
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
        if (warp == 0) {
            if (threadIdx.x == 0) produce(smem, params);
        } else if (kOutboxes) {
            if (warp <= kConsumers) send(smem, params, warp - 1);
        } else if (kTurns) {
            if (warp <= kConsumers) {
                send_gradients<1>(smem, params, warp - 1);
            } else if (threadIdx.x % 32 == 0) {
                take_turns(smem, params);
            }
        } else if (warp == 1) {
            send_gradients<kConsumers>(smem, params, 0);
        }
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        consume(smem, params, warpgroup - 1);
    }
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    round_keys(const __grid_constant__ Params params) {
    ptx::let_next_launch_begin();
    ptx::wait_for_launch_before();
    if constexpr (kParts > 1) {
        add_parts<kHelperThreads>(params.call, QueryWorkspace(params.call).key_sums);
    }
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    round_queries(const __grid_constant__ Params params) {
    ptx::wait_for_launch_before();
    round_tile<kHelperThreads, kBlockM, kPanels, Sums>(params.call);
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    sink_gradient(const __grid_constant__ Params params) {
    if constexpr (kSink) sum_up_sink<kHelperThreads, kBlockM, Sums>(params.call);
}
