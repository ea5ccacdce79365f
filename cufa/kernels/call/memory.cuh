// Helpers that every kernel with shared memory needs.
#pragma once

__device__ constexpr int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}
__device__ constexpr int round_up(int a, int b) {
    return ceil_div(a, b) * b;
}
__device__ constexpr int min_of(int a, int b) {
    return a < b ? a : b;
}
__device__ constexpr int max_of(int a, int b) {
    return a > b ? a : b;
}
__device__ constexpr int floor_power_of_two(int x) {
    return x < 2 ? x : 2 * floor_power_of_two(x / 2);
}

// N values that one instruction moves.
template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
    T v[N];

    __device__ T& operator[](int i) { return v[i]; }
    __device__ const T& operator[](int i) const { return v[i]; }
};

// The block's dynamic shared memory, as a kernel's struct. Bytes is what the host planned for this
// entry of the file, if entries differ.
template <class Smem, int Bytes = SMEM_BYTES>
__device__ inline Smem& shared_memory() {
    static_assert(sizeof(Smem) == Bytes, "the host planned a different size of shared memory");
    extern __shared__ __align__(alignof(Smem)) unsigned char bytes[];
    return *reinterpret_cast<Smem*>(bytes);
}
