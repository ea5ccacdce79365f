// The two products of standard attention, S = Q K^T and O = P V, with S and P in global memory: one
// thread per element of the result, with operands straight from global memory.
#pragma once

#include "call/numbers.cuh"
#include "call/tensor.cuh"
#include "scores/mask.cuh"

// One element of a (batch, heads, seqlen_q, cols) array, in memory order.
struct Element {
    int batch, head, row, col;
    long long matrix_row;  // (batch * heads + head) * seqlen_q + row

    __device__ Element(long long index, int heads, int rows, int cols)
        : col(index % cols), matrix_row(index / cols) {
        row = matrix_row % rows;
        head = matrix_row / rows % heads;
        batch = matrix_row / rows / heads;
    }
};

__device__ inline long long thread_index() {
    return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ inline Mask mask_of(const Sizes& sizes) {
    return {sizes.seqlen_q, sizes.seqlen_k};
}

// Dot product of row `a_row` of A with row `b_row` of B.
template <int Dims>
__device__ inline acc_t dot_rows(Matrix<const scalar_t> a, int a_row, Matrix<const scalar_t> b,
                                 int b_row) {
    acc_t sum = 0;
#pragma unroll 8
    for (int d = 0; d < Dims; ++d) sum += to_acc(a.row(a_row)[d]) * to_acc(b.row(b_row)[d]);
    return sum;
}

// S = softmax_scale Q K^T; -inf where the row does not see the key.
__device__ inline void scores_element(const ForwardParams& params, acc_t* scores) {
    const Sizes& sizes = params.sizes;
    const long long index = thread_index();
    if (index >= rows_of_heads(sizes) * sizes.seqlen_k) return;
    const Element at(index, sizes.heads, sizes.seqlen_q, sizes.seqlen_k);
    if (at.col >= mask_of(sizes).keys_end(at.row)) {
        scores[index] = negative_infinity();
        return;
    }
    const auto q = matrix_of<const scalar_t>(params.q, at.batch, at.head);
    const auto k = matrix_of<const scalar_t>(params.k, at.batch, kv_head_of(at.head, sizes));
    scores[index] = params.softmax_scale * dot_rows<kHeadDim>(q, at.row, k, at.col);
}

// O = P V over the keys that the row sees.
__device__ inline void output_element(const ForwardParams& params, const acc_t* probabilities) {
    const Sizes& sizes = params.sizes;
    const long long index = thread_index();
    if (index >= rows_of_heads(sizes) * kValueDim) return;
    const Element at(index, sizes.heads, sizes.seqlen_q, kValueDim);
    const auto v = matrix_of<const scalar_t>(params.v, at.batch, kv_head_of(at.head, sizes));
    const acc_t* p = probabilities + at.matrix_row * sizes.seqlen_k;

    acc_t sum = 0;
    const int keys = mask_of(sizes).keys_end(at.row);
    for (int j = 0; j < keys; ++j) sum += p[j] * to_acc(v.row(j)[at.col]);
    matrix_of<scalar_t>(params.o, at.batch, at.head).row(at.row)[at.col] = from_acc<scalar_t>(sum);
}
