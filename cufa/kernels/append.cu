// append: new keys and values into a cache, after those that it holds.
//
// Row i of a sequence becomes row held + i of its cache. A sequence has one page of its own or,
// with a block table, pages anywhere (Kwon et al. 2023, section 5.1). A row that its pages have no
// place for is not written.
//
// Shapes   K (batch, seqlen, kv_heads, head_dim), V with value_dim; caches (pages, page_size,
//          kv_heads, head_dim or value_dim); held (batch); block table (batch, pages of a sequence)
// Owns     thread: a chunk of a row of K or V
// Writes   the caches
#include "call/columns.cuh"
#include "call/grid.cuh"
#include "call/tensor.cuh"

constexpr int kThreads = THREADS;
static_assert(sizeof(AppendParams) == PARAMS_BYTES, "the host passes a different struct");

template <int Dims>
constexpr int kChunks = Dims / kChunkOfRow<scalar_t, Dims>;
constexpr int kChunksOfBoth = kChunks<kHeadDim> + kChunks<kValueDim>;

// The page that a row of a sequence's cache is in; -1 for none.
__device__ inline int page_of(const AppendParams& params, int batch, long long row) {
    if (row < 0 || row / params.page_size >= params.pages_of_sequence) return -1;
    if (!params.table) return batch;
    const int page = params.table[batch * params.table_batch_stride + row / params.page_size];
    return page < params.pages ? page : -1;
}

template <int Dims>
__device__ inline void copy_chunk(const scalar_t* from, scalar_t* to, int number) {
    using Chunk = Pack<scalar_t, kChunkOfRow<scalar_t, Dims>>;
    reinterpret_cast<Chunk*>(to)[number] = reinterpret_cast<const Chunk*>(from)[number];
}

extern "C" __global__ void __launch_bounds__(kThreads)
    append(const __grid_constant__ AppendParams params) {
    const long long index = thread_of_grid<kThreads>();
    const int chunk = index % kChunksOfBoth;
    const long long row_of_head = index / kChunksOfBoth, token = row_of_head / params.heads;
    const int head = row_of_head % params.heads, row = token % params.seqlen;
    const int batch = token / params.seqlen;
    if (batch >= params.batch) return;

    const int held = params.held ? params.held[batch] : params.held_by_each;
    const long long row_of_cache = static_cast<long long>(held) + row;
    const int page = page_of(params, batch, row_of_cache);
    if (page < 0) return;
    const int row_of_page = row_of_cache % params.page_size;
    if (chunk < kChunks<kHeadDim>) {
        copy_chunk<kHeadDim>(matrix_of<const scalar_t>(params.k, batch, head).row(row),
                             matrix_of<scalar_t>(params.k_cache, page, head).row(row_of_page),
                             chunk);
    } else {
        copy_chunk<kValueDim>(matrix_of<const scalar_t>(params.v, batch, head).row(row),
                              matrix_of<scalar_t>(params.v_cache, page, head).row(row_of_page),
                              chunk - kChunks<kHeadDim>);
    }
}
