// The twin of cufa/kernels/ptx/ptx_sm90.cuh.
#pragma once

#include "ptx/ptx_sm80.cuh"

// calls.py encodes it, for the emulator alone.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

namespace ptx {

// Nothing here waits for longer than it must: the emulator sees waits without end by itself.
inline long long nanoseconds() {
    return 0;
}

inline bool elect_lane(EMULATOR_HERE) {
    emulator::sync_warp("elect", ~0u, nullptr, nullptr, nullptr, file, line);
    return emulator::lane() == 0;
}

using Barrier = unsigned long long;

inline void barrier_init(Barrier& barrier, int arrivals) {
    emulator::barrier_init(&barrier, arrivals);
}

inline void barrier_init_fence() {
    emulator::barrier_init_fence();
}

inline void barrier_arrive(Barrier& barrier) {
    emulator::barrier_arrive(&barrier, 0);
}

// The copies are there at once: who reads them without a wait at the barrier races all the same.
inline void barrier_arrive_after_copies(Barrier& barrier) {
    wait_copies();
    emulator::barrier_arrive(&barrier, 0);
}

inline void barrier_arrive_expecting(Barrier& barrier, int bytes) {
    emulator::barrier_arrive(&barrier, bytes);
}

// How long the instruction waits is not promised: here, until the phase has ended.
inline bool barrier_try_wait(Barrier& barrier, unsigned int parity, EMULATOR_HERE) {
    emulator::barrier_wait(&barrier, parity, file, line);
    return true;
}

inline void prefetch_tensor_map(const TensorMap&) {}

inline void copy_box(void* to, const TensorMap& map, Barrier& barrier, int x0, int x1, int x2,
                     int x3) {
    emulator::copy_box(to, &map, &barrier, {x0, x1, x2, x3}, 4);
}
inline void copy_box_once(void* to, const TensorMap& map, Barrier& barrier, int x0, int x1, int x2,
                          int x3) {
    emulator::copy_box(to, &map, &barrier, {x0, x1, x2, x3}, 4);
}
inline void copy_box(void* to, const TensorMap& map, Barrier& barrier, int x0, int x1, int x2,
                     int x3, int x4) {
    emulator::copy_box(to, &map, &barrier, {x0, x1, x2, x3, x4}, 5);
}

inline void proxy_fence() {
    emulator::proxy_fence();
}
inline void proxy_fence_global() {}

inline void store_box(const TensorMap& map, const void* from, int x0, int x1, int x2, int x3) {
    emulator::store_box(&map, from, {x0, x1, x2, x3}, 4);
}

inline void commit_stores() {
    emulator::commit_stores();
}

inline void wait_stores_read() {
    emulator::wait_stores_read();
}
inline void wait_stores() {
    emulator::wait_stores();
}

// Launches come one after the other here.
inline void let_next_launch_begin() {}
inline void wait_for_launch_before() {}

inline unsigned int rank_in_pair() {
    return emulator::rank_in_pair();
}

inline void pair_sync(EMULATOR_HERE) {
    emulator::pair_sync(file, line);
}

inline void barrier_arrive_at_partner(Barrier& barrier) {
    emulator::barrier_arrive_at_partner(&barrier);
}

inline void send_to_partner(float* to, const float (&four)[4], Barrier& barrier) {
    emulator::send_to_partner(to, four, &barrier);
}

inline void copy_to_partner(const void* from, int bytes, Barrier& barrier) {
    emulator::copy_to_partner(from, bytes, &barrier);
}

inline bool barrier_try_wait_for_partner(Barrier& barrier, unsigned int parity, EMULATOR_HERE) {
    emulator::barrier_wait_for_partner(&barrier, parity, file, line);
    return true;
}

inline unsigned int load_acquire(const unsigned int* address, EMULATOR_HERE) {
    return emulator::load_acquire(address, file, line);
}

inline void add_release(unsigned int* address, unsigned int value) {
    emulator::add_release(address, value);
}

namespace twin {

struct MatrixRow {
    void* row;
    const unsigned (&matrices)[4];
};

// The inverse of load_matrices.
EMULATOR_UNCHECKED inline void store_matrices(const void* const* in, void* const*, unsigned) {
    for (int lane = 0; lane < 32; ++lane) {
        const auto& from = *static_cast<const MatrixRow*>(in[lane]);
        for (int matrix = 0; matrix < 4; ++matrix) {
            const auto& to = *static_cast<const MatrixRow*>(in[8 * matrix + lane / 4]);
            for (int e = 0; e < 2; ++e) {
                static_cast<unsigned short*>(to.row)[lane % 4 * 2 + e] =
                    from.matrices[matrix] >> 16 * e & 0xffffu;
            }
        }
    }
}

}  // namespace twin

inline void stmatrix_x4(void* row, const unsigned int (&matrices)[4], EMULATOR_HERE) {
    emulator::write_shared(row, 16);
    const twin::MatrixRow mine{row, matrices};
    emulator::sync_warp("stmatrix", ~0u, &mine, nullptr, twin::store_matrices, file, line);
}

namespace twin {

EMULATOR_UNCHECKED inline void transpose(const void* const* in, void* const* out, unsigned) {
    for (int lane = 0; lane < 32; ++lane) {
        auto& to = *static_cast<unsigned*>(out[lane]);
        to = 0;
        for (int e = 0; e < 2; ++e) {
            const int row = lane % 4 * 2 + e, col = lane / 4;
            const unsigned pair = *static_cast<const unsigned*>(in[row * 4 + col / 2]);
            to |= (pair >> col % 2 * 16 & 0xffffu) << 16 * e;
        }
    }
}

}  // namespace twin

inline unsigned int transpose_matrix(unsigned int pair, EMULATOR_HERE) {
    unsigned int transposed;
    emulator::sync_warp("movmatrix", ~0u, &pair, &transposed, twin::transpose, file, line);
    return transposed;
}

inline void copy_bytes(void* to, const void* from, int bytes, Barrier& barrier) {
    emulator::copy_bytes(to, from, bytes, &barrier);
}

inline void add_to_global(float* to, const float* from, int bytes) {
    emulator::add_floats(to, from, bytes);
}

inline void add_to_global(float* to, const float (&sums)[4]) {
    emulator::atomic_add_vector(to, sums);
}

}  // namespace ptx
