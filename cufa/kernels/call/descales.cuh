// What 8-bit arrays are multiplied with, each of (batch, kv_heads) alone.
#pragma once

#include "call/params.cuh"

// One of those; 1 if the call has none of that array.
__device__ inline float descale_of(const ForwardParams& params, const void* descale, int batch,
                                   int kv_head) {
    const int index = batch * params.sizes.kv_heads + kv_head;
    return descale ? static_cast<const float*>(descale)[index] : 1;
}

// What a head's products are multiplied with: Q K^T to be scores, P V to be the output.
struct HeadScales {
    float scores = 0, output = 0;

    HeadScales() = default;
    __device__ HeadScales(const ForwardParams& params, int batch, int kv_head)
        : scores(static_cast<float>(params.softmax_scale) *
                 descale_of(params, params.features.q_descale, batch, kv_head) *
                 descale_of(params, params.features.k_descale, batch, kv_head)),
          output(descale_of(params, params.features.v_descale, batch, kv_head)) {}
};
