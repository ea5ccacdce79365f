// 8-bit values that are stored as wgmma reads them: transposed, with keys adjacent. No warp has to
// transpose them. But the product then needs weights in the order of the keys, four adjacent keys
// per thread, while a thread's scores are columns 2t and 2t + 1 of each eight. So the rows of K are
// copied in a different order.
#pragma once

#include "hopper/forward/fp8_values.cuh"
#include "hopper/forward/wgmma_forward.cuh"
#include "hopper/forward/wgmma_inspected_values.cuh"
#include "hopper/nonfinite_elements.cuh"

// A tile of K. Its first half has the first two of each four keys, its second half the other two.
// One copy brings one half, through a map with an axis of four keys and an axis of groups of four.
template <int Keys, int Dims>
struct HalvedKeyTile : PanelTile<Keys, Dims> {
    static constexpr int kHalf = Keys / 2;
    static_assert(kHalf % kSwizzleRows == 0, "halves are made of eights of rows");
};

template <int Keys, int Dims>
__device__ inline void copy_tile(HalvedKeyTile<Keys, Dims>& tile, const TensorMap& map,
                                 ptx::Barrier& barrier, int batch, int head, int first_key) {
    using Tile = HalvedKeyTile<Keys, Dims>;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
            ptx::copy_box(tile.data[panel][half * Tile::kHalf], map, barrier,
                          panel * Tile::kPanelCols, 2 * half, first_key / 4, head, batch);
        }
}

// The keys of a thread's scores in such a tile, as in KeysInOrder.
template <int Keys>
struct KeysInHalves {
    __device__ static int first() { return threadIdx.x % 4 * 4; }
    __device__ static constexpr int after_first(int i) {
        constexpr int kEights = Keys / 2 / 8;  // of columns in a half
        return i / 4 % kEights * 16 + i / 4 / kEights * 2 + i % 2;
    }
};

// Such weights, rounded to the left operand of the product with V.
template <int Keys>
__device__ inline void round_halves_to_weights(WgmmaOperand<Keys>& p, const WgmmaSums<Keys>& s) {
#pragma unroll
    for (int i = 0; i < Keys / kWgmmaK * 4; ++i) {
        // Words 0 and 1 are rows g and g + 8 of the first 16 keys, words 2 and 3 of the next 16.
        const float* const first = s + i / 2 * 4 + i % 2 * 2;
        const float* const second = first + Keys / 4;
        p[i / 4][i % 4] = ptx::pack_e4m3(first[0], first[1], second[0], second[1]);
    }
}

// A tile of V: one row per dim, in panels of equally many keys, as many as fit into a row.
template <int Keys, int Dims>
struct TransposedTile {
    static constexpr int kPanels = ceil_div(Keys, kPanelCols);
    static constexpr int kPanelKeys = Keys / kPanels;
    static_assert(Keys % kPanels == 0 && kPanelKeys % kWgmmaK == 0, "a panel is whole products");
    static_assert(Dims % kSwizzleRows == 0, "a panel is made of eights of rows");
    static constexpr int kBytes = Keys * Dims;  // that a copy brings

    alignas(kSwizzleBytes) scalar_t data[kPanels][Dims][kPanelCols];

    __device__ scalar_t* at(int key, int dim) {
        const int in_panel = key % kPanelKeys;
        const int chunk = in_panel / kChunkKeys ^ dim % kSwizzleRows;
        return &data[key / kPanelKeys][dim][chunk * kChunkKeys + in_panel % kChunkKeys];
    }
};

template <int Keys, int Dims>
__device__ inline void copy_tile(TransposedTile<Keys, Dims>& tile, const TensorMap& map,
                                 ptx::Barrier& barrier, int batch, int head, int first_key) {
    using Tile = TransposedTile<Keys, Dims>;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
        ptx::copy_box(tile.data[panel], map, barrier, first_key + panel * Tile::kPanelKeys, 0, head,
                      batch);
    }
}

// Issues o += p v.
template <int Keys, int Dims>
__device__ inline void issue_product_pv(WgmmaSums<Dims>& o, const WgmmaOperand<Keys>& p,
                                        const TransposedTile<Keys, Dims>& v) {
    using Tile = TransposedTile<Keys, Dims>;
    using Product = WgmmaOf<Dims, scalar_t>;
    const unsigned int v0 = operand_at(v.data, 0);
    hold_all(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < Keys; key += kWgmmaK) {
        const unsigned int step =
            (key / Tile::kPanelKeys * Dims * kPanelRowBytes + key % Tile::kPanelKeys) /
            kOperandUnit;
        Product::template multiply<false, true>(o, p[key / kWgmmaK], description(v0 + step));
    }
    ptx::wgmma_commit();
}

// Chunk i of a tile as words; any order will do.
template <int Keys, int Dims>
__device__ inline ChunkWords& chunk_of(TransposedTile<Keys, Dims>& tile, unsigned int i) {
    constexpr unsigned int kRowChunks = kPanelRowBytes / kChunkBytes;
    constexpr unsigned int kFilled = TransposedTile<Keys, Dims>::kPanelKeys / kChunkKeys;
    auto* const chunks = reinterpret_cast<ChunkWords*>(tile.data);
    if (kFilled == kRowChunks) return chunks[i];
    const unsigned int row = i / kFilled;
    return chunks[row * kRowChunks + (i % kFilled ^ row % kSwizzleRows)];
}

// Whether `thread`, one of Threads that search together, finds NaN in a tile. The consumers wait
// for it, so several chunks are loaded at once. Looking at the last chunk twice does no harm.
template <int Threads, int Keys, int Dims>
__device__ inline bool finds_nonfinite(TransposedTile<Keys, Dims>& tile, int thread) {
    constexpr unsigned int kCount = Keys / kChunkKeys * Dims, kAtOnce = 4;
    NanSearch searches[kAtOnce];
#pragma unroll 1  // such a warp is short of registers
    for (unsigned int first = thread; first < kCount; first += kAtOnce * Threads) {
        ChunkWords chunks[kAtOnce];
#pragma unroll
        for (unsigned int i = 0; i < kAtOnce; ++i)
            chunks[i] = chunk_of(tile, min(first + i * Threads, kCount - 1));
#pragma unroll
        for (unsigned int i = 0; i < kAtOnce; ++i)
#pragma unroll
            for (int word = 0; word < kChunkBytes / 4; ++word) searches[i].look_at(chunks[i][word]);
    }
    bool found = false;
#pragma unroll
    for (const NanSearch& search : searches) found |= search.found();
    return found;
}

// Replaces NaN in a tile by zero; `thread` is one of Threads that do this together.
template <int Threads, int Keys, int Dims>
__device__ inline void clear_nonfinite(TransposedTile<Keys, Dims>& tile, int thread) {
#pragma unroll 1
    for (unsigned int i = thread; i < Keys / kChunkKeys * Dims; i += Threads)
        clear_nan(chunk_of(tile, i));
}

// A warpgroup that computes with these values.
template <class Self, class Smem, int Dims>
struct TransposedConsumer : InspectedConsumer<ForwardConsumer<Self, Smem, Dims>> {
    using Base = InspectedConsumer<ForwardConsumer<Self, Smem, Dims>>;
    using Base::Base;
    using Base::smem;
    using Base::v_at;
    using typename Base::Output;
    using KeyOrder = KeysInHalves<kBlockN>;

    __device__ void issue_output(Output& o, const Weights& p) {
        smem.v_ring.wait_full(v_at);
        issue_product_pv(o, p, smem.v[v_at.stage]);
    }

    // NaN was taken out before the product, so there is none to add.
    template <int Pending>
    __device__ bool wait_values(Output& o) {
        wait_product<Pending>(o);
        release_and_advance(smem.v_ring, v_at);
        return false;
    }
    __device__ void add_nan(Output&, const WorkTile&, int) const {}

    __device__ void round(Weights& p, const Scores& s) const {
        round_halves_to_weights<kBlockN>(p, s);
    }
};
