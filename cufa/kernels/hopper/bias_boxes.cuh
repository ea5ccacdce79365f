// The bias of tiles of scores, brought to shared memory by the copy engine like Q and K: where it
// has 16 bits an element and lies as that engine needs it.
#pragma once

#include "call/params.cuh"
#include "hopper/wgmma_tiles.cuh"

constexpr bool kBiasBoxes = BIAS_BOXES;
constexpr bool kBiasRowsDiffer = BIAS_ROWS_DIFFER;  // or all queries have one

// Its elements; if there are none, as if they were an operand's.
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

// What a block has in shared memory, if there are boxes: a tile for each of its warpgroups.
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

// What a copy of a tile brings: all rows of it or, if one row is that of all queries, its first.
template <class Tile>
constexpr int kBiasBytes = Tile::kPanels * (kBiasRowsDiffer ? Tile::kRows : 1) * kPanelRowBytes;

// Starts the copy of a tile: the scores of rows from first_row and keys from first_key on.
template <class Tile>
__device__ inline void copy_bias(Tile& tile, const TensorMap& map, ptx::Barrier& full,
                                 const ScoreTensor& bias, int batch, int head, int first_row,
                                 int first_key) {
    copy_tile(tile, map, full, bias.batch_stride == 0 ? 0 : batch, bias.head_stride == 0 ? 0 : head,
              kBiasRowsDiffer ? first_row : 0, 0, first_key);
}

// Where that tile has the bias of a row and a key.
template <class Tile>
__device__ inline auto* boxed_bias(Tile& tile, int row, int key) {
    return tile.at(kBiasRowsDiffer ? row : 0, key);
}
