// fwd_7_fp8: FlashAttention-3 (Shah et al. 2024, section 3.3) on Hopper, operands in 8 bits.
//
// Change from fwd_6_wgmma: Q, K, V and the weights are e4m3, of which tensor cores multiply twice
// as many. Their wgmma reads V with the keys along the rows of memory only, so that warps beside
// the producer turn it; and e4m3 has few exponents, so that weights are kept far above 1.
//
// Shapes   Q (batch, seqlen_q, heads, head_dim), K (batch, seqlen_k, kv_heads, head_dim), V (...,
//          value_dim), O (batch, seqlen_q, heads, value_dim) of 16 bits; q_descale, k_descale and
//          v_descale (batch, kv_heads), what Q, K and V are to be multiplied with
// Owns     block: tile after tile of BLOCK_M queries of one head; warpgroup: 64 of its rows
// Shared   rings of STAGES tiles of K, of V and of V turned; for each warpgroup a ring of
//          QUERY_STAGES Q tiles, and STORE_COLS columns of O on their way out
// Needs    sm_90a; addresses and strides that are multiples of 16 bytes
// Writes   O; LSE (batch, heads, seqlen_q), natural log, -inf for a row that sees no key
#include "fp8_values.cuh"
#include "wgmma_forward_copies.cuh"

using out_t = OUT_SCALAR;
// Sums of O come in sixteens of columns, as they leave it in 16 bits.
constexpr int kDims = round_up(kValueDim, kWgmmaDepth<out_t>);
constexpr int kTurners = kWarpgroup / 32 - 1;  // the warps beside the producer
// Steps of theirs whose words are on their way together: as many as they have registers for.
constexpr int kTurnedAtOnce = kProducerRegisters < 40 ? 1 : 4;

struct Params {
    TensorMap q, k, v, o;
    ForwardParams call;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "the host passes a different struct");

using TurnedValues = ValueTile<kBlockN, round_up(kValueDim, 2 * kChunkBytes)>;

struct Smem {
    using StoredRows = PanelTile<kWgmmaM, kStoreCols, out_t>;

    KeyRows k[kStages];
    ValueRows v[kStages];
    QueryRows q[kConsumers][kQueryStages];
    StoredRows out[kConsumers];
    TurnedValues turned[kStages];
    TileRing k_ring, v_ring;
    Ring<kStages> turned_ring;
    Ring<kQueryStages> q_ring[kConsumers];
    WorkTile work[kConsumers][kQueryStages];  // which tile the queries are of
    unsigned int v_nan[kStages][kTurners];    // whether a turner found NaN in the values
};

// ---- the turners: the warps beside the producer ----

__device__ inline void turn_values(Smem& smem, const Params& params) {
    follow_values(smem, params, [&](bool cut, RingPosition<kStages> at) {
        unsigned int thread = threadIdx.x - 32;
        ptx::hold(thread);  // or what follows from it would be kept in registers from tile to tile
        smem.turned_ring.wait_empty(at);
        const Turner<kTurners, kTurnedAtOnce, kBlockN, TurnedValues::kDims> turner(thread);
        // Rows that all see a tile have its NaN by the product.
        auto& turned = smem.turned[at.stage];
        auto& values = smem.v[at.stage];
        const bool found = cut ? turner.template turn<true>(turned, values)
                               : turner.template turn<false>(turned, values);
        ptx::proxy_fence();
        __syncwarp();
        if (thread % 32 == 0) {
            smem.v_nan[at.stage][thread / 32] = found;
            smem.v_ring.release(at);
            ptx::barrier_arrive(smem.turned_ring.full[at.stage]);
        }
    });
}

// ---- the consumers ----

// A descale of the head that a tile is of; 1 if the call has none.
__device__ inline float descale_of(const ForwardParams& call, const void* descale,
                                   const WorkTile& work) {
    const int index = work.batch * call.sizes.kv_heads + work.kv_head;
    return descale ? static_cast<const float*>(descale)[index] : 1;
}

// What a head's products are multiplied with: Q K^T to be scores, P V to be the output.
struct HeadScales {
    float scores = 0, output = 0;

    HeadScales() = default;
    __device__ HeadScales(const ForwardParams& call, const WorkTile& work)
        : scores(static_cast<float>(call.softmax_scale) *
                 descale_of(call, call.features.q_descale, work) *
                 descale_of(call, call.features.k_descale, work)),
          output(descale_of(call, call.features.v_descale, work)) {}
};

struct Consumer : ForwardConsumer<Consumer, Smem, Params, kDims> {
    // Products take less time than exponentials, of which those of two warpgroups would fall
    // together. With four they do in any case.
    static constexpr bool kLongTurns = kConsumers < 4;
    // Nor do large tiles of three warpgroups leave registers for it.
    static constexpr bool kRaisesLate =
        !kWindow && !kSoftcap && (kConsumers < 3 || kBlockN < 2 * kWgmmaM);
    // Nor do those for weights in both forms; nor do wide heads where lengths have to be looked up.
    static constexpr bool kRoundsFirst =
        kConsumers < 3 && (kDims <= 128 || !(kPacked || kUsedKeys || kPaged));
    HeadScales scales{};  // of the tile that is worked on

    using ForwardConsumer::ForwardConsumer;

    __device__ void begin(const WorkTile& work) { scales = HeadScales(params.call, work); }
    __device__ Scale scale() const { return Scale(scales.scores); }
    __device__ float softmax_scale() const { return scales.scores; }
    __device__ float output_scale() const { return scales.output; }

    // Without a mask, it is but the last keys' tile that may be cut.
    __device__ void mask_first(Scores& s, const WorkTile& work, int tile) {
        const int keys_end = work.sequence(params.call).seqlen_k;
        constexpr bool kAlways = kRangeMask || kConsumers > 3;  // four have no registers to ask
        if (kAlways || (tile + 1) * kBlockN > keys_end) mask_scores(s, work, tile);
    }

    __device__ void issue_output(Output& o, const Weights& p) {
        smem.turned_ring.wait_full(v_at);
        issue_product_pv<kBlockN, kDims>(o, p, smem.turned[v_at.stage]);
    }

    // Whether a turner found NaN in the tile of values. In the product it is zero.
    __device__ bool found_nan() const {
        unsigned int nan = 0;
#pragma unroll
        for (const unsigned int found : smem.v_nan[v_at.stage]) nan |= found;
        return nan != 0;
    }

    // Waits for the product with a tile of values. Returns whether there is NaN to be added.
    template <int Pending>
    __device__ bool wait_values(Output& o) {
        const bool nan = found_nan();
        wait_product<Pending>(o);
        __syncwarp();  // all of the warp have read it
        release_and_advance(smem.turned_ring, v_at);
        return nan;
    }

    // The output has the part of `tile` now.
    template <int Pending>
    __device__ void wait_output(Output& o, const WorkTile& work, int tile) {
        const bool nan = found_nan();
        wait_product<Pending>(o);
        // By a vote, after which the compiler knows that all take the same way.
        if (__builtin_expect(__any_sync(0xffffffffu, nan), false)) add_nan(o, work, tile);
        __syncwarp();  // all of the warp have read it
        release_and_advance(smem.turned_ring, v_at);
    }

    // A value that is NaN must reach the rows that see its key, whatever their weight, and no
    // other. In the product it was zero.
    __device__ void add_nan(Output& o, const WorkTile& work, int tile) const {
        const Sequence sequence = work.sequence(params.call);
        const auto v = sequence.keys<const scalar_t>(params.call.v, work.kv_head);
        const Mask mask = mask_of(work);
        const int row = row_of(work, 0);
        for (int in_tile = 0; in_tile < kBlockN; ++in_tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = tile * kBlockN + in_tile;
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

    __device__ void round(Weights& p, const Scores& s) const { round_to_weights<kBlockN>(p, s); }

    // In values that are turned there is neither.
    __device__ void take_out_nonfinite(Output&, const WorkTile&, int) const {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fwd_7_fp8(const __grid_constant__ Params params) {
    Smem& smem = shared_memory<Smem>();
    if (threadIdx.x == 0) {
        const TensorMap* const maps[] = {&params.q, &params.k, &params.v, &params.o};
        for (const TensorMap* map : maps) ptx::prefetch_tensor_map(*map);
        constexpr int kWarps = kWarpgroup / 32;
        smem.k_ring.init(kConsumers * kWarps);
        smem.v_ring.init(kTurners);
        smem.turned_ring.init(kConsumers * kWarps, kTurners);
        for (int w = 0; w < kConsumers; ++w) smem.q_ring[w].init(kWarps + (w == 0 ? kTurners : 0));
        ptx::barrier_init_fence();
    }
    __syncthreads();

    // The same for a warp in the compiler's eyes too: what depends on it goes to uniform registers.
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
    if (warpgroup == 0) {
        ptx::registers_decrease<kProducerRegisters>();
        if (threadIdx.x < kProducers) produce(smem, params);
        if (threadIdx.x >= 32) turn_values(smem, params);
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        Consumer(smem, params, warpgroup - 1).consume();
        ptx::wait_stores_read();
    }
}
