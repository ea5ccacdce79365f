// The factors of 8-bit arrays, one per batch and KV head.
#pragma once

#include "call/numbers.cuh"
#include "call/params.cuh"

// One such factor; 1 if the call has none for that array.
__device__ inline float descale_of(const ForwardParams& params, const void* descale, int batch,
                                   int kv_head) {
    const int index = batch * params.sizes.kv_heads + kv_head;
    return descale ? static_cast<const float*>(descale)[index] : 1;
}

// The factors of a head's products: they turn Q K^T into scores and P V into the output.
struct HeadScales {
    float scores = 0, output = 0;

    HeadScales() = default;
    __device__ HeadScales(const ForwardParams& params, int batch, int kv_head)
        : scores(params.softmax_scale *
                 descale_of(params, params.features.q_descale, batch, kv_head) *
                 descale_of(params, params.features.k_descale, batch, kv_head)),
          output(descale_of(params, params.features.v_descale, batch, kv_head)) {}

    // The factor of scores in log 2, but never 0, which a descale may be.
    __device__ float scores_log2() const {
        const float scale_log2 = scores * float(kLog2E);
        return scale_log2 == 0 ? kSmallestScale : scale_log2;
    }
};
