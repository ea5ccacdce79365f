// The blocks of bwd_3_mma that own all keys of a KV head, of a short sequence.
#pragma once

#include "mma/bwd_3_keys.cuh"

// Calls `use` with each query head of the block's part.
template <class Use>
__device__ inline void for_each_head(const BackwardParams& params, const Use& use) {
    for (int h = 0; h < heads_of_part(params.sizes); ++h) use(query_head_of_block(params, h));
}

__device__ inline void attend_whole_heads(KeySmem& smem, const BackwardParams& params,
                                          KeyTile own) {
    const int keys_end = end_of_keys(params, own.sequence), seqlen_q = own.sequence.seqlen_q;
    const bool is_longer = kPacked && keys_end > kBlockN;  // than the caller said
    if (is_longer)
        for_each_head(params, [&](const QueryHead& head) { head.dq.clear<kThreads>(seqlen_q); });
    do {
        __syncthreads();  // sums are zero, and every warp is done with the keys before
        if (is_longer) clear_padding_of(smem);  // where gradients may have left NaN
        attend_keys(smem, params, own);
        own.first_key += kBlockN;
    } while (kPacked && own.first_key < keys_end);
    if (!is_longer) return;
    __syncthreads();  // sums are whole
    for_each_head(params, [&](const QueryHead& head) {
        const auto dq = own.sequence.queries<scalar_t>(params.dq, head.rules.head);
        for (int row = threadIdx.x / 32 * kMmaM; row < seqlen_q; row += kWarps * kMmaM)
            head.dq.round_rows<kHeadDim>(dq, row, seqlen_q, params.softmax_scale);
    });
}
