// 8-bit values as they are usually stored, with dims adjacent: turners, three warps beside the
// producer or a warpgroup of their own, transpose each tile before the product.
#pragma once

#include "hopper/forward/fp8_values.cuh"
#include "hopper/forward/wgmma_forward.cuh"
#include "hopper/forward/wgmma_forward_copies.cuh"

// Steps whose words are loaded together: as many as turners have registers for.
constexpr int kTurnedAtOnce = kProducerRegisters < 40 ? 1 : 4;

// Whether turners keep their addresses from tile to tile. This changes the order in which the
// compiler has consumers multiply and exponentiate: for the better, except beside three turners
// where a mask cuts through tiles.
constexpr bool kKeepsPlaces =
    kTurnedAtOnce > 1 && kValueDim <= kPanelCols && (kHelpersApart || !kRangeMask);

using TurnedValues = ValueTile<kBlockN, round_up(kValueDim, 2 * kChunkBytes)>;

// Whether consumers ask for NaN once per tile of queries, after its last output, rather than for
// each tile of keys. With three warpgroups this spilled registers, with wider heads it was slower.
constexpr bool kAsksLast = kConsumers <= 2 && kValueDim <= 128;

// The turners' shared memory.
struct Turning {
    TurnedValues turned[kStages];
    Ring<kStages> ring;
    // Whether a turner found NaN in a tile of values or, if kAsksLast, in an earlier one for the
    // same queries.
    unsigned int nan[kStages][kHelperWarps];

    __device__ void init() { ring.init(kConsumers * kWarps, kHelperWarps); }
};

template <class Smem>
__device__ inline void turn_values(Smem& smem, const Params& params) {
    unsigned int thread = threadIdx.x - kFirstHelper * 32;
    bool nan = false;  // in this tile or, if kAsksLast, in an earlier one for the same queries
    follow_values(smem, params, [&](bool cut, bool first, RingPosition<kStages> at) {
        if (!kKeepsPlaces) ptx::hold(thread);  // or the compiler would keep places
        smem.helpers.ring.wait_empty(at);
        const Turner<kHelperWarps, kTurnedAtOnce, kBlockN, TurnedValues::kDims> turner(thread);
        if (!kAsksLast || first) nan = false;
        // Where all rows see a tile, the product itself passes its NaN on.
        auto& turned = smem.helpers.turned[at.stage];
        auto& values = smem.v[at.stage];
        nan |= cut ? turner.template turn<true>(turned, values)
                   : turner.template turn<false>(turned, values);
        ptx::proxy_fence();
        __syncwarp();
        if (thread % 32 == 0) {
            smem.helpers.nan[at.stage][thread / 32] = nan;
            smem.v_ring.release(at);
            ptx::barrier_arrive(smem.helpers.ring.full[at.stage]);
        }
    });
}

// A warpgroup that computes with these values.
template <class Self, class Smem, int Dims>
struct TurnedConsumer : ForwardConsumer<Self, Smem, Dims> {
    using Base = ForwardConsumer<Self, Smem, Dims>;
    using Base::Base;
    using Base::params;
    using Base::smem;
    using Base::v_at;
    using typename Base::Output;

    __device__ void issue_output(Output& o, const Weights& p) {
        smem.helpers.ring.wait_full(v_at);
        issue_product_pv<kBlockN, Dims>(o, p, smem.helpers.turned[v_at.stage]);
    }

    // Whether a turner found NaN in this tile of values or an earlier one (see Turning). In the
    // product it is zero.
    __device__ bool found_nan() const {
        unsigned int nan = 0;
#pragma unroll
        for (const unsigned int found : smem.helpers.nan[v_at.stage]) nan |= found;
        return nan != 0;
    }

    // Waits for the product with a tile of values. Returns whether NaN must be added.
    template <int Pending>
    __device__ bool wait_values(Output& o) {
        const bool nan = !kAsksLast && found_nan();
        wait_product<Pending>(o);
        __syncwarp();  // all lanes have read `nan`
        release_and_advance(smem.helpers.ring, v_at);
        return nan;
    }

    // Waits until the output includes `tile`. If kAsksLast, adds NaN of all tiles from it on.
    template <int Pending>
    __device__ void wait_output(Output& o, const WorkTile& work, int tile) {
        const bool nan = found_nan();
        wait_product<Pending>(o);
        // A vote tells the compiler that all lanes take the same branch.
        if (__builtin_expect(__any_sync(0xffffffffu, nan), false)) {
            if constexpr (kAsksLast) {
                const KeyRange keys = key_tiles_of(params.call, work);
                for (; tile < keys.end; ++tile) {
                    if (!keys.is_whole(tile)) add_nan(o, work, tile);
                }
            } else {
                add_nan(o, work, tile);
            }
        }
        __syncwarp();  // all lanes have read `nan`
        release_and_advance(smem.helpers.ring, v_at);
    }

    // A value that is NaN must reach the rows that see its key, whatever their weight, and no other
    // row. In the product it was zero.
    __device__ void add_nan(Output& o, const WorkTile& work, int tile) const {
        const Sequence sequence = work.sequence(params.call);
        const auto v = sequence.keys<const scalar_t>(params.call.v, work.kv_head);
        const Mask mask = this->mask_of(work);
        const int row = row_of(work, 0);
        for (int in_tile = 0; in_tile < kBlockN; ++in_tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = tile * kBlockN + in_tile;
                if (!mask.in_range(row + 8 * half, key)) continue;
#pragma unroll
                for (int i = 2 * half; i < Dims / 2; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int dim = i / 4 * 8 + col_of_thread() + e;
                        if (dim < kValueDim && !is_finite(v.row(key)[dim]))
                            o[i + e] = not_a_number();
                    }
            }
    }

    __device__ void round(Weights& p, const Scores& s) const { round_to_weights<kBlockN>(p, s); }

    // Transposed values have no NaN left where a mask cuts, and e4m3 has no infinity.
    __device__ void take_out_nonfinite(Output&, const WorkTile&, int) const {}
};
