// The bias of tiles of scores, copied to shared memory by TMA like Q and K: if it has 16-bit
// elements and its layout suits TMA.
#pragma once

#include "call/params.cuh"
#include "hopper/wgmma_products.cuh"

constexpr bool kBiasBoxes = BIAS_BOXES;
constexpr bool kBiasRowsDiffer = BIAS_ROWS_DIFFER;  // or all queries share one

// The elements of the bias; without a bias, any type will do.
template <class T>
struct BoxedElement {
    using type = T;
};
template <>
struct BoxedElement<void> {
    using type = operand_t;
};
template <int Rows, int Keys>
using BiasRowsOf = PanelTile<Rows, Keys, BoxedElement<bias_t>::type>;

// A tile of the bias in shared memory for each warpgroup, if there are boxes.
template <class Tile, int Warpgroups, bool Any = kBiasBoxes>
struct BiasTiles {};
template <class Tile, int Warpgroups>
struct BiasTiles<Tile, Warpgroups, true> {
    Tile bias[Warpgroups];
};

// The map of the bias, if there is one.
template <bool Any = kBiasBoxes>
struct BiasMap {};
template <>
struct BiasMap<true> {
    TensorMap bias;
};

// The bytes that a copy brings: all rows of a tile or, if all queries share one row, its first.
template <class Tile>
constexpr int kBiasBytes = Tile::kPanels * (kBiasRowsDiffer ? Tile::kRows : 1) * kPanelRowBytes;

// Starts the copy of a tile, for scores of rows from first_row and keys from first_key on.
template <class Tile>
__device__ inline void copy_bias(Tile& tile, const TensorMap& map, ptx::Barrier& full,
                                 const ScoreTensor& bias, int batch, int head, int first_row,
                                 int first_key) {
    copy_tile(tile, map, full, bias.batch_stride == 0 ? 0 : batch, bias.head_stride == 0 ? 0 : head,
              kBiasRowsDiffer ? first_row : 0, 0, first_key);
}

// The bias of a row and a key in that tile.
template <class Tile>
__device__ inline auto* boxed_bias(Tile& tile, int row, int key) {
    return tile.at(kBiasRowsDiffer ? row : 0, key);
}
