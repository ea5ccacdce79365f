// Two blocks that send each other floats, or copy tiles to each other, round after round.
#include "ptx/ptx_sm90.cuh"

constexpr int kThreads = 64, kStages = 2;

struct Exchange {
    const float* sent;  // fours, (block, round, thread)
    float* received;    // as they were sent, the last thread's four first
    int rounds;
};

struct CopySmem {
    alignas(16) float tiles[2][kStages][kThreads][4];  // of either block, at the same place in both
    ptx::Barrier full[kStages], empty[kStages];
};

struct Smem {
    alignas(16) float landing[kStages][kThreads][4];
    ptx::Barrier full[kStages], empty[kStages];
};

__device__ inline void wait_for_partner(ptx::Barrier& barrier, unsigned int parity) {
    while (!ptx::barrier_try_wait_for_partner(barrier, parity)) {
    }
}

// A block's shared memory, with its barriers set up, as the partner knows.
template <class Smem>
__device__ inline Smem& begin() {
    static_assert(sizeof(Smem) <= SMEM_BYTES, "the test has less shared memory");
    extern __shared__ __align__(1024) unsigned char bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(bytes);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::barrier_init(smem.full[stage], 1);
            ptx::barrier_init(smem.empty[stage], kThreads);
        }
        ptx::barrier_init_fence();
    }
    ptx::pair_sync();  // the barriers are there
    return smem;
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads)
    exchange(const __grid_constant__ Exchange params) {
    Smem& smem = begin<Smem>();
    const int thread = threadIdx.x;

    const unsigned int partner = blockIdx.x - ptx::rank_in_pair() + (ptx::rank_in_pair() ^ 1);
    for (int round = 0; round < params.rounds; ++round) {
        const int stage = round % kStages;
        const unsigned int parity = round / kStages & 1;
        ptx::Barrier &full = smem.full[stage], &empty = smem.empty[stage];
        if (thread == 0) ptx::barrier_arrive_expecting(full, sizeof smem.landing[stage]);
        wait_for_partner(empty, parity ^ 1);
        const float* const mine =
            params.sent + 4 * ((blockIdx.x * params.rounds + round) * kThreads + thread);
        const float four[4] = {mine[0], mine[1], mine[2], mine[3]};
        ptx::send_to_partner(smem.landing[stage][thread], four, full);
        wait_for_partner(full, parity);
        const float* const from = smem.landing[stage][kThreads - 1 - thread];
        float* const to =
            params.received + 4 * ((partner * params.rounds + round) * kThreads + thread);
        for (int i = 0; i < 4; ++i) to[i] = from[i];
        ptx::barrier_arrive_at_partner(empty);
    }
    ptx::pair_sync();  // nothing comes after the end
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads)
    copy(const __grid_constant__ Exchange params) {
    CopySmem& smem = begin<CopySmem>();
    const int thread = threadIdx.x;

    const unsigned int rank = ptx::rank_in_pair(), partner = blockIdx.x - rank + (rank ^ 1);
    for (int round = 0; round < params.rounds; ++round) {
        const int stage = round % kStages;
        const unsigned int parity = round / kStages & 1;
        ptx::Barrier &full = smem.full[stage], &empty = smem.empty[stage];
        auto& mine = smem.tiles[rank][stage];
        const auto& theirs = smem.tiles[rank ^ 1][stage];
        if (thread == 0) ptx::barrier_arrive_expecting(full, sizeof mine);
        wait_for_partner(empty, parity ^ 1);  // the copy is read
        const float* const from =
            params.sent + 4 * ((blockIdx.x * params.rounds + round) * kThreads + thread);
        for (int i = 0; i < 4; ++i) mine[thread][i] = from[i];
        ptx::proxy_fence();
        __syncthreads();
        if (thread == 0) ptx::copy_to_partner(mine, sizeof mine, full);
        wait_for_partner(full, parity);  // of the copy
        float* const to =
            params.received + 4 * ((partner * params.rounds + round) * kThreads + thread);
        for (int i = 0; i < 4; ++i) to[i] = theirs[kThreads - 1 - thread][i];
        ptx::barrier_arrive_at_partner(empty);
    }
    ptx::pair_sync();
}
