// The gradient of the bias: sums of dS in the workspace, which a separate entry rounds.
//
// Either the sums have the shape of the bias, and blocks add to them atomically. Or every score has
// its own, without any addition, and at the end the sums of scores that share an element of the
// bias are added in order. This is done if every run must give the same bits, and also if no scores
// share an element, when it is free.
#pragma once

#include "call/grid.cuh"
#include "call/tensor.cuh"

#if !defined(BIAS_GRADIENT) || !defined(OWN_BIAS_SUMS)
#error "the host must define BIAS_GRADIENT and OWN_BIAS_SUMS"
#endif

constexpr bool kBiasGradient = BIAS_GRADIENT;  // whether it is wanted
constexpr bool kOwnBiasSums = OWN_BIAS_SUMS;   // whether every score has its own sum

// The sums of one head of a sequence.
struct BiasSums {
    Matrix<acc_t> sums;

    __device__ BiasSums(const BackwardParams& params, const Sequence& sequence, int head,
                        acc_t* all) {
        const ScoreTensor& shape = params.dbias.out;
        if constexpr (kOwnBiasSums) {
            const long long keys = params.dbias.keys;
            sums = {all + sequence.first_row(head, params.sizes) * keys, keys};
        } else {
            sums = {all + sequence.batch * shape.batch_stride + head * shape.head_stride,
                    shape.row_stride};
        }
    }

    __device__ void add(int row, int key, acc_t gradient) const {
        acc_t& sum = sums.row(row)[key];
        if constexpr (kOwnBiasSums) {
            sum = gradient;
        } else {
            atomicAdd(&sum, gradient);
        }
    }
};

// Sets all sums to zero, because some scores are never seen. The whole grid takes part.
template <int Threads>
__device__ inline void clear_bias_sums(const BackwardParams& params, acc_t* sums) {
    clear_sums<Threads>(sums, kOwnBiasSums ? rows_of_heads(params.sizes) * params.dbias.keys
                                           : params.dbias.elements());
}

// The range [begin, end) of an axis of scores that shares an element of the bias.
struct Shared {
    int begin, end;

    __device__ Shared(int place, int bias_size, int size)
        : begin(bias_size == 1 ? 0 : place), end(bias_size == 1 ? size : min(place + 1, size)) {}
};

// The sum, in order, over the scores that share an element of the bias.
__device__ inline acc_t sum_of_shared(const BackwardParams& params, acc_t* sums, int batch,
                                      int head, int row, int key) {
    const BiasGradient& bias = params.dbias;
    const Shared batches(batch, bias.batch, params.sizes.batch);
    const Shared heads(head, bias.heads, params.sizes.heads);
    acc_t sum = 0;
    for (int b = batches.begin; b < batches.end; ++b) {
        const Sequence sequence(params, b);
        const Shared rows(row, bias.rows, sequence.seqlen_q);
        for (int h = heads.begin; h < heads.end; ++h) {
            const BiasSums of_head(params, sequence, h, sums);
            for (int i = rows.begin; i < rows.end; ++i) sum += of_head.sums.row(i)[key];
        }
    }
    return sum;
}

// One thread per element of the bias.
template <class Bias, int Threads>
__device__ inline void write_bias_gradient(const BackwardParams& params, acc_t* sums) {
    const BiasGradient& bias = params.dbias;
    const long long index = thread_of_grid<Threads>();
    if (index >= bias.elements()) return;
    acc_t sum;
    if constexpr (kOwnBiasSums) {
        const long long row = index / bias.keys;
        const long long head = row / bias.rows;
        sum = sum_of_shared(params, sums, head / bias.heads, head % bias.heads, row % bias.rows,
                            index % bias.keys);
    } else {
        sum = sums[index];
    }
    static_cast<Bias*>(bias.out.data)[index] =
        from_acc<Bias>(static_cast<accumulator_t<Bias>>(sum));
}
