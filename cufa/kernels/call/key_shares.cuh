// The keys of all tiles of rows, divided into equal shares, whatever the lengths of sequences.
//
// A round is as many keys as a block processes at once. The rounds of all tiles form a line,
// sequence after sequence, and every share has equally many: perhaps the end of a tile, whole
// tiles, and the beginning of one more. If a tile takes time beside its keys, it has further rounds
// without keys before them. Only the GPU knows the lengths. stream-K divides matrix products in the
// same way (Osama et al. 2023).
#pragma once

#include "call/key_tiles.cuh"
#include "call/sequence_line.cuh"
#include "call/tensor.cuh"

// How many tiles of rows of a sequence follow each other in the line: one for each KV head and
// BlockM rows of its query heads, or one for each KV head alone.
template <int BlockM>
struct RowsInLine {
    __device__ static int tiles(const Sequence& sequence, const Sizes& sizes) {
        return ceil_div(sequence.seqlen_q * group_of(sizes), BlockM) * sizes.kv_heads;
    }
};
struct KeyHeadsInLine {
    __device__ static int tiles(const Sequence&, const Sizes& sizes) { return sizes.kv_heads; }
};

// The tiles of one sequence: how many there are, and the rounds of each that have keys.
struct SequenceRounds {
    int tiles, rounds_of_tile;
};

// The place of a round: the sequence, the number of its tile of rows, and the round in that tile,
// negative if it has no keys.
struct RoundPlace {
    int batch, tile, round;
    SequenceRounds sequence;
};

// The line. Whole warps call these functions, all lanes with the same arguments.
template <class InLine, int BlockN, int TilesOfRound, int RoundsWithoutKeys = 0>
struct RoundLine {
    static constexpr int kWithoutKeys = RoundsWithoutKeys;  // before those of each tile
    const ForwardParams& params;

    // The first round with keys of the tile after that of `place`, which must exist.
    __device__ RoundPlace next_tile(RoundPlace place) const {
        place.round = 0;
        ++place.tile;
        while (place.tile == place.sequence.tiles) {
            ++place.batch;
            place.tile = 0;
            place.sequence = of_sequence(place.batch);
        }
        return place;
    }

    // Even a tile that sees no key has a round with keys: its rows must be written.
    __device__ SequenceRounds of_sequence(int batch) const {
        const Sequence sequence(params, batch);
        if (!sequence.is_ours()) return {};
        const KeyTiles<BlockN> keys(sequence.mask(params.features), 0, sequence.seqlen_q);
        const int rounds = ceil_div(max(keys.end - keys.begin, 0), TilesOfRound * BlockN);
        return {InLine::tiles(sequence, params.sizes), max(rounds, 1)};
    }

    // The number of rounds of a sequence.
    __device__ int operator()(int batch) const {
        const SequenceRounds sequence = of_sequence(batch);
        return sequence.tiles * (kWithoutKeys + sequence.rounds_of_tile);
    }
};

// Rounds [begin, end) of the line.
struct KeyShare {
    int begin, end;
};

// All rounds in up to `most` shares, of which the first have one more if these cannot be equal.
struct EqualShares {
    int all, shares;

    __device__ EqualShares(int all, int most) : all(all), shares(min(most, all)) {}

    __device__ KeyShare share(int number) const {
        if (number >= shares) return {all, all};
        return {first_of(number), first_of(number + 1)};
    }

    // The share that has a round.
    __device__ int share_of(int round) const {
        const int rounds = all / shares, longer = all % shares;
        const int in_longer = longer * (rounds + 1);
        if (round < in_longer) return round / (rounds + 1);
        return longer + (round - in_longer) / rounds;
    }

  private:
    __device__ int first_of(int share) const {
        return share * (all / shares) + min(share, all % shares);
    }
};

// The line in up to `most` shares.
template <class Line>
struct KeyShares : Line {
    const SequenceLine<Line> sequences;
    const EqualShares equal;

    __device__ KeyShares(const ForwardParams& params, int most)
        : Line{params},
          sequences(params.sizes.batch, Line{params}),
          equal(sequences.count(), most) {}

    // The place of a round, which must exist.
    __device__ RoundPlace at(int round) const {
        const auto [batch, number] = sequences.at(round);
        const SequenceRounds sequence = Line::of_sequence(batch);
        const int of_tile = Line::kWithoutKeys + sequence.rounds_of_tile;
        return {batch, number / of_tile, number % of_tile - Line::kWithoutKeys, sequence};
    }
};
