// fwd_7_fp8: FlashAttention-3 (Shah et al. 2024, section 3.3) on Hopper, operands in 8 bits.
//
// Change from fwd_6_wgmma: Q, K, V and the weights are e4m3, which tensor cores multiply at twice
// the rate. For 8 bits, wgmma reads V only with the keys adjacent in memory. If V is not stored so,
// helping warps transpose it. e4m3 has few exponents, so weights are kept far above 1.
//
// Launches: clear_counts, if keys are split; fwd_7_fp8.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (...,
//          value_dim), O (batch, seqlen_q, heads, value_dim) of 16 bits; packed sequences: (tokens,
//          heads, dim); K and V in pages: (pages, page_size, kv_heads, dim); q_descale, k_descale
//          and v_descale (batch, kv_heads): the factors of Q, K and V. If TRANSPOSED_VALUES, V is
//          (batch, value_dim, kv_heads, seqlen_k)
// Owns     block: tile after tile of BLOCK_M queries of one head; warpgroup: 64 of its rows
// Shared   rings of STAGES tiles of K, V and, if need be, transposed V; for each warpgroup a ring
//          of QUERY_STAGES Q tiles, and STORE_COLS columns of O on their way out
// Global   workspace: the number of tiles taken, 0 between launches; partial results of tiles whose
//          keys are split (key_parts.cuh)
// Needs    sm_90a; addresses and strides that are multiples of 16 bytes
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key, unless
//          there is a sink
#include "call/descales.cuh"
#include "hopper/forward/fp8_transposed_values.cuh"
#include "hopper/forward/fp8_turned_values.cuh"

using out_t = OUT_SCALAR;
constexpr bool kTransposedValues = TRANSPOSED_VALUES;  // keys are adjacent in memory
constexpr bool kMayHalveFirst = HALVES_FIRST;          // whether a first tile of keys may be halved
// Whether addresses in O's tile are worked out by XOR: where measurements show that it is faster
// and spills nothing.
constexpr bool kStepsByXor = !kTransposedValues && kConsumers <= 2 && kValueDim <= 128;
// O has 16 bits, so its columns come in sixteens.
constexpr int kDims = round_up(kValueDim, kWgmmaDepth<out_t>);

// The form in which values reach the product: the tiles of K and V, what the helpers do with V, and
// the warpgroups that compute.
template <bool Transposed>
struct ValueForm {
    using KeyTile = KeyRows;
    using ValueTile = ValueRows;
    using Helpers = Turning;
    static constexpr int kReaders = kHelperWarps;  // of a tile of V
    static constexpr int kHelpers = kHelperWarps;  // warps that look at each tile of queries
    template <class Self, class Smem>
    using Consumer = TurnedConsumer<Self, Smem, kDims>;

    template <class Smem>
    __device__ static void help(Smem& smem, const Params& params, int) {
        turn_values(smem, params);
    }
};
template <>
struct ValueForm<true> {
    using KeyTile = HalvedKeyTile<kBlockN, kHeadDim>;
    using ValueTile = TransposedTile<kBlockN, kDims>;
    using Helpers = Inspection;
    static constexpr int kReaders = kConsumers * kWarps + kInspectors;
    static constexpr int kHelpers = kInspectors;
    template <class Self, class Smem>
    using Consumer = TransposedConsumer<Self, Smem, kDims>;

    template <class Smem>
    __device__ static void help(Smem& smem, const Params& params, int helper) {
        inspect_values(smem, params, helper);
    }
};
using Form = ValueForm<kTransposedValues>;

struct Smem {
    using StoredRows = PanelTile<kWgmmaM, kStoreCols, out_t, kPanelRowBytes, kStepsByXor>;

    Form::KeyTile k[kStages];
    Form::ValueTile v[kStages];
    QueryRows q[kConsumers][kQueryStages];
    StoredRows out[kConsumers];
    Form::Helpers helpers;
    TileRing k_ring, v_ring;
    Ring<kQueryStages> q_ring[kConsumers];
    Work work;
};

// ---- the consumers ----

struct Consumer : Form::Consumer<Consumer, Smem> {
    // Products take less time than exponentials. With short turns the exponentials of two
    // warpgroups would coincide; those of four do in any case.
    static constexpr bool kLongTurns = kConsumers < 4;
    static constexpr bool kLoopsApart = true;  // a branch in one would take up to 7 % of the time
    // Windows, soft caps and large tiles of three warpgroups leave no registers for this.
    static constexpr bool kRaisesLate =
        !kWindow && !kSoftcap && (kConsumers < 3 || kBlockN < 2 * kWgmmaM);
    // Three or more warpgroups have no registers for weights in both forms. Neither have wide heads
    // if lengths must be looked up.
    static constexpr bool kRoundsFirst =
        kConsumers < 3 && (kDims <= 128 || !(kPacked || kUsedKeys || kPaged));
    static constexpr bool kHalvesFirst = kMayHalveFirst && kRoundsFirst;
    // More would spill.
    static constexpr int kRecomputesAtOnce = 1;
    HeadScales scales{};  // of the current tile

    __device__ Consumer(Smem& smem, const Params& params, int warpgroup)
        : Form::Consumer<Consumer, Smem>(smem, params, warpgroup) {}

    __device__ void begin(const WorkTile& work) {
        scales = {params.call, work.batch, work.kv_head};
    }
    __device__ Scale scale() const { return Scale(scales.scores_log2(), params.call.features); }
    __device__ float softmax_scale() const { return scales.scores; }
    __device__ float output_scale() const { return scales.output; }

    // Without a mask, only the last tile of keys may be cut.
    __device__ void mask_first(Scores& s, const SeenScores& seen, const WorkTile& work, int tile) {
        const int keys_end = work.sequence(params.call).seqlen_k;
        constexpr bool kAlways = kRangeMask || kConsumers > 3;  // four have no registers to test
        if (kAlways || (tile + 1) * kBlockN > keys_end) mask_scores(s, seen, work, tile);
    }
};

// ---- the helpers ----

__device__ inline void help(Smem& smem, const Params& params) {
    const int helper = static_cast<int>(threadIdx.x) / 32 - kFirstHelper;
    if (helper >= 0 && helper < Form::kHelpers) Form::help(smem, params, helper);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    clear_counts(const __grid_constant__ Params params) {
    clear_counts_of_parts<kDims>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    fwd_7_fp8(const __grid_constant__ Params params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) {
        prefetch_maps(params);
        init_rings(smem, Form::kReaders, Form::kHelpers);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if constexpr (kPartsKeys) ptx::wait_for_launch_before();

    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        if (threadIdx.x < kProducers) produce(smem, params);
        if (!kHelpersApart) help(smem, params);
    } else if (kHelpersApart && warpgroup == 1) {  // in one branch they would spill registers
        ptx::registers_decrease<kProducerRegisters>();
        help(smem, params);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        Consumer(smem, params, warpgroup - kFirstConsumer).consume();
        ptx::wait_stores_read();
    }
}
