// The keys of all tiles of rows, shared out evenly among blocks, however long each sequence is.
//
// A round is as many keys as a block takes in at once. All rounds of all tiles stand in a line,
// sequence after sequence, and each block has as many of them as any other: the end of a tile
// perhaps, whole tiles, and the beginning of one more. Only the GPU knows the lengths. As products
// of matrices are shared out in stream-K (Osama et al. 2023).
#pragma once

#include "call/key_tiles.cuh"
#include "call/sequence_line.cuh"
#include "call/tensor.cuh"

// The tiles of rows of one sequence, of all KV heads: how many there are, and the rounds of each.
struct SequenceRounds {
    int tiles, rounds;

    __device__ int all() const { return tiles * rounds; }
};

// Where a round is: the sequence's tile of rows number `tile`, and which of that tile's it is.
struct RoundPlace {
    int batch, tile, round;
    SequenceRounds of;
};

// Rounds [begin, end) of the line.
struct KeyShare {
    int begin, end;
};

// Whole warps call what follows, all lanes with the same arguments.
template <int BlockM, int BlockN, int TilesOfRound>
class KeyRounds {
  public:
    __device__ KeyRounds(const ForwardParams& params, int blocks) : params(params) {
        all = line().count();
        shares = min(blocks, all);
    }

    __device__ KeyShare of_block(int block) const {
        if (block >= shares) return {all, all};
        return {first_of(block), first_of(block + 1)};
    }

    // Which block has a round.
    __device__ int block_of(int round) const {
        return static_cast<int>(((round + 1ll) * shares - 1) / all);
    }

    // Where a round is, which there must be.
    __device__ RoundPlace at(int round) const {
        const auto [batch, number] = line().at(round);
        const SequenceRounds of = of_sequence(batch);
        return {batch, number / of.rounds, number % of.rounds, of};
    }

    // The first round of the tile after that of `place`, which there must be.
    __device__ RoundPlace next_tile(RoundPlace place) const {
        place.round = 0;
        ++place.tile;
        while (place.tile == place.of.tiles) {
            ++place.batch;
            place.tile = 0;
            place.of = of_sequence(place.batch);
        }
        return place;
    }

  private:
    struct RoundsOf {
        const KeyRounds& rounds;

        __device__ int operator()(int batch) const { return rounds.of_sequence(batch).all(); }
    };
    __device__ SequenceLine<RoundsOf> line() const { return {params.sizes.batch, {*this}}; }

    // A tile has a round even if it has no keys: its rows must be written.
    __device__ SequenceRounds of_sequence(int batch) const {
        const Sequence sequence(params, batch);
        if (!sequence.is_ours()) return {};
        const int row_tiles = ceil_div(sequence.seqlen_q * group_of(params.sizes), BlockM);
        const KeyTiles<BlockN> keys(sequence.mask(params.features), 0, sequence.seqlen_q);
        const int rounds = ceil_div(max(keys.end - keys.begin, 0), TilesOfRound * BlockN);
        return {row_tiles * params.sizes.kv_heads, max(rounds, 1)};
    }

    __device__ int first_of(int block) const {
        return static_cast<int>(static_cast<long long>(all) * block / shares);
    }

    const ForwardParams& params;
    int all, shares;
};
