// fwd_9_float32: float32 on Hopper's 16-bit tensor cores, each element as a sum of two halves.
//
// Change from fwd_6_wgmma: wgmma has no float32, and takes tf32 values only transposed. So a first
// launch splits each element into two float16 (fwd_9_halves.cuh), in tiles laid out as in shared
// memory, and each product becomes three. These take so long that a warpgroup's softmax need not
// overlap its own products: it hides behind the other warpgroup's. Tensor cores truncate the sums
// that they add to. So the part that a tile of keys contributes to O is a product of its own, added
// to O afterwards; of wide heads, one product for each panel. A mask that hides keys from all
// queries that share them, such as padding (HIDES_KEYS), is read by the launch of halves alone.
//
// Launches: with a mask or a mask_mod, seen_tiles, as in fwd_5_mma; to_halves; fwd_9_float32.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (...,
//          value_dim); packed sequences: (tokens, heads, dim)
// Owns     block: BLOCK_M queries of one head; warpgroup: 64 of them
// Shared   the tile of queries, rings of STAGES tiles of keys, VALUE_STAGES of values
// Global   workspace: tiles of halves of queries, then of keys and values; with a mask or a
//          mask_mod, what it shows of each tile of scores
// Needs    sm_90a
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key, unless
//          there is a sink
#include "call/grid.cuh"
#include "hopper/float32/fwd_9_consumer.cuh"
#include "hopper/float32/fwd_9_halves.cuh"

constexpr int kThreads = THREADS;
// The least number of blocks on an SM that make halves: without this bound, ptxas may spill.
constexpr int kHalvingBlocks = kHeadDim > 128 || kValueDim > 128 ? 4 : 6;
constexpr int kProducerRegisters = PRODUCER_REGISTERS, kConsumerRegisters = CONSUMER_REGISTERS;
static_assert((kConsumers + 1) * kWarpgroup == kThreads, "one warpgroup copies, others compute");
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");

// Attends to all keys that the queries see. The products of one warpgroup run during the softmax of
// the other.
template <class Walk>
__device__ inline void attend(Consumer& consumer, Walk walk) {
    const Turns& turns = consumer.turns;
    Scores s;
    LastPart last;
    Weights p[kHalves];
    turns.wait();
    consumer.issue_scores(s);
    turns.pass();
    consumer.make_weights(p, s, walk.first_key(), walk.masked());
    for (walk.advance(); !walk.at_end(); walk.advance()) {
        turns.wait();
        consumer.issue_output(last, p);
        consumer.issue_scores(s);
        turns.pass();
        consumer.add_output<1>(last);
        consumer.make_weights(p, s, walk.first_key(), walk.masked());
    }
    turns.wait();
    consumer.issue_output(last, p);
    turns.pass();
    consumer.add_output<0>(last);
}

// A consumer's walk over its tiles of keys.
__device__ inline auto walk_of(const Consumer& consumer) {
    if constexpr (kKeyMask) {
        return LabelledWalk(consumer.smem.k_ring, consumer.k_at,
                            keys_of(consumer.call, consumer.work));
    } else {
        return RangeWalk(keys_of(consumer.call, consumer.work));
    }
}

__device__ inline void consume(Smem& smem, const ForwardParams& call, const QueryTile& work,
                               int warpgroup) {
    Consumer consumer(smem, call, work, warpgroup);
    const auto walk = walk_of(consumer);
    wait_for(smem.queries_full, 0, 0);
    if (!walk.at_end()) attend(consumer, walk);
    consumer.store();
}

// One thread copies all tiles.
template <class Walk>
__device__ inline void produce(Smem& smem, const ForwardParams& call, const QueryTile& work,
                               Walk walk) {
    const Workspace workspace(call);
    ptx::wait_for_launch_before();
    const auto& q = workspace.queries_from(work.sequence, work.head, work.first_row);
    ptx::barrier_arrive_expecting(smem.queries_full, QueryHalves::kBytes);
    ptx::copy_bytes(&smem.q, &q, QueryHalves::kBytes, smem.queries_full);

    const TileHalves* const first = &workspace.keys_from(work.sequence, work.kv_head, 0);
    const auto tile_at = [&](int key) -> const TileHalves& { return first[key / kBlockN]; };
    const auto send_keys = [&](RingPosition<kStages> at) {
        if (walk.at_end()) return;
        smem.k_ring.wait_empty(at);
        smem.k_ring.label(at, walk.label());
        constexpr int kBytes = KeyRows::kBytes + sizeof(KeyUnits);
        ptx::Barrier& full = smem.k_ring.announce(at, kBytes);
        ptx::copy_bytes(&smem.k[at.stage], &tile_at(walk.key).k, KeyRows::kBytes, full);
        ptx::copy_bytes(&smem.units[at.stage], &tile_at(walk.key).units, sizeof(KeyUnits), full);
    };
    RingPosition<kStages> at;
    RingPosition<kValueStages> of_values;
    send_keys(at);
    while (!walk.at_end()) {
        const int key = walk.key;
        at.advance();
        walk.advance();
        send_keys(at);  // keys are needed a tile ahead of values
        smem.v_ring.wait_empty(of_values);
        ptx::copy_bytes(&smem.v[of_values.stage], &tile_at(key).v, ValueRows::kBytes,
                        smem.v_ring.announce(of_values, ValueRows::kBytes));
        of_values.advance();
    }
}
__device__ inline void produce(Smem& smem, const ForwardParams& call, const QueryTile& work) {
    if constexpr (kKeyMask) {
        produce(smem, call, work, SeenWalk(call, work));
    } else {
        produce(smem, call, work, RangeWalk(keys_of(call, work)));
    }
}

extern "C" __global__ void __launch_bounds__(kHalvingThreads)
    seen_tiles(const __grid_constant__ ForwardParams params) {
    const long long tile = warp_of_grid<kHalvingThreads>();
    if (kKeyMask && tile < Seen::count(params)) Seen::find(seen_parts(params), params, tile);
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

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fwd_9_float32(const __grid_constant__ ForwardParams params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) smem.init();
    __syncthreads();

    const QueryTile work = query_tile_of_block<kBlockM>(params);
    const bool exists = work.first_row < work.sequence.seqlen_q;  // packed: not all tiles do
    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        if (threadIdx.x == 0 && exists) produce(smem, params, work);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        if (exists) consume(smem, params, work, warpgroup - 1);
    }
    ptx::wait_for_launch_before();
}
