// What a call gives each head: the slope of ALiBi, and the score of its sink.
#pragma once

#include "call/numbers.cuh"
#include "call/params.cuh"

// How fast scores fall with the distance of the key from the diagonal (ALiBi: Press et al. 2022).
__device__ inline acc_t alibi_slope_of(const Features& features, int batch, int head) {
    return static_cast<const acc_t*>(
        features.alibi_slopes)[batch * features.alibi_batch_stride + head];
}

// One more score in every row, without a value, in log 2: a row may attend to nothing (attention
// sinks: Xiao et al. 2023, where they are tokens; here they are learned scores, as in gpt-oss).
__device__ inline acc_t sink_log2_of(const Features& features, int head) {
    return static_cast<const acc_t*>(features.sink)[head] * acc_t(kLog2E);
}
