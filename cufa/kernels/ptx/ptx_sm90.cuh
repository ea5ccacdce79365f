// Inline PTX from sm_90 on: barriers in shared memory that count arrivals and bytes; copies, stores
// and additions by the copy engine (TMA); synchronization of launches that overlap and of blocks;
// what the two blocks of a cluster send each other.
#pragma once

#include "ptx/ptx_sm80.cuh"

// What the host encodes from a tensor's address, shape and strides (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

namespace ptx {

// The time, by a clock common to all SMs.
__device__ inline long long nanoseconds() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// True in one lane of a warp, always the same. All lanes must call it. The compiler knows that a
// single thread executes what is under this condition, so it issues no loop over lanes for what
// must be uniform.
__device__ inline bool elect_lane() {
    unsigned int elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(elected));
    return elected != 0;
}

// A barrier in shared memory. Its phases are numbered from 0. A phase ends when as many threads as
// `init` said have arrived and all bytes that they announced are there.
using Barrier = unsigned long long;

__device__ inline void barrier_init(Barrier& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
                 "r"(arrivals)
                 : "memory");
}

// Makes the barriers that this thread has initialised visible to TMA.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(Barrier& barrier) {
    asm volatile(
        "mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
        : "memory");
}

// Arrives as soon as all copies that this thread has started with copy_async are done.
__device__ inline void barrier_arrive_after_copies(Barrier& barrier) {
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
        : "memory");
}

// Arrives, and announces bytes that copies will bring.
__device__ inline void barrier_arrive_expecting(Barrier& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(&barrier)),
                 "r"(bytes)
                 : "memory");
}

// Whether the phase of this parity has ended; waits a while for it.
__device__ inline bool barrier_try_wait(Barrier& barrier, unsigned int parity) {
    unsigned int ended;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
    return ended != 0;
}

// Prefetches a tensor map into the cache that copies read it from.
__device__ inline void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The policy of the L2 cache for data that is needed once: it makes room first.
__device__ inline unsigned long long needed_once() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Starts the copy of a box of a tensor into shared memory. The coordinates of its first element are
// given fastest axis first; what lies outside the tensor becomes zeros. The bytes arrive on
// `barrier`.
__device__ inline void copy_box(void* to, const TensorMap& map, Barrier& barrier, int x0, int x1,
                                int x2, int x3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
        : "memory");
}

// The same for a box that is needed once.
__device__ inline void copy_box_once(void* to, const TensorMap& map, Barrier& barrier, int x0,
                                     int x1, int x2, int x3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3),
        "l"(needed_once())
        : "memory");
}

// The same for a tensor with five axes.
__device__ inline void copy_box(void* to, const TensorMap& map, Barrier& barrier, int x0, int x1,
                                int x2, int x3, int x4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
        : "memory");
}

// Makes what this thread wrote to shared memory visible to TMA and to wgmma.
__device__ inline void proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Orders what this thread saw in global memory before what it has TMA do there.
__device__ inline void proxy_fence_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Starts the copy of a box of a tensor from shared memory; what lies outside the tensor is dropped.
// The L2 cache does not keep it at the expense of what kernels still read.
__device__ inline void store_box(const TensorMap& map, const void* from, int x0, int x1, int x2,
                                 int x3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint "
        "[%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(&map),
        "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "l"(needed_once())
        : "memory");
}

// Ends a group of stores.
__device__ inline void commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all stores that this thread has started have read shared memory.
__device__ inline void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Waits until they are complete: this thread sees what they wrote or added.
__device__ inline void wait_stores() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Stores four 8x8 matrices of 16-bit elements. A lane has columns 2t and 2t + 1 of row g of each,
// where g = lane / 4 and t = lane % 4. Lanes 8i to 8i + 7 give the addresses of the rows of matrix
// i.
__device__ inline void stmatrix_x4(void* row, const unsigned int (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements. A lane has columns 2t and 2t + 1 of row g, where g =
// lane / 4 and t = lane % 4.
__device__ inline unsigned int transpose_matrix(unsigned int pair) {
    unsigned int transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

// Starts the copy of contiguous bytes into shared memory; `bytes` and both addresses are multiples
// of 16.
__device__ inline void copy_bytes(void* to, const void* from, int bytes, Barrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
}

// Starts to add floats in shared memory to those at `to`; `bytes` and both addresses are multiples
// of 16.
__device__ inline void add_to_global(float* to, const float* from, int bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(shared_address(from)), "r"(bytes)
        : "memory");
}

// Adds four sums to those at `to`, which is aligned to 16 bytes.
__device__ inline void add_to_global(float* to, const float (&sums)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to),
                 "f"(sums[0]), "f"(sums[1]), "f"(sums[2]), "f"(sums[3])
                 : "memory");
}

// A launch that overlaps the one before begins when each block of that one has called
// let_next_launch_begin or is done. After wait_for_launch_before, the launch before is complete:
// this block may read what it wrote and overwrite what it read. Blocks that do neither need not
// wait, but at least one block must. Otherwise this launch could be complete before the one before
// it is, and the next launch, which waits for this one only, would overlap that one.
__device__ inline void let_next_launch_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ inline void wait_for_launch_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Between blocks: what precedes an addition is visible after a load that sees it.
__device__ inline unsigned int load_acquire(const unsigned int* address) {
    unsigned int value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
__device__ inline void add_release(unsigned int* address, unsigned int value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Partners: blocks 2i and 2i + 1 of a launch in clusters of two. Both run at the same time, and
// each reaches shared memory of the other one.
__device__ inline unsigned int rank_in_pair() {
    unsigned int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Where the partner has what lies at this place in shared memory of this block.
__device__ inline unsigned int partner_address(const void* pointer) {
    unsigned int address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(shared_address(pointer)), "r"(rank_in_pair() ^ 1));
    return address;
}

// __syncthreads for all threads of both blocks. Lanes of a warp may come one by one. A block must
// not send before its partner has initialised its barriers, nor end before it has received all that
// its partner sends.
__device__ inline void pair_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at the partner's barrier of this place, once this thread has what it read from shared
// memory: the partner may overwrite that. The scope is this block on purpose. It makes the arrival
// wait for reads, but passes on nothing that was written: to release that to the cluster, the
// arrival would wait for all that is on its way to global memory.
__device__ inline void barrier_arrive_at_partner(Barrier& barrier) {
    asm volatile(
        "mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(partner_address(&barrier))
        : "memory");
}

// Starts to store four floats in the partner's shared memory, at the place that `to`, a multiple of
// 16 bytes, has in this block's. The bytes arrive on the partner's `barrier`, and no other way of
// waiting covers them.
__device__ inline void send_to_partner(float* to, const float (&four)[4], Barrier& barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(partner_address(to)),
        "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(partner_address(&barrier))
        : "memory");
}

// Starts to copy bytes of shared memory to the same place in the partner's; their number and that
// place are multiples of 16. The bytes arrive on the partner's `barrier`.
__device__ inline void copy_to_partner(const void* from, int bytes, Barrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(partner_address(from)),
        "r"(shared_address(from)), "r"(bytes), "r"(partner_address(&barrier))
        : "memory");
}

// As barrier_try_wait, for a phase with arrivals or bytes of the partner.
__device__ inline bool barrier_try_wait_for_partner(Barrier& barrier, unsigned int parity) {
    unsigned int ended;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
    return ended != 0;
}

}  // namespace ptx
