// The workspace of the Hopper backward: the sums of dQ, the statistics of rows, parts of dK and dV,
// counts of turns, and what is seen of tiles of keys.
#pragma once

#include "hopper/backward/hidden_keys.cuh"
#include "hopper/backward/key_statistics.cuh"
#include "hopper/backward/wgmma_key_sums.cuh"
#include "hopper/backward/wgmma_query_sums.cuh"
#include "scores/dropout.cuh"

// Whether a block uses the same sums for one head after the other. They stay in the L2 cache then.
// A warpgroup that has whole tiles may get sums that the other one had: it has waited for dS^T of
// its tile, which the other shared after it was done with them. Packed sequences have few keys, as
// far as known: then there are no sums of several tiles of keys.
constexpr bool kReusesSums = kAdding == kAlone && kRounds && !kPacked;

// The workspace: the sums of dQ, tile by tile; the statistics of rows; sums of dK and dV if blocks
// have parts of the queries; if blocks take turns, how many have added each warpgroup's part of a
// tile; what is seen of tiles of keys, if a mask hides some. From `end` on, it has what each kernel
// names.
template <int BlockM, class SumsOfTile>
struct Workspace {
    using Sums = SumsOfTile;
    static constexpr int kBlockM = BlockM;

    float* sums;
    RowStatistics<BlockM>* rows;
    WgmmaKeySums key_sums;
    unsigned int (*added)[kAdders];
    SeenKeys::Part* seen;
    unsigned int* end;
    int heads, tiles;  // tiles of one head; of packed sequences, of all of them

    __device__ explicit Workspace(const BackwardParams& call)
        : sums(static_cast<float*>(call.workspace)),
          heads(call.sizes.heads),
          tiles(row_tiles<BlockM>(kPacked ? call.sizes.batch : 1, call.sizes.seqlen_q)) {
        const int count = (kPacked ? 1 : call.sizes.batch) * heads * tiles;
        rows = reinterpret_cast<RowStatistics<BlockM>*>(sums + static_cast<long long>(count) *
                                                                   Sums::kTile);
        key_sums = {{reinterpret_cast<float*>(rows + count), call.sizes}};
        added =
            reinterpret_cast<unsigned int (*)[kAdders]>(key_sums.data + KeySums::count(call.sizes));
        seen = added[kTurns ? count : 0];
        end = seen + SeenKeys::count(call);
    }

    __device__ SeenKeys seen_keys(const BackwardParams& call, const KeyWork& work) const {
        return {seen, call, work.sequence(call), work.kv_head()};
    }
    // The tiles of keys before that of `work`, but not those left out.
    __device__ int tiles_before(const BackwardParams& call, const KeyWork& work) const {
        if constexpr (kLeavesOutHidden) return seen_keys(call, work).before(work.first_key);
        return work.first_key / kBlockN;
    }
    // The index of a tile of a sequence, the inverse of row_tile. A grid has a block for each tile,
    // so an int suffices.
    __device__ int place_of(const Sequence& sequence, int head, int tile) const {
        return place_from(first_place_of(sequence), head, tile);
    }
    // The same from the index of the sequence's first tile, which need not be recomputed each time.
    __device__ int place_from(int first_place, int head, int tile) const {
        return first_place + head * tiles + tile;
    }
    __device__ int first_place_of(const Sequence& sequence) const {
        if constexpr (kPacked) return sequence.first_q / BlockM + sequence.batch;
        return sequence.batch * heads * tiles;
    }
    // The index of the sums that a block uses for the first tile of a sequence.
    __device__ int first_sums_of(const BackwardParams& call, const KeyWork& work) const {
        if constexpr (!kReusesSums) return first_place_of(work.sequence(call));
        const int first_head = blockIdx.x / kClusterBlocks * heads_of_part(call.sizes);
        return (first_head - work.heads(call.sizes).begin) * tiles;
    }
    __device__ float* sums_of(const Sequence& sequence, int head, int tile) const {
        return sums_at(place_of(sequence, head, tile));
    }
    __device__ float* sums_at(int place) const {
        return sums + static_cast<long long>(place) * Sums::kTile;
    }
    // Rounds a part of a tile of dQ, of which a warpgroup has all sums.
    template <int Count>
    __device__ void round(const BackwardParams& call, const Sequence& sequence, int first_sums,
                          const float* tile_sums, const float* part,
                          const float (&of_part)[Count]) const {
        const int place = static_cast<int>((tile_sums - sums) / Sums::kTile) - first_sums;
        const int head = place / tiles, first_row = place % tiles * BlockM;
        auto rows = sequence.queries<scalar_t>(call.dq, head);
        rows.data = rows.row(first_row);
        Sums::round(tile_sums, part, of_part, rows, sequence.seqlen_q - first_row,
                    call.softmax_scale * kept_scale(call.features));
    }
    // Adds a warpgroup's part of a tile of dQ or, if it is the `last` to add, rounds it with the
    // sums of others. One that `sets` the sums is the first.
    template <int Count>
    __device__ static void add_or_round(const BackwardParams& call, const Sequence& sequence,
                                        float* tile_sums, float* part, float (&of_part)[Count],
                                        bool last, bool sets) {
        if (!kRounds || !last) return Sums::add(part, of_part, sets);
        if (!sets) Sums::collect(of_part, part);
        const Workspace workspace(call);
        workspace.round(call, sequence, workspace.first_place_of(sequence), tile_sums, part,
                        of_part);
    }
    __device__ RowStatistics<BlockM>& rows_of(const Sequence& sequence, int head, int tile) const {
        return rows[place_of(sequence, head, tile)];
    }
    __device__ unsigned int (&added_to(const Sequence& sequence, int head, int tile)
                                 const)[kAdders] {
        return added[place_of(sequence, head, tile)];
    }
};
