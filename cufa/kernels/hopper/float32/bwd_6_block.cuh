// The shared memory of bwd_6_float32, in which each warpgroup has tiles of queries of its own.
#pragma once

#include "hopper/float32/backward_walks.cuh"

// Warpgroups that compute. They alternate between tiles of queries.
constexpr int kConsumers = 2;
static_assert(kBlockM == kWgmmaM, "a warpgroup's products have 64 rows");

// A warpgroup's tile of queries, later replaced by its dQ, which is sent out from here.
union QueryStage {
    struct {
        QueryRows q;
        OutRows dout;
    } rows;
    QuerySums dq;

    static constexpr bool kSumsTakeDout = sizeof(QuerySums) > sizeof(QueryRows);
};

// A warpgroup's dK and dV at the end. Rows are padded, so that eight rows are in different banks.
constexpr int kSumPadding = 8;
template <int Dims>
using SumRows = float[kBlockN][Dims + kSumPadding];
struct KeySums {
    SumRows<kDepth> dk;
    SumRows<kDims> dv;
};

struct Smem {
    KeyRows k;
    ValueRows v;
    QueryStage queries[kConsumers][kStages];
    ScoreRows ds[kConsumers];
    Statistics statistics[kConsumers][kStages];
    KeyUnits units;
    SeeingRows seeing[kConsumers][kBlockN];
    float largest[kConsumers][kWarpgroup / 32];  // the largest score gradient of each warp
    Ring<kStages> q_rings[kConsumers];
    LabelledRing<kStages, HeadTileLabel> dout_rings[kConsumers];
    ptx::Barrier keys_full;

    // In the memory of the tiles.
    using Sums = KeySums[kConsumers];
    __device__ Sums& sums() { return reinterpret_cast<Sums&>(k); }

    __device__ void init() {
        static_assert(sizeof(Sums) <= sizeof(k) + sizeof(v) + sizeof(queries), "they do not fit");
        for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
            q_rings[warpgroup].init(kWarpgroup / 32);
            dout_rings[warpgroup].init(kWarpgroup / 32);
        }
        ptx::barrier_init(keys_full, 1);
        ptx::barrier_init_fence();
    }
};
