// append: new keys and values into a cache, after those that it holds, and queries made ready for
// them.
//
// Row i of a sequence becomes row held + i of its cache. A sequence has one page of its own or,
// with a block table, pages anywhere (Kwon et al. 2023, section 5.1). A row that its pages have no
// place for is not written. With ROTARY_DIM, keys are rotated by that row's angles on their way,
// and queries into an array of their own (see rotation.cuh). A cache of 8 bits takes keys and
// values of 16 in units of its descales, rounded.
//
// Shapes   K (batch, seqlen, kv_heads, head_dim), V with value_dim; caches (pages, page_size,
//          kv_heads, head_dim or value_dim); held, lengths (batch); block table (batch, pages of a
//          sequence); descales (batch, kv_heads); Q (batch, queries, heads, head_dim)
// Owns     thread: a part of a row of K, V or Q
// Writes   the caches; lengths, the rows that they hold then; Q rotated
#include "call/columns.cuh"
#include "call/grid.cuh"
#include "call/rotation.cuh"
#include "call/tensor.cuh"

using cache_t = key_t;
using table_t = TABLE_SCALAR;
constexpr int kThreads = THREADS;
constexpr int kRotaryDim = ROTARY_DIM;
using KeyRow = RotatedRow<scalar_t, kHeadDim, kRotaryDim, INTERLEAVED>;
using ValueRow = RotatedRow<scalar_t, kValueDim, 0, INTERLEAVED>;
constexpr int kPartsOfBoth = KeyRow::kParts + ValueRow::kParts;
static_assert(sizeof(AppendParams) == PARAMS_BYTES, "the host passes a different struct");

__device__ inline int held_by(const AppendParams& params, int batch) {
    return params.held ? params.held[batch] : params.held_by_each;
}

// The rows that a sequence's cache holds with the new ones: at most all that it has.
__device__ inline int length_after(const AppendParams& params, int batch) {
    const long long length = static_cast<long long>(held_by(params, batch)) + params.seqlen;
    const long long room = static_cast<long long>(params.pages_of_sequence) * params.page_size;
    return length < 0 ? 0 : min(length, room);
}

// The page that a row of a sequence's cache is in; -1 for none.
__device__ inline int page_of(const AppendParams& params, int batch, long long row) {
    if (row < 0 || row / params.page_size >= params.pages_of_sequence) return -1;
    if (!params.table) return batch;
    const int page = params.table[batch * params.table_batch_stride + row / params.page_size];
    return page < params.pages ? page : -1;
}

__device__ inline AngleTables<table_t> tables_of(const RotatedQueries& rotated) {
    return {static_cast<const table_t*>(rotated.cos), static_cast<const table_t*>(rotated.sin),
            rotated.places};
}

// Writes neighbouring columns of a row of a cache, in units of its descale.
template <int Count>
__device__ inline void write_cached(cache_t* to, const Pack<scalar_t, Count>& chunk,
                                    const float* descale, int index) {
    if constexpr (is_same<cache_t, scalar_t>) {
        *reinterpret_cast<Pack<scalar_t, Count>*>(to) = chunk;
    } else {
        const acc_t scale = 1 / acc_t(descale ? descale[index] : 1);
        float scaled[Count];
#pragma unroll
        for (int e = 0; e < Count; ++e) scaled[e] = to_acc(chunk[e]) * scale;
        write_e4m3(to, scaled);
    }
}

// Part number `index` of the new rows of all sequences: first parts of a key, then of its value.
__device__ inline void append_part(const AppendParams& params, long long index) {
    const int part = index % kPartsOfBoth;
    const long long row_of_head = index / kPartsOfBoth, token = row_of_head / params.heads;
    const int head = row_of_head % params.heads, row = token % params.seqlen;
    const int batch = token / params.seqlen;

    const long long row_of_cache = static_cast<long long>(held_by(params, batch)) + row;
    const int page = page_of(params, batch, row_of_cache);
    if (page < 0) return;
    const int row_of_page = row_of_cache % params.page_size;
    const int descale = batch * params.heads + head;
    const AngleTables<table_t> tables = tables_of(params.rotated);
    if (part < KeyRow::kParts) {
        cache_t* const to = matrix_of<cache_t>(params.k_cache, page, head).row(row_of_page);
        KeyRow::rotate(matrix_of<const scalar_t>(params.k, batch, head).row(row), part, tables,
                       row_of_cache, [&](int col, const KeyRow::Chunk& chunk) {
                           write_cached(to + col, chunk, params.k_descale, descale);
                       });
    } else {
        cache_t* const to = matrix_of<cache_t>(params.v_cache, page, head).row(row_of_page);
        ValueRow::rotate(matrix_of<const scalar_t>(params.v, batch, head).row(row),
                         part - KeyRow::kParts, tables, row_of_cache,
                         [&](int col, const ValueRow::Chunk& chunk) {
                             write_cached(to + col, chunk, params.v_descale, descale);
                         });
    }
}

// Part number `index` of all queries.
__device__ inline void rotate_query_part(const AppendParams& params, long long index) {
    const RotatedQueries& rotated = params.rotated;
    const int part = index % KeyRow::kParts;
    const long long row_of_head = index / KeyRow::kParts, token = row_of_head / rotated.heads;
    const int head = row_of_head % rotated.heads, row = token % rotated.seqlen;
    const int batch = token / rotated.seqlen;

    const long long position = held_by(params, batch) + static_cast<long long>(row) * rotated.step;
    scalar_t* const to = matrix_of<scalar_t>(rotated.y, batch, head).row(row);
    KeyRow::rotate(matrix_of<const scalar_t>(rotated.q, batch, head).row(row), part,
                   tables_of(rotated), position, [&](int col, const KeyRow::Chunk& chunk) {
                       *reinterpret_cast<KeyRow::Chunk*>(to + col) = chunk;
                   });
}

extern "C" __global__ void __launch_bounds__(kThreads)
    append(const __grid_constant__ AppendParams params) {
    const long long index = thread_of_grid<kThreads>(), batches = params.batch;
    if (index < batches) params.lengths[index] = length_after(params, index);
    const long long appended = batches * params.seqlen * params.heads * kPartsOfBoth;
    if (index < appended) {
        append_part(params, index);
    } else if constexpr (kRotaryDim > 0) {
        const long long rotated =
            batches * params.rotated.seqlen * params.rotated.heads * KeyRow::kParts;
        if (index - appended < rotated) rotate_query_part(params, index - appended);
    }
}
