// The shared memory of bwd_7_float32_wide, whose warpgroups share tiles of queries.
#pragma once

#include "hopper/float32/backward_walks.cuh"
#include "hopper/float32/key_scores.cuh"

constexpr int kConsumers = 2;
constexpr int kComputingThreads = kConsumers * kWarpgroup;

// Each warpgroup makes P and dS of half of a tile's queries.
constexpr int kHalfM = kBlockM / kConsumers;

// What one warpgroup computes of S or dP and the other needs: from each thread, four sums for every
// eight queries.
using SumsOfScores = Pack<float, 4>[kHalfM / 8][kWarpgroup];
// First S^T and dP^T, then P^T and dS^T.
union SharedScores {
    SumsOfScores sums[kConsumers];
    struct {
        ScoreRows p, ds;
    } halves;
};

struct Smem {
    KeyRows k;
    ValueRows v;
    QueryRows q[kStages];
    OutRows dout[kStages];
    SharedScores scores;
    Statistics statistics[kStages];
    KeyUnits units;
    SeeingRows seeing[kBlockN];
    float largest[kComputingThreads / 32];  // the largest score gradient of each warp
    Ring<kStages> q_ring;
    LabelledRing<kStages, HeadTileLabel> dout_ring;
    ptx::Barrier keys_full;

    __device__ void init() {
        q_ring.init(kComputingThreads / 32);
        dout_ring.init(kComputingThreads / 32);
        ptx::barrier_init(keys_full, 1);
        ptx::barrier_init_fence();
    }
};
