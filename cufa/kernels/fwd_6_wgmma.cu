// fwd_6_wgmma: FlashAttention-3 (Shah et al. 2024, Algorithms 1 and 2) on Hopper.
//
// Change from fwd_5_mma: a thread that does nothing but copy, by the copy engine, and warpgroups
// that do nothing but compute, by wgmma, which reads its operands from shared memory and runs
// beside what issued it. While the tensor cores work on the next scores and the last output, a
// warpgroup exponentiates the scores that it has; and warpgroups take turns, so that the products
// of one run during the softmax of the other. A block stays for many tiles. Scores become weights
// under the maximum of the first tile's; that larger ones came is seen afterwards, from the sum of
// the weights, which then shrink: no time is spent on looking for the largest.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (...,
//          value_dim)
// Launches: with a mask_mod seen_tiles, which finds out what it shows of each tile of scores, so
// that tiles of which that is nothing are left out; fwd_6_wgmma.
//
// Owns     block: tile after tile of BLOCK_M queries of one head; warpgroup: 64 of its rows
// Shared   rings of STAGES K and V tiles; for each warpgroup a ring of QUERY_STAGES Q tiles, and
//          STORE_COLS columns of O on their way out
// Needs    sm_90a; addresses and strides that are multiples of 16 bytes
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key
#include "wgmma_forward_copies.cuh"

constexpr int kThreads = THREADS;
constexpr int kDims = round_up(kValueDim, kWgmmaK);

struct Params {
    TensorMap q, k, v, o;
    ForwardParams call;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "the host passes a different struct");

// Whether a tile of keys may have some that count for none or not for all of the rows, and yet be
// in memory: beyond the last key of all, the copy engine fills in zeros.
constexpr bool kCutKeys = kRangeMask || kPacked || kUsedKeys || kMaskMod;
// Warps beside the producer that look for NaN and infinity in those tiles.
constexpr int kInspectors = kCutKeys ? kWarpgroup / 32 - 1 : 0;

struct Smem {
    using StoredRows = PanelTile<kWgmmaM, kStoreCols>;

    KeyRows k[kStages];
    ValueRows v[kStages];
    QueryRows q[kConsumers][kQueryStages];
    StoredRows out[kConsumers];
    TileRing k_ring, v_ring;
    Ring<kQueryStages> q_ring[kConsumers];
    ptx::Barrier v_inspected[kStages];
    WorkTile work[kConsumers][kQueryStages];             // which tile the queries are of
    unsigned int v_nonfinite[kStages][kWarpgroup / 32];  // what each inspector found
};

// ---- the inspectors: the warps beside the producer ----

// Says of every tile of values that a mask cuts through whether there is NaN or infinity in it.
__device__ inline void inspect_values(Smem& smem, const Params& params, int inspector) {
    constexpr int kLookers = (kInspectors == 0 ? 1 : kInspectors) * 32;
    const int lane = threadIdx.x % 32;
    follow_values(smem, params, [&](bool cut, RingPosition<kStages> at) {
        bool found = false;
        if (cut) found = finds_nonfinite<kLookers>(smem.v[at.stage], inspector * 32 + lane);
        found = __any_sync(0xffffffffu, found);
        __syncwarp();  // a vote says nothing of what was read
        if (lane == 0) {
            smem.v_nonfinite[at.stage][inspector] = found;
            ptx::barrier_arrive(smem.v_inspected[at.stage]);
            smem.v_ring.release(at);
        }
    });
}

// ---- the consumers ----

struct Consumer : ForwardConsumer<Consumer, Smem, Params, kDims> {
    static constexpr bool kLongTurns = false, kRoundsFirst = false;
    // Those features leave no registers for it. By ALiBi, scores rise from tile to tile up to the
    // diagonal, unless that is where tiles begin, and a bias may do so anywhere.
    static constexpr bool kRaisesLate =
        !kWindow && !kSoftcap && !kBias && !kScoreMod && !kMaskMod && (kCausal || !kAlibi);
    const Scale call_scale;

    __device__ Consumer(Smem& smem, const Params& params, int warpgroup)
        : ForwardConsumer(smem, params, warpgroup), call_scale(params.call.softmax_scale) {}

    __device__ void begin(const WorkTile&) {}
    __device__ Scale scale() const { return call_scale; }
    __device__ float softmax_scale() const { return params.call.softmax_scale; }
    __device__ float output_scale() const { return 1; }

    __device__ void issue_output(Output& o, const Weights& p) {
        smem.v_ring.wait_full(v_at);
        issue_product_pn<kBlockN, kDims>(o, p, smem.v[v_at.stage]);
    }

    template <int Pending>
    __device__ void wait_output(Output& o, const WorkTile&, int) {
        wait_product<Pending>(o);
        release_and_advance(smem.v_ring, v_at);
    }

    __device__ void round(Weights& p, const Scores& s) const { round_to_operand<kBlockN>(p, s); }

    // Where a mask cuts through a tile, a value that is NaN or infinite must reach the rows that
    // see its key and no other; but in the product 0 * NaN is NaN. Such values are added here to
    // the outputs of the rows that see them, whatever their weight, and are zero in the product.
    __device__ void take_out_nonfinite(Output& o, const WorkTile& work, int tile) {
        if (!kCutKeys) return;
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
                if (!sees(mask, work, row_of(work, half), tile * kBlockN + key)) continue;
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
};

extern "C" __global__ void __launch_bounds__(kThreads)
    seen_tiles(const __grid_constant__ Params params) {
    if constexpr (kMaskMod) {
        if (blockIdx.x == 0 && threadIdx.x == 0) *tiles_taken(params.call) = 0;
        const long long tile = warp_of_grid<kThreads>();
        if (tile < Seen::count(params.call)) Seen::find(seen_parts(params.call), params.call, tile);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
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
        if (threadIdx.x < kProducers) produce(smem, params);
        if (inspector >= 0 && inspector < kInspectors) inspect_values(smem, params, inspector);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        Consumer(smem, params, warpgroup - 1).consume();
        ptx::wait_stores_read();
    }
}
