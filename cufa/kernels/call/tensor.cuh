// Views of the caller's arrays: the (seqlen, dim) matrices of a sequence, and the tile that a block
// processes.
#pragma once

#include "call/config.cuh"
#include "call/memory.cuh"
#include "call/params.cuh"
#include "ptx/ptx_common.cuh"
#include "scores/mask.cuh"

template <class T>
struct Matrix {
    T* data;
    long long row_stride;

    __device__ T* row(int r) const { return data + r * row_stride; }
    // The matrix of the rows from r on.
    __device__ Matrix from(int r) const { return {row(r), row_stride}; }
};

// Keys or values of one head of a sequence, in pages: page p of the sequence is page table[p].
template <class T>
struct PagedMatrix {
    T* data;
    long long page_stride, row_stride;
    const int* table;

    __device__ Matrix<T> page(int number) const {
        return {data + number * page_stride, row_stride};
    }
    __device__ T* row(int r) const { return page(table[r / kPageSize]).row(r % kPageSize); }
};

template <class T, bool Paged>
struct KeyMatrixOf {
    using type = Matrix<T>;
};
template <class T>
struct KeyMatrixOf<T, true> {
    using type = PagedMatrix<T>;
};
template <class T>
using KeyMatrix = typename KeyMatrixOf<T, kPaged>::type;

// The page numbers of a sequence's keys.
template <class Params>
__device__ inline const int* pages_of_sequence(const Params& params, int batch) {
    return params.pages.table + static_cast<long long>(batch) * params.pages.batch_stride;
}

// One sequence of a batch: its lengths, and where its rows begin in arrays without a batch axis.
struct Sequence {
    int batch;
    int first_q = 0, first_k = 0;
    int seqlen_q, seqlen_k;
    const int* pages = nullptr;  // the numbers of the pages of its keys

    // From values that were looked up before.
    __device__ Sequence(int batch, int first_q, int first_k, int seqlen_q, int seqlen_k)
        : batch(batch),
          first_q(first_q),
          first_k(first_k),
          seqlen_q(seqlen_q),
          seqlen_k(seqlen_k) {}

    template <class Params>
    __device__ Sequence(const Params& params, int batch)
        : batch(batch), seqlen_q(params.sizes.seqlen_q), seqlen_k(params.sizes.seqlen_k) {
        const Features& features = params.features;
        if constexpr (kPacked) {
            first_q = features.cu_seqlens_q[batch];
            if constexpr (!kPaged) first_k = features.cu_seqlens_k[batch];
            seqlen_q = features.cu_seqlens_q[batch + 1] - first_q;
            if constexpr (!kPaged) seqlen_k = features.cu_seqlens_k[batch + 1] - first_k;
        }
        if constexpr (kPaged) {
            pages = pages_of_sequence(params, batch);
            seqlen_k = params.pages.of_sequence * kPageSize;
        }
        if constexpr (kUsedKeys) {
            // Nobody checks these numbers. One below 0 counts as one that is too large.
            const auto used = static_cast<unsigned int>(features.seqused_k[batch]);
            seqlen_k = min(static_cast<unsigned int>(seqlen_k), used);
        }
    }

    // Whether this launch processes a sequence with so many queries.
    __device__ bool is_ours() const {
        return (kLeastQueries == 0 || seqlen_q >= kLeastQueries) &&
               (kMostQueries == 0 || seqlen_q <= kMostQueries);
    }

    __device__ Mask mask(const Features& features) const {
        return {seqlen_q, seqlen_k, features.window_left, features.window_right};
    }

    template <class T>
    __device__ Matrix<T> queries(const Tensor& tensor, int head) const {
        return rows_from<T>(tensor, head, first_q);
    }
    template <class T>
    __device__ KeyMatrix<T> keys(const Tensor& tensor, int kv_head) const {
        if constexpr (kPaged) {
            return {static_cast<T*>(tensor.data) + kv_head * tensor.head_stride,
                    tensor.batch_stride, tensor.row_stride, pages};
        } else {
            return rows_from<T>(tensor, kv_head, first_k);
        }
    }

    // Where a head's rows begin in the LSE and similar arrays: (batch, heads, seqlen_q) or, if
    // sequences are packed, (heads, rows of all sequences).
    __device__ long long first_row(int head, const Sizes& sizes) const {
        const long long heads = kPacked ? head : static_cast<long long>(batch) * sizes.heads + head;
        return heads * sizes.seqlen_q + first_q;
    }

  private:
    template <class T>
    __device__ Matrix<T> rows_from(const Tensor& tensor, int head, int first) const {
        return {static_cast<T*>(tensor.data) + batch * tensor.batch_stride +
                    head * tensor.head_stride + first * tensor.row_stride,
                tensor.row_stride};
    }
};

// The same for kernels without packed sequences.
template <class T>
__device__ inline Matrix<T> matrix_of(const Tensor& tensor, int batch, int head) {
    return {static_cast<T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride,
            tensor.row_stride};
}
// The same for an array with a place for each score.
template <class T>
__device__ inline Matrix<T> matrix_of(const ScoreTensor& tensor, int batch, int head) {
    return {static_cast<T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride,
            tensor.row_stride};
}
__device__ inline long long first_row_of(int batch, int head, const Sizes& sizes) {
    return (static_cast<long long>(batch) * sizes.heads + head) * sizes.seqlen_q;
}

// The number of rows of all query heads, as in the LSE and D.
template <class Count = long long>
__device__ inline Count rows_of_heads(const Sizes& sizes) {
    return static_cast<Count>(kPacked ? 1 : sizes.batch) * sizes.heads * sizes.seqlen_q;
}

// The number of query heads that share a KV head.
__device__ inline int group_of(const Sizes& sizes) {
    return sizes.heads / sizes.kv_heads;
}
__device__ inline int kv_head_of(int head, const Sizes& sizes) {
    return head / group_of(sizes);
}

// A tile of rows of one sequence; a block owns one for each head.
struct RowTile {
    int batch, first_row;
};

// The number of tiles of Rows rows in all sequences.
template <int Rows>
__device__ inline int row_tiles(int batch, int seqlen) {
    return kPacked ? seqlen / Rows + batch : batch * ceil_div(seqlen, Rows);
}

// The first tile of a sequence. first_row is its first row if sequences are packed.
template <int Rows>
__device__ inline int first_row_tile(int sequence, int first_row, int seqlen) {
    return kPacked ? first_row / Rows + sequence : sequence * ceil_div(seqlen, Rows);
}

// Tile number `tile`. In packed sequences, sequence b has the tiles from cu_seqlens[b] / Rows + b
// on: as many as it needs, plus perhaps some with a first row past its end. So tiles can be counted
// and found without the length of every sequence. A token may have several rows; `seqlen` counts
// rows.
template <int Rows>
__device__ inline RowTile row_tile(int tile, int batch, int seqlen, const int* cu_seqlens,
                                   int rows_of_token = 1) {
    if constexpr (!kPacked) {
        const int tiles = ceil_div(seqlen, Rows);
        return {tile / tiles, tile % tiles * Rows};
    }
    tile += cu_seqlens[0] * rows_of_token / Rows;  // rows before the first sequence have no tiles
    int sequence = 0;
    for (int end = batch; end - sequence > 1;) {
        const int middle = (sequence + end) / 2;
        const int first_tile = cu_seqlens[middle] * rows_of_token / Rows + middle;
        (first_tile <= tile ? sequence : end) = middle;
    }
    return {sequence, (tile - cu_seqlens[sequence] * rows_of_token / Rows - sequence) * Rows};
}

// Heads are counted over the whole batch. Packed sequences count as one: a head has the tiles of
// all of them in a line.
struct HeadTile {
    int head, tile;
};

// About two blocks on each SM of a large GPU.
constexpr int kSectionTiles = 256;

// The head and tile of a block. Heads come in sections of about as many tiles as run at once, so
// that what the tiles of a head share is in the L2 cache when they read it. Within a section the
// first tiles of all heads come first: they have most work, and long work that starts late would
// leave the GPU waiting. A section has at least LeastHeads.
template <int SectionTiles = kSectionTiles, int LeastHeads = 1>
__device__ inline HeadTile head_tile_of_block(int block, int heads, int tiles) {
    const int section_heads = min(max(SectionTiles / tiles, LeastHeads), heads);
    const int first_head = block / (section_heads * tiles) * section_heads;
    const int in_section = min(section_heads, heads - first_head);
    const int place = block - first_head * tiles;
    return {first_head + place % in_section, place / in_section};
}

// The tile of queries that a block owns.
struct QueryTile {
    Sequence sequence;
    int head, kv_head, first_row;
};

// The last queries come first: under a causal mask they see most keys.
template <int BlockM, int SectionTiles = kSectionTiles, class Params>
__device__ inline QueryTile query_tile_of_block(const Params& params, int block = blockIdx.x) {
    const Sizes& sizes = params.sizes;
    if constexpr (kPacked) {
        const int tiles = row_tiles<BlockM>(sizes.batch, sizes.seqlen_q);
        const auto [head, place] = head_tile_of_block<SectionTiles>(block, sizes.heads, tiles);
        const auto [batch, first_row] = row_tile<BlockM>(
            tiles - 1 - place, sizes.batch, sizes.seqlen_q, params.features.cu_seqlens_q);
        return {Sequence(params, batch), head, kv_head_of(head, sizes), first_row};
    }
    const int tiles = ceil_div(sizes.seqlen_q, BlockM);
    const auto [index, place] =
        head_tile_of_block<SectionTiles>(block, sizes.batch * sizes.heads, tiles);
    const int head = index % sizes.heads;
    return {Sequence(params, index / sizes.heads), head, kv_head_of(head, sizes),
            (tiles - 1 - place) * BlockM};
}

// The tile of keys that a block of the backward owns.
struct KeyTile {
    Sequence sequence;
    int kv_head, first_key;
};

// The first keys come first: under a causal mask most queries see them.
template <int BlockN, int LeastHeads = 1>
__device__ inline KeyTile key_tile_of_block(const BackwardParams& params, int block = blockIdx.x) {
    const Sizes& sizes = params.sizes;
    if constexpr (kPacked) {
        const auto [kv_head, tile] = head_tile_of_block<kSectionTiles, LeastHeads>(
            block, sizes.kv_heads, row_tiles<BlockN>(sizes.batch, sizes.seqlen_k));
        const auto [batch, first_key] =
            row_tile<BlockN>(tile, sizes.batch, sizes.seqlen_k, params.features.cu_seqlens_k);
        return {Sequence(params, batch), kv_head, first_key};
    }
    // A caller that repeats this keeps nothing in registers in between.
    const int tiles = ceil_div(ptx::anew(sizes.seqlen_k), BlockN);
    const auto [index, tile] =
        head_tile_of_block<kSectionTiles, LeastHeads>(block, sizes.batch * sizes.kv_heads, tiles);
    return {Sequence(params, index / sizes.kv_heads), index % sizes.kv_heads, tile * BlockN};
}

// The end of the keys that have gradients: all keys of the sequence, used or not.
__device__ inline int end_of_keys(const BackwardParams& params, const Sequence& sequence) {
    if constexpr (!kUsedKeys) return sequence.seqlen_k;
    if constexpr (!kPacked) return params.sizes.seqlen_k;
    const int* cu_seqlens = params.features.cu_seqlens_k + sequence.batch;
    return cu_seqlens[1] - cu_seqlens[0];
}
