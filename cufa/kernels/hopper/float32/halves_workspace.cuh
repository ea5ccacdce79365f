// The layout of tiles of halves in the workspace: first those of queries, then those of keys, for
// each head as many as row_tiles counts. Other data may follow.
#pragma once

#include "call/tensor.cuh"

template <class Queries, int BlockM, class Keys, int BlockN, class Params>
struct HalvesWorkspace {
    const Params& call;
    int query_tiles, key_tiles;

    __device__ explicit HalvesWorkspace(const Params& call)
        : call(call),
          query_tiles(row_tiles<BlockM>(call.sizes.batch, call.sizes.seqlen_q)),
          key_tiles(row_tiles<BlockN>(call.sizes.batch, call.sizes.seqlen_k)) {}

    __device__ Queries& queries(int head, int tile) const {
        return first_queries()[static_cast<long long>(head) * query_tiles + tile];
    }
    __device__ Keys& keys(int kv_head, int tile) const {
        auto* first = reinterpret_cast<Keys*>(
            first_queries() + static_cast<long long>(call.sizes.heads) * query_tiles);
        return first[static_cast<long long>(kv_head) * key_tiles + tile];
    }
    __device__ void* rest() const { return &keys(call.sizes.kv_heads, 0); }

    // The tile of queries, or of keys, that contains a row of a sequence.
    __device__ Queries& queries_from(const Sequence& sequence, int head, int row) const {
        return queries(head, tile_of<BlockM>(sequence.batch, call.features.cu_seqlens_q,
                                             call.sizes.seqlen_q, row));
    }
    __device__ Keys& keys_from(const Sequence& sequence, int kv_head, int key) const {
        return keys(kv_head, tile_of<BlockN>(sequence.batch, call.features.cu_seqlens_k,
                                             call.sizes.seqlen_k, key));
    }

  private:
    // The workspace has room to align its beginning as shared memory is aligned.
    __device__ Queries* first_queries() const {
        const auto begin = reinterpret_cast<unsigned long long>(call.workspace);
        constexpr int kAlignment = alignof(Queries);
        auto* const bytes = static_cast<unsigned char*>(call.workspace);
        return reinterpret_cast<Queries*>(bytes + (kAlignment - begin % kAlignment) % kAlignment);
    }
    // Counts like row_tile, for which rows before the first sequence have no tiles.
    template <int Rows>
    __device__ static int tile_of(int batch, const int* cu_seqlens, int seqlen, int row) {
        if constexpr (!kPacked) return first_row_tile<Rows>(batch, 0, seqlen) + row / Rows;
        return first_row_tile<Rows>(batch, cu_seqlens[batch], seqlen) - cu_seqlens[0] / Rows +
               row / Rows;
    }
};
