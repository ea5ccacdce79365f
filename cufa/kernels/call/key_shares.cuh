// The keys of all tiles of rows, divided evenly among blocks, whatever the lengths of sequences.
//
// A round is as many keys as a block processes at once. The rounds of all tiles form a line,
// sequence after sequence, and every block gets equally many: perhaps the end of a tile, whole
// tiles, and the beginning of one more. Only the GPU knows the lengths. stream-K divides matrix
// products in the same way (Osama et al. 2023).
#pragma once

#include "call/key_tiles.cuh"
#include "call/sequence_line.cuh"
#include "call/tensor.cuh"

// The tiles of rows of one sequence, over all KV heads: how many there are, and the rounds of each.
struct SequenceRounds {
    int tiles, rounds;

    __device__ int all() const { return tiles * rounds; }
};

// The place of a round: the sequence, the number of its tile of rows, and the round in that tile.
struct RoundPlace {
    int batch, tile, round;
    SequenceRounds of;
};

// Rounds [begin, end) of the line.
struct KeyShare {
    int begin, end;
};

// Whole warps call these functions, all lanes with the same arguments.
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

    // The block that has a round.
    __device__ int block_of(int round) const {
        return static_cast<int>(((round + 1ll) * shares - 1) / all);
    }

    // The place of a round, which must exist.
    __device__ RoundPlace at(int round) const {
        const auto [batch, number] = line().at(round);
        const SequenceRounds of = of_sequence(batch);
        return {batch, number / of.rounds, number % of.rounds, of};
    }

    // The first round of the tile after that of `place`, which must exist.
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

    // Even a tile without keys has a round: its rows must be written.
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
