// Matrix products on CUDA cores: operands in shared memory, results in registers.
//
// The threads of a block are laid out in kY rows of kX lanes; the lanes of a row are in one warp. A
// thread owns rows y, y + kY, y + 2 kY, ... of a result. Of its columns, the thread owns x, x + kX,
// ... if columns are keys (score tiles), or 16-byte groups x, x + kX, ... if they are head dims
// (output tiles). TM + TN vectors feed TM * TN * kVec multiply-adds, so shared memory keeps up.
#pragma once

#include "cuda_cores/shared.cuh"

template <int Threads, int Lanes>
struct ThreadLayout {
    static_assert(32 % Lanes == 0 && Threads % 32 == 0, "the lanes of a row must be of one warp");
    static constexpr int kThreads = Threads;
    static constexpr int kX = Lanes;
    static constexpr int kY = Threads / Lanes;

    int x = threadIdx.x % kX;
    int y = threadIdx.x / kX;

    __device__ int row(int i) const { return y + i * kY; }
    __device__ int key(int j) const { return x + j * kX; }
    __device__ int dim(int c) const { return (x + c * kX) * kVec; }

    // Where a thread's `Count` rows are keys, they come in runs of kVec if possible: the weights of
    // a run are then one vector of a row of P or dS.
    template <int Count>
    static constexpr int kRun = Count % kVec == 0 ? kVec : 1;
    template <int Count>
    __device__ int key_row(int j) const {
        return (y + j / kRun<Count> * kY) * kRun<Count> + j % kRun<Count>;
    }

    // A thread's column groups in an output of `dims` columns, and the number of columns with
    // padding.
    __device__ static constexpr int groups(int dims) { return ceil_div(dims, kX * kVec); }
    __device__ static constexpr int padded(int dims) { return groups(dims) * kX * kVec; }
};

// A thread's part of a score tile, and of an output tile.
template <int TM, int TN>
using ScoreTile = acc_t[TM][TN];
template <int TM, int Groups>
using OutputTile = Vec[TM][Groups];

// scores[i][j] = sum_d a[row i][d] * b[key j][d] over Dims columns, as in S = Q K^T and dP = dO
// V^T.
template <int Dims, int TM, int TN, class Layout, class A, class B>
__device__ inline void product_nt(ScoreTile<TM, TN>& scores, const A& a, const B& b,
                                  const Layout& layout) {
    constexpr int kDepth = round_up(Dims, kVec);
    constexpr int kUnroll = 16 / kVec;
    static_assert(kDepth <= A::kCols && kDepth <= B::kCols, "an operand has too few columns");
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) scores[i][j] = 0;

#pragma unroll kUnroll
    for (int d = 0; d < kDepth; d += kVec) {
        Vec a_part[TM], b_part[TN];
#pragma unroll
        for (int i = 0; i < TM; ++i) a_part[i] = a.vec(layout.row(i), d);
#pragma unroll
        for (int j = 0; j < TN; ++j) b_part[j] = b.vec(layout.key(j), d);
#pragma unroll
        for (int e = 0; e < kVec; ++e)
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) scores[i][j] += a_part[i][e] * b_part[j][e];
    }
}

// The weight of a key that a row does not see: -0, which no other weight is.
__device__ inline acc_t unseen_weight() {
    return -acc_t(0);
}
__device__ inline bool is_unseen(float weight) {
    return __float_as_int(weight) == __float_as_int(-0.0f);
}
__device__ inline bool is_unseen(double weight) {
    return weight == 0 && __double2hiint(weight) < 0;
}

// sum += weight * values, element by element. In a Masked tile, values that a row does not see add
// nothing even if they are NaN or infinite. Values that it sees do, even if the weight is 0.
template <bool Masked>
__device__ inline void add_scaled(Vec& sum, acc_t weight, const Vec& values) {
    if (Masked && is_unseen(weight)) return;
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum[e] += weight * values[e];
}

// out[i][c] += sum_k weights[row i][k] * values[k][dims c], as in O += P V and dQ = dS K.
template <bool Masked, int TM, int Groups, class Layout, class A, class B>
__device__ inline void product_nn(OutputTile<TM, Groups>& out, const A& weights, const B& values,
                                  const Layout& layout) {
    constexpr int kDepth = B::kRows;
    static_assert(kDepth % kVec == 0, "weights are read in whole vectors");
#pragma unroll 2
    for (int k = 0; k < kDepth; k += kVec) {
        Vec row_weights[TM];
#pragma unroll
        for (int i = 0; i < TM; ++i) row_weights[i] = weights.vec(layout.row(i), k);
#pragma unroll
        for (int e = 0; e < kVec; ++e)
#pragma unroll
            for (int c = 0; c < Groups; ++c) {
                const Vec part = values.vec(k + e, layout.dim(c));
#pragma unroll
                for (int i = 0; i < TM; ++i) add_scaled<Masked>(out[i][c], row_weights[i][e], part);
            }
    }
}

// out[j][c] += sum_q weights[q][key row j] * values[q][dims c], as in dV += P^T dO and dK += dS^T
// Q.
template <bool Masked, int TN, int Groups, class Layout, class A, class B>
__device__ inline void product_tn(OutputTile<TN, Groups>& out, const A& weights, const B& values,
                                  const Layout& layout) {
    constexpr int kDepth = B::kRows;
    constexpr int kRun = Layout::template kRun<TN>;
    using Run = Pack<acc_t, kRun>;
#pragma unroll 4
    for (int q = 0; q < kDepth; ++q) {
        Vec part[Groups];
#pragma unroll
        for (int c = 0; c < Groups; ++c) part[c] = values.vec(q, layout.dim(c));
#pragma unroll
        for (int j = 0; j < TN; j += kRun) {
            const Run run =
                reinterpret_cast<const Run&>(weights.at(q, layout.template key_row<TN>(j)));
#pragma unroll
            for (int e = 0; e < kRun; ++e)
#pragma unroll
                for (int c = 0; c < Groups; ++c) add_scaled<Masked>(out[j + e][c], run[e], part[c]);
        }
    }
}

// Writes a thread's columns of one output row, from first_col on, scaled and rounded.
template <int Dims, int Groups, class Layout>
__device__ inline void store_row(scalar_t* row, const Vec (&values)[Groups], acc_t scale,
                                 const Layout& layout, int first_col = 0) {
    constexpr int kChunk = min_of(kChunkOfRow<scalar_t, Dims>, kVec);
    using Chunk = Pack<scalar_t, kChunk>;
#pragma unroll
    for (int c = 0; c < Groups; ++c)
#pragma unroll
        for (int part = 0; part < kVec; part += kChunk) {
            const int col = first_col + layout.dim(c) + part;
            if (col >= Dims) continue;
            Chunk chunk;
#pragma unroll
            for (int e = 0; e < kChunk; ++e) {
                chunk[e] = from_acc<scalar_t>(values[c][part + e] * scale);
            }
            *reinterpret_cast<Chunk*>(row + col) = chunk;
        }
}
