// fwd_6_wgmma: FlashAttention-3 (Shah et al. 2024, Algorithms 1 and 2) on Hopper.
//
// Change from fwd_5_mma: one thread or, if keys are in pages, one warp only copies, by TMA.
// Warpgroups only compute, by wgmma, which reads its operands from shared memory and runs
// asynchronously. While the tensor cores compute the next S and the last P V, a warpgroup
// exponentiates the S that it has. Warpgroups take turns: the products of one run during the
// softmax of the other. A block processes many tiles. Weights are computed with the maximum of the
// first tile of keys, without looking for larger scores first. If the sum of the weights shows that
// larger scores came, the maximum is raised and the weights are shrunk. The other warps of the
// producer's warpgroup look for NaN in tiles that a mask cuts through. Where some SMs would be idle
// while others process a last tile, the keys of such tiles are split among blocks, and the block
// with the last part merges the results.
//
// Launches: seen_tiles, if there is a mask or a mask_mod; clear_counts, if keys are split;
// fwd_6_wgmma. seen_tiles finds out which tiles of scores a mask hides, so that they are skipped,
// and which scores, if that is looked up in arrays. fwd_6_wgmma may run beside fwd_8_split_kv, and
// then leaves it the sequences of fewer queries than kLeastQueries.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim),
//          V (batch, seqlen_k, kv_heads, value_dim); packed sequences: (tokens, heads, dim); K and
//          V in pages: (pages, page_size, kv_heads, dim)
// Owns     block: tile after tile of BLOCK_M queries of one head; warpgroup: 64 of its rows
// Shared   rings of STAGES K and V tiles; for each warpgroup a ring of QUERY_STAGES Q tiles,
//          STORE_COLS columns of O on their way out and, if TMA can copy it, the bias of a tile of
//          scores
// Global   workspace: the number of tiles taken, 0 between launches; with a mask or a mask_mod,
//          what it shows of each tile and, in bits, of each score if SEEN_BITS, or of each key if
//          KEY_BITS; partial results of tiles whose keys are split (key_parts.cuh)
// Needs    sm_90a; addresses and strides that are multiples of 16 bytes
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key, unless
//          there is a sink
#include "call/grid.cuh"
#include "hopper/forward/wgmma_forward.cuh"
#include "hopper/forward/wgmma_inspected_values.cuh"

constexpr int kDims = round_up(kValueDim, kWgmmaK);
constexpr int kSeenThreads = kSeenBits ? kWarpgroup : kThreads;  // of the first launch

struct Smem : BiasTiles<BiasRows, kConsumers> {
    using StoredRows = PanelTile<kWgmmaM, kStoreCols>;

    KeyRows k[kStages];
    ValueRows v[kStages];
    QueryRows q[kConsumers][kQueryStages];
    StoredRows out[kConsumers];
    TileRing k_ring, v_ring;
    Ring<kQueryStages> q_ring[kConsumers];
    Ring<1> bias_rings[kConsumers];
    Inspection helpers;
    Work work;
};

// ---- the consumers ----

struct Consumer : InspectedConsumer<ForwardConsumer<Consumer, Smem, kDims>> {
    static constexpr bool kLongTurns = false, kRoundsFirst = false, kHalvesFirst = false;
    // Raising late needs registers that windows, soft caps, functions and masks do not leave,
    // except masks that show all rows the same keys; beside a causal mask, not with lengths, pages,
    // ALiBi or dropout. It pays only if few later tiles have larger scores. ALiBi raises scores
    // from tile to tile up to the diagonal, unless the tiles begin there, and a bias may raise them
    // anywhere.
    static constexpr bool kPlain = !(kPacked || kUsedKeys || kPaged || kAlibi || kDropout);
    static constexpr bool kSparing = !kKeyMask || kRowsAlike || (kKeyBits && kPlain);
    static constexpr bool kRaisesLate =
        !kWindow && !kSoftcap && !kBias && !kScoreMod && kSparing && (kCausal || !kAlibi);
    // Otherwise a branch in one loop costs less than the size of several.
    static constexpr bool kLoopsApart = kRaisesLate;
    // This rare case decides how the compiler orders the common one. By NVRTC 13.0, eight at once
    // make head dim 64 faster without a mask, and slower with one. Small tiles would spill.
    static constexpr int kRecomputesAtOnce = kConsumers == 1 ? 1 : kRangeMask ? 2 : 8;
    const Scale call_scale;

    __device__ Consumer(Smem& smem, const Params& params, int warpgroup)
        : InspectedConsumer(smem, params, warpgroup),
          call_scale(params.call.scale_log2, params.call.features) {}

    __device__ void begin(const WorkTile&) {}
    __device__ Scale scale() const { return call_scale; }
    __device__ float softmax_scale() const { return params.call.softmax_scale; }
    __device__ float output_scale() const { return kept_scale(params.call.features); }

    __device__ void issue_output(Output& o, const Weights& p) {
        smem.v_ring.wait_full(v_at);
        issue_product_pn<kBlockN, kDims>(o, p, smem.v[v_at.stage]);
    }

    __device__ void round(Weights& p, const Scores& s) const { round_to_operand<kBlockN>(p, s); }
};

// Finds out what is seen, by one of the warps of the first launch.
template <class Seen>
__device__ inline void find_seen(const ForwardParams& call, long long warp) {
    auto* const parts = seen_parts(call);
    unsigned int* const bits = seen_bits(call);
    if constexpr (kKeyBits) {
        const auto store = [&](long long number, const typename Seen::Bits& keys) {
            keys.store(bits + number * kTileWords);
        };
        Seen::template find<Seen::kOfGroup>(parts, call, warp, store);
    } else if (warp >= Seen::count(call)) {
        return;
    } else if constexpr (kSeenBits) {
        const auto write = [&](const ScoreRules& rules, int row, int key, long long number) {
            const KeyTiles<kBlockN> range(rules.mask, row, kBlockM);
            const bool ends = row + kBlockM > rules.mask.seqlen_q || range.masked(key, false);
            unsigned int* const of_tile = bits + number * kTileWords;
            return ends ? write_seen_bits<kBlockM, kBlockN, false>(of_tile, rules, row, key)
                        : write_seen_bits<kBlockM, kBlockN, true>(of_tile, rules, row, key);
        };
        Seen::find(parts, call, warp, write);
    } else {
        Seen::find(parts, call, warp);
    }
}

extern "C" __global__ void __launch_bounds__(kSeenThreads)
    seen_tiles(const __grid_constant__ Params params) {
    if constexpr (kKeyMask) {
        if constexpr (kSeenBits) ptx::let_next_launch_begin();
        if (blockIdx.x == 0 && threadIdx.x == 0) *tiles_taken(params.call) = 0;
        find_seen<Seen>(params.call, warp_of_grid<kSeenThreads>());
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    clear_counts(const __grid_constant__ Params params) {
    clear_counts_of_parts<kDims>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    fwd_6_wgmma(const __grid_constant__ Params params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) {
        prefetch_maps(params);
        init_rings(smem, kConsumers * kWarps + kInspectors, kInspectors);
        for (Ring<1>& ring : smem.bias_rings) ring.init(kWarps);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if constexpr (kSeenBits || kPartsKeys) ptx::wait_for_launch_before();

    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        const int inspector = static_cast<int>(threadIdx.x) / 32 - kFirstHelper;
        if (threadIdx.x < kProducers) produce(smem, params);
        if (inspector >= 0 && inspector < kInspectors) inspect_values(smem, params, inspector);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        Consumer(smem, params, warpgroup - kFirstConsumer).consume();
        ptx::wait_stores_read();
    }
    if constexpr (kLateBlocks) ptx::wait_for_launch_before();
}
