// What the host passes, by value, in one struct. cufa/params.py has the same fields in the same
// order. A different size is a compile error, and a test echoes every field back to find swapped
// ones. Numbers are of the type of sums: compilers would convert a double anew in each round of a
// loop, to keep a register free. They take eight bytes in either type.
#pragma once

#include "scores/score_mod.cuh"

// A (batch, seqlen, heads, dim) array: strides in elements, the last axis contiguous. Packed
// sequences have no batch axis: its stride is 0.
struct Tensor {
    void* data;
    long long batch_stride, row_stride, head_stride;
};

// A (batch, heads, seqlen_q, seqlen_k) array: strides in elements, 0 along axes that are broadcast,
// the last axis contiguous.
struct ScoreTensor {
    void* data;
    long long batch_stride, head_stride, row_stride;
};

struct Sizes {
    int batch, heads, kv_heads;
    int seqlen_q, seqlen_k;  // of all sequences together if they are packed
    int step;                // the number of this launch, for kernels launched several times
    int most_keys;           // how many keys a sequence has at most
};

// The place of a part of a tile of queries: the tile's number in its head, the number of this part,
// how many parts the tile has, and the number of its first part among all parts of the head.
struct PartPlace {
    unsigned char tile, part, parts, first;
};
static_assert(kMostPartsOfHead < 256, "each number of a PartPlace has one byte");
template <bool Any>
struct PartPlaces {};
template <>
struct PartPlaces<true> {
    PartPlace places[kMostPartsOfHead];
};

// How tiles of queries are handed out if the keys of some are split among blocks (plan/parting.py).
// Of `count` items, the first `whole` are tiles with all their keys; the others are tiles in
// `parts` parts each, or fewer if they see fewer tiles of keys. If kPartsListed, all tiles are
// split, and there is a list of a head's parts. If kSharesKeys, `count` blocks have shares of all
// keys, and nothing is handed out.
struct Parting : PartPlaces<kPartsListed> {
    int whole, parts, count;
};

// What some calls ask for; config.cuh says what is used. It begins with the arrays that the
// caller's functions read, if any.
struct Features : ModArrays {
    ScoreTensor bias;
    ScoreTensor mask;          // bytes, not 0 where a row sees a key; or bits, lowest first
    const void* alibi_slopes;  // (batch, heads) of acc_t
    long long alibi_batch_stride;
    const void* sink;         // (heads) of acc_t
    const int* cu_seqlens_q;  // (batch + 1): where each sequence begins and the last ends
    const int* cu_seqlens_k;  // (batch + 1)
    const int* seqused_k;     // (batch)
    // (batch, kv_heads) of float32: factors of 8-bit Q, K and V; null: 1
    const void *q_descale, *k_descale, *v_descale;
    alignas(8) acc_t softcap;  // the bound of the scores
    alignas(8) acc_t softcap_reciprocal;
    alignas(8) acc_t kept_scale;  // the factor of a probability that dropout keeps
    unsigned long long seed;      // of the random numbers that dropout draws
    unsigned int offset;          // selects one of that seed's sequences
    unsigned int kept_carry;      // added to a random number, overflows where dropout keeps
    int window_left, window_right;
};

// Where keys and values are in pages: the numbers of the pages.
struct Pages {
    const int* table;  // (batch, of_sequence), the last axis contiguous
    int of_sequence;   // how many a sequence may have
    int batch_stride;
};

struct ForwardParams {
    Tensor q, k, v, o;  // if keys are in pages, the batch stride of k and v is a page's
    void* lse;          // (batch, heads, seqlen_q) of acc_t, natural logarithm; null: not wanted
    void* workspace;    // its parts are named in the kernel that uses it
    alignas(8) acc_t softmax_scale;
    alignas(8) acc_t scale_log2;  // times log2(e); never 0, since -inf * 0 is NaN
    alignas(8) Sizes sizes;
    Parting parting;
    Features features;
    Pages pages;
};

// The gradient of the bias: contiguous, in the shape of the bias, with 1 for broadcast axes.
struct BiasGradient {
    ScoreTensor out;
    int batch, heads, rows, keys;

    __device__ long long elements() const {
        return static_cast<long long>(batch) * heads * rows * keys;
    }
};

struct BackwardParams {
    Tensor q, k, v, o, dout, dq, dk, dv;
    void* lse;
    void* workspace;
    alignas(8) acc_t softmax_scale;
    alignas(8) acc_t scale_log2;  // times log2(e); never 0, since -inf * 0 is NaN
    alignas(8) Sizes sizes;
    Features features;
    const void* dlse;    // gradient of the LSE, in its shape and type; null: none
    void* dsink;         // (heads) of acc_t; null: not wanted
    BiasGradient dbias;  // its data is null if not wanted
};

struct SoftmaxParams {
    void *x, *y;  // (rows, cols)
    long long x_row_stride, y_row_stride;
    long long rows;
    int cols;
};

struct MergeParams {
    Tensor out_a, out_b, out;
    const void *lse_a, *lse_b;  // (batch, heads, seqlen) of acc_t
    void* lse;
    int batch, heads, seqlen;
};

struct RotaryParams {
    Tensor x, y;
    const void *cos, *sin;  // (places, rotary_dim / 2), contiguous
    const void* positions;  // null: a token's own number in its sequence
    long long positions_batch_stride, positions_stride;
    int batch, heads, seqlen, places;
};

// Queries that are rotated beside new keys; q is null if none are.
struct RotatedQueries {
    Tensor q, y;
    const void *cos, *sin;  // (places, rotary_dim / 2), contiguous
    int heads, seqlen;
    int step;  // between the positions of two queries: 1, or 0 if all have the first one's
    int places;
};

struct AppendParams {
    Tensor k, v, k_cache, v_cache;
    const int* held;   // (batch): the rows in the cache before; null: held_by_each in all
    const int* table;  // (batch, pages_of_sequence); null: a sequence has the page of its number
    long long table_batch_stride;
    int held_by_each, pages_of_sequence, pages, page_size;
    int batch, heads, seqlen;
    int* lengths;                        // (batch)
    const float *k_descale, *v_descale;  // (batch, heads), only for a cache of 8 bits; null: 1
    RotatedQueries rotated;
};

struct QuantizeParams {
    Tensor x, y;
    const int* cu_seqlens;  // (batch + 1), only for packed sequences
    // (batch, kv_heads): the bits of future descales; null: descales are given
    unsigned int* measured;
    float* descale;  // (batch, kv_heads)
    int batch, heads, kv_heads, seqlen;
};

#ifndef PARAMS_BYTES
#error "the host must define PARAMS_BYTES, the size of the struct it will pass"
#endif
