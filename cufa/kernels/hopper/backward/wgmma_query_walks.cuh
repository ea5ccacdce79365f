// The tiles of queries that a block of the Hopper backward processes, and the order in which it
// walks over them. If a mask or a mask_mod hides scores, only the producer looks for tiles that are
// shown; the others read the labels of the tiles that it sends.
#pragma once

#include "hopper/backward/key_statistics.cuh"
#include "hopper/backward/wgmma_key_work.cuh"
#include "hopper/labelled_ring.cuh"
#include "scores/seen_tiles.cuh"

// The tiles of queries of one head, by number, that see a tile of keys. From whole_begin to
// whole_end all rows see all keys. Up to last_end no row sees a key of a later tile that is not
// left out; in a window, from first_begin on, none of an earlier one.
template <int BlockM, int BlockN>
struct QueryTileRange {
    int begin, whole_begin, whole_end, end, first_begin, last_end;

    __device__ QueryTileRange(const Mask& mask, int first_key) {
        const int last_key = min(first_key + BlockN, mask.seqlen_k) - 1;
        const bool whole = first_key + BlockN <= mask.seqlen_k;
        begin = mask.first_row(first_key) / BlockM;
        end = ceil_div(mask.rows_end(last_key), BlockM);
        if (kUsedKeys && last_key < first_key) end = begin;  // none of the keys counts
        whole_begin = whole ? ceil_div(mask.first_row(last_key), BlockM) : end;
        whole_end = kRowsEnd ? mask.rows_end(first_key) / BlockM : end;
        const int next_key = first_key + BlockN;
        last_end = next_key < mask.seqlen_k ? mask.first_row(next_key) / BlockM : end;
        first_begin = first_key == 0 ? 0 : ceil_div(mask.rows_end(first_key - 1), BlockM);
    }

    __device__ bool masked(int tile) const {
        return tile < whole_begin || (kRowsEnd && tile >= whole_end);
    }
    __device__ bool any_masked() const {
        return kHidesScores || begin < whole_begin || (kRowsEnd && whole_end < end);
    }
    // Whether no earlier tile of keys adds to this tile's dQ.
    __device__ bool first_of(int tile) const { return kFirstSets && tile >= first_begin; }
    // Whether no later tile of keys adds to this tile's dQ.
    __device__ bool last_of(int tile) const { return tile < last_end; }
};

// Those of a block's work: one of kRowParts parts of them.
template <class Workspace>
struct WorkQueryTiles : QueryTileRange<Workspace::kBlockM, kBlockN> {
    using Range = QueryTileRange<Workspace::kBlockM, kBlockN>;
    using Range::begin;
    using Range::end;

    __device__ WorkQueryTiles(const BackwardParams& call, const KeyWork& work)
        : Range(work.mask(call), work.first_key) {
        if (kHidesKeys && begin < end) leave_out_hidden(call, work);
        if constexpr (kRowParts > 1) keep_part(begin, end, work.part % kRowParts, kRowParts);
    }

  private:
    // Tiles of keys that a mask hides have no queries, except the first if it sets the sums of dQ.
    __device__ void leave_out_hidden(const BackwardParams& call, const KeyWork& work) {
        const SeenKeys seen = Workspace(call).seen_keys(call, work);
        if (seen.cuts(0, work.first_key)) this->whole_begin = end;
        if (!kLeavesOutHidden) return;
        if (!seen.shows_any(0, work.first_key) && !KeyOrder<kBlockN>::sets_sums(work)) end = begin;
        const Mask mask = work.mask(call);
        const int next_key = seen.next_key(0, work.first_key + kBlockN, mask.seqlen_k);
        const bool is_last = next_key >= mask.seqlen_k;
        this->last_end = is_last ? end : mask.first_row(next_key) / Workspace::kBlockM;
    }
};

// A walk over the tiles of queries of a part of the heads. What blocks that begin together
// work on should be in the L2 cache. Without a window they see the same last queries: these come
// first, of all heads, so that blocks of any length add to the same sums in the same order. In a
// window, neighbours see overlapping queries, so each finishes one head before the next: the other
// still finds what both see there.
template <class Tiles>
struct QueryWalk {
    const Tiles& tiles;
    int heads, head, heads_end, tile;

    __device__ QueryWalk(const Tiles& tiles, const Sizes& sizes, int part)
        : tiles(tiles),
          heads(heads_of_part(sizes)),
          head(heads * (part / kRowParts)),
          heads_end(head + heads),
          tile(tiles.end - 1) {}

    __device__ bool at_end() const { return tile < tiles.begin || (kWindow && head == heads_end); }
    __device__ bool masked() const { return tiles.masked(tile); }
    __device__ void advance() {
        if constexpr (kWindow) {
            if (--tile >= tiles.begin) return;
            tile = tiles.end - 1;
            ++head;
        } else {
            if (++head < heads_end) return;
            head -= heads;
            --tile;
        }
    }
};

// The producer's walk over the tiles of queries that see some of the keys, head by head. If there
// are none, it has one tile that sees nothing.
template <class Seen, class Tiles, int BlockM>
struct SeenQueryWalk {
    const BackwardParams& call;
    SeenPart* parts;
    const KeyWork& work;
    const Tiles& tiles;
    int heads_end, head, tile, next_head, next_tile;
    bool cut;

    __device__ SeenQueryWalk(const BackwardParams& call, SeenPart* parts, const KeyWork& work,
                             const Tiles& tiles)
        : call(call), parts(parts), work(work), tiles(tiles) {
        const HeadRange heads = work.heads(call.sizes);
        heads_end = heads.end;
        next_head = heads.begin;
        next_tile = tiles.end;
        find_next();
        if (next_head == heads_end) {
            next_head = heads_end - 1;
            next_tile = tiles.end - 1;
        }
        advance();
    }

    __device__ bool at_end() const { return head == heads_end; }
    // Reads all that the next label needs now: once the stage is empty it would be late.
    __device__ void advance() {
        head = next_head;
        tile = next_tile;
        if (at_end()) return;
        cut = tiles.masked(tile) || seen_of(head).cuts(tile * BlockM, work.first_key);
        find_next();
    }
    __device__ HeadTileLabel label() const { return {head, tile, cut, next_head == heads_end}; }

  private:
    __device__ Seen seen_of(int head) const { return {parts, call, work.sequence(call), head}; }
    __device__ void find_next() {
        for (; next_head < heads_end; ++next_head, next_tile = tiles.end) {
            const int last_row = (next_tile - 1) * BlockM, begin = tiles.begin * BlockM;
            next_tile = seen_of(next_head).last_row(last_row, begin, work.first_key) / BlockM;
            if (next_tile >= tiles.begin) return;
        }
    }
};

// The walk of those who receive the tiles.
template <class Tiles, int Stages>
struct LabelledQueryWalk : LabelledTiles<Stages, HeadTileLabel> {
    using Base = LabelledTiles<Stages, HeadTileLabel>;
    const Tiles& tiles;
    int head, tile;

    __device__ LabelledQueryWalk(LabelledRing<Stages, HeadTileLabel>& ring,
                                 const RingPosition<Stages>& at, const Tiles& tiles)
        : Base(ring, at, tiles.begin >= tiles.end), tiles(tiles) {
        read();
    }
    __device__ void advance() {
        Base::advance();
        read();
    }

  private:
    __device__ void read() {
        if (this->ended) return;
        head = this->label.head;
        tile = this->label.tile();
    }
};
