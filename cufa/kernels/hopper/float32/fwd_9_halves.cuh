// The first launch of fwd_9_float32 makes tiles of halves, one block per tile.
#pragma once

#include "hopper/float32/fwd_9_block.cuh"

constexpr int kHalvingThreads = HALVING_THREADS;

// Smaller exponents of rows are raised to these.
constexpr int kLeastKeyExponent = -100, kLeastValueExponent = -60;
// Beside larger values, the weights of other values would not fit into floats.
constexpr float kLargestValue = 0x1p40f;

// Calls write(row, col, piece) for all pieces of Rows rows, `count` of which exist.
template <int Rows, int Dims, class Write>
__device__ inline void for_pieces(const Matrix<const float>& from, int count, const Write& write) {
    constexpr int kAcross = kRowThreads<Dims>, kDown = kHalvingThreads / kAcross;
    static_assert(Rows % kDown == 0, "all threads have as many pieces");
#pragma unroll 2  // so many are loaded at once
    for (int first = 0; first < Rows; first += kDown) {
        const int row = first + threadIdx.x / kAcross;
        const int col = threadIdx.x % kAcross * kPieceCols<Dims>;
        write(row, col, RowPiece<Dims>(from, row, count, col));
    }
}

// The exponent of the unit of a row of queries or keys.
__device__ inline int unit_of(const RowPiece<kHeadDim>& piece) {
    return exponent_of<kLeastKeyExponent>(piece.largest_of_row()) - kTopExponent;
}

__device__ inline void halve_queries(const ForwardParams& call, int head, int tile) {
    const Sizes& sizes = call.sizes;
    const auto [batch, first_row] =
        row_tile<kBlockM>(tile, sizes.batch, sizes.seqlen_q, call.features.cu_seqlens_q);
    const Sequence sequence(call, batch);
    const auto q = sequence.queries<const float>(call.q, head);
    QueryHalves& to = Workspace(call).queries(head, tile);
    for_pieces<kBlockM, kHeadDim>(q.from(first_row), sequence.seqlen_q - first_row,
                                  [&](int row, int col, const RowPiece<kHeadDim>& piece) {
                                      const int unit = unit_of(piece);
                                      piece.write(to.rows[row / kWgmmaM], row % kWgmmaM, col,
                                                  power_of_two(-unit));
                                      if (col == 0) to.unit[row] = power_of_two(unit);
                                  });
}

__device__ inline void halve_keys(const ForwardParams& call, int kv_head, int tile) {
    const Sizes& sizes = call.sizes;
    const auto [batch, first_key] =
        row_tile<kBlockN>(tile, sizes.batch, sizes.seqlen_k, call.features.cu_seqlens_k);
    const Sequence sequence(call, batch);
    const int count = sequence.seqlen_k - first_key;
    const auto k = sequence.keys<const float>(call.k, kv_head);
    const auto v = sequence.keys<const float>(call.v, kv_head);
    TileHalves& to = Workspace(call).keys(kv_head, tile);
    const KeyMask mask(call.features, batch, kv_head * group_of(sizes));
    const int first = first_key;  // a lambda cannot capture what is bound
    const auto hides = [&](int key) {
        return kHidesKeys && key < count && !mask.shows(0, first + key);
    };
    for_pieces<kBlockN, kHeadDim>(
        k.from(first_key), count, [&](int key, int col, const RowPiece<kHeadDim>& piece) {
            const int unit = unit_of(piece);
            piece.write(to.k, key, col, hides(key) ? 0 : power_of_two(-unit));
            if (col == 0) to.units.unit[key] = power_of_two(unit);
        });
    for_pieces<kBlockN, kValueDim>(
        v.from(first_key), count, [&](int key, int col, const RowPiece<kValueDim>& piece) {
            const float largest = piece.largest_of_row();
            const bool finite = piece.row_is_finite();  // all threads of the row take part
            const bool held = finite && largest < kLargestValue, hidden = hides(key);
            const int exponent = held && !hidden ? exponent_of<kLeastValueExponent>(largest) : 0;
            const float factor = held && !hidden ? power_of_two(kTopExponent - exponent) : 0;
            piece.write(to.v, key, col, factor);
            if (col == 0) {
                to.units.value_exponent[key] = hidden ? negative_infinity() : exponent;
                to.units.value_reciprocal[key] = held || hidden ? power_of_two(-exponent) : -1;
            }
        });
}
