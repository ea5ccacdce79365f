// fwd_10_wgmma_wide: head dims over 256 on Hopper, and multi-head latent attention (DeepSeek-AI
// 2024).
//
// Change from fwd_6_wgmma: a warpgroup has no registers for so many columns of O. Two warpgroups
// share 64 rows, and each has half of the columns. They take turns at tiles of keys: one computes
// scores and weights while the tensor cores are busy with products of the other, and hands the
// weights over through shared memory (as in FlashMLA, Li and Liu 2025). Where rows of V are the
// beginnings of those of K, only K is copied, in parts that consumers release one by one
// (key_columns.cuh). If a few queries have many heads with the same keys, the host says that heads
// are queries, and queries are heads (kQueriesAsHeads). Keys that are also the values may be in 8
// bits, and Q then too. They are widened to float16 on their way (widened_keys.cuh), and products
// are in float16 even if Q is in bfloat16.
//
// Launches: fwd_10_wgmma_wide; before it clear_counts, if keys are split into few parts or under a
//           causal mask, or after it merge_parts, if into many or into equal shares
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim),
//          V (batch, seqlen_k, kv_heads, value_dim); packed sequences: (tokens, heads, dim); K and
//          V in pages: (pages, page_size, kv_heads, dim); in 8 bits, q_descale, k_descale and
//          v_descale (batch, kv_heads): the factors of Q, K and V
// Owns     block: tile after tile of BLOCK_M queries of one head; warpgroup: half of their columns
//          of O, and the weights of every other tile of keys
// Shared   rings of STAGES K and V tiles, or of K tiles or their parts alone; a Q tile; the output
//          on its way out, in the place of Q unless OUTPUT_APART; the weights of a tile
// Global   workspace: the number of tiles taken, 0 between launches, and partial results of tiles
//          whose keys are split (key_parts.cuh); or such results alone (merged_parts.cuh), after
//          the tiles to merge if blocks have equal shares of the keys (share_walk.cuh)
// Needs    sm_90a; addresses and strides that are multiples of 16 bytes; with keys in 8 bits also
//          V in K, and a head dim that is a multiple of 16
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key, unless
//          there is a sink
#include "call/descales.cuh"
#include "hopper/forward/wgmma_inspected_values.cuh"
#include "hopper/forward/wgmma_wide_forward.cuh"
#include "hopper/forward/widened_keys.cuh"

template <bool InKeys>
struct ValuesApart {
    ValueRows v[kStages];
};
template <>
struct ValuesApart<true> {};

using out_t = OUT_SCALAR;
using StoredRows = PanelTile<kWgmmaM, kStoreCols, out_t>;
template <bool Apart>
struct QueriesAndOutput {
    QueryRows q[kTeams][kQueryStages];
    StoredRows out[kConsumers];
};
template <>
struct QueriesAndOutput<false> {
    union {
        QueryRows q[kTeams][kQueryStages];
        StoredRows out[kConsumers];
    };
};

struct Helpers : Inspection, QueryUnits<kScalesQueries> {};

struct Smem : ValuesApart<kValuesInKeys>, QueriesAndOutput<kOutputApart> {
    using StoredRows = ::StoredRows;

    KeyRows k[kStages];
    PanelTile<kWgmmaM, kBlockN> weights;
    Handed handed;
    KeyRing k_ring;
    TileRing v_ring;  // for values apart from the keys
    Ring<kQueryStages> q_ring[kTeams];
    Helpers helpers;
    Work work;
};
static_assert(kQueryStages == 1, "there is room for one tile of queries");

// The factor of a head's sums of weighted values.
__device__ inline float output_scale_of(const Params& params, const HeadScales& descaled) {
    return kWidensKeys ? descaled.output : kept_scale(params.call.features);
}

struct Consumer : InspectedConsumer<WideConsumer<Consumer, Smem>> {
    Scale current_scale;
    HeadScales descaled;  // of the current tile, if keys are in 8 bits

    __device__ Consumer(Smem& smem, const Params& params, int warpgroup)
        : InspectedConsumer(smem, params, warpgroup),
          current_scale(params.call.scale_log2, params.call.features) {}

    __device__ void begin(const WorkTile& work) {
        if constexpr (kWidensKeys) {
            descaled = {params.call, work.batch, work.kv_head};
            current_scale = Scale(descaled.scores_log2(), params.call.features);
        }
    }
    __device__ void unscale(Scores& s) const { smem.helpers.unscale(s); }
    __device__ Scale scale() const { return current_scale; }
    __device__ float softmax_scale() const {
        return kWidensKeys ? descaled.scores : params.call.softmax_scale;
    }
    __device__ float output_scale() const { return output_scale_of(params, descaled); }
};

// One thread does this. A template, so that only what is there is compiled.
template <class Smem>
__device__ inline void init_barriers(Smem& smem) {
    constexpr int kComputing = kConsumers * kWarps;
    constexpr int kOfOne = kWarps;  // of the warpgroup whose turn it is, or whose columns these are
    if constexpr (kWidensKeys) {
        smem.k_ring.init(kComputing, kWarps);
    } else if constexpr (kInParts) {
        smem.k_ring.init(kOfOne + kInspectors, kOfOne);
    } else if constexpr (kValuesInKeys) {
        smem.k_ring.init(kComputing + kInspectors);
    } else {
        smem.k_ring.init(kOfOne);
        smem.v_ring.init(kComputing + kInspectors);
    }
    smem.q_ring[0].init(kComputing + (kWidensKeys ? kWarps : kInspectors));
    smem.helpers.init();
    ptx::barrier_init_fence();
}

// What the warps that do not compute do. A template, so that only one way is compiled.
template <class Smem>
__device__ inline void bring(Smem& smem, const Params& params) {
    if constexpr (kWidensKeys) {
        produce_widened(smem, params);
    } else {
        const int inspector = static_cast<int>(threadIdx.x) / 32 - kFirstHelper;
        if (threadIdx.x < kProducers) produce(smem, params);
        if (inspector >= 0 && inspector < kInspectors) inspect_values(smem, params, inspector);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    clear_counts(const __grid_constant__ Params params) {
    clear_counts_of_parts<kOwnCols>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    fwd_10_wgmma_wide(const __grid_constant__ Params params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) {
        prefetch_maps(params);
        init_barriers(smem);
    }
    __syncthreads();
    if constexpr (kMergesLater) {
        ptx::let_next_launch_begin();
    } else if constexpr (kPartsKeys) {
        ptx::wait_for_launch_before();
    }

    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        bring(smem, params);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        Consumer(smem, params, warpgroup - kFirstConsumer).consume();
    }
}

extern "C" __global__ void __launch_bounds__(kMergeThreads, kMergeBlocksPerSm)
    merge_parts(const __grid_constant__ Params params) {
    merge_parts_of_tiles<kOwnCols, out_t>(params, [&](const WorkTile& work) {
        return output_scale_of(params, HeadScales(params.call, work.batch, work.kv_head));
    });
}
