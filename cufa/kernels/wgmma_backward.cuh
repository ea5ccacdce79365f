// What the Hopper backward is made of: which keys a block works on, which tiles of queries those
// take in, and where the sums of dQ and the rows' statistics lie.
#pragma once

#include "key_softmax.cuh"
#include "mask.cuh"
#include "schedule.cuh"
#include "sink_gradient.cuh"
#include "tensor.cuh"
#include "wgmma_tiles.cuh"

constexpr int kConsumers = 2;  // warpgroups of a block that compute
// Of how many heads blocks run together (plan/wgmma_backward.py).
constexpr int kSectionBytes = SECTION_BYTES, kSectionBlocks = SECTION_BLOCKS;
constexpr int kLeastOrderedHeads = LEAST_ORDERED_HEADS, kMostOrderedHeads = MOST_ORDERED_HEADS;

// How the sums of dQ come about: a block that works on all keys of a head adds to them alone; of
// others each adds as it comes, to sums that are zero at first, or after the first, or all do so in
// the order of their keys.
enum Adding { kAlone, kAsTheyCome, kAfterFirst, kInOrder };
constexpr Adding kAdding = ADDING;
// Whether the last to add rounds the sums, so that no other launch need do so.
constexpr bool kRounds = ROUNDS;
static_assert(!kRounds || kAdding == kAlone || kAdding == kInOrder,
              "nobody would know that it is the last");
// Whether the first sets the sums, so that they need not be zero: if all queries that see any key
// see the first.
constexpr bool kFirstSets = kAdding != kAsTheyCome && !kWindow;
static_assert(kFirstSets || kAdding != kAfterFirst, "the sums are nobody's to set");
// Whether blocks wait for others.
constexpr bool kTurns = kAdding == kAfterFirst || kAdding == kInOrder;

// A tile of keys of one KV head; batch -1: there is none left.
struct KeyWork : Lengths {
    int batch, kv_head, first_key;

    KeyWork() = default;
    __device__ KeyWork(const Sequence& sequence, int kv_head, int first_key)
        : Lengths(sequence), batch(sequence.batch), kv_head(kv_head), first_key(first_key) {}

    __device__ bool exists() const { return batch >= 0; }
    __device__ static KeyWork none() { return {Sequence(-1, 0, 0, 0, 0), 0, 0}; }

    __device__ Sequence sequence(const BackwardParams& call) const {
        return Lengths::sequence(call, batch);
    }
    __device__ Mask mask(const BackwardParams& call) const {
        return sequence(call).mask(call.features);
    }
    // Of packed sequences more tiles are taken than there are.
    __device__ bool has_keys(const BackwardParams& call) const {
        return !kPacked || first_key < end_of_keys(call, sequence(call));
    }
    // Where the copy engine finds the tile: packed sequences are one batch.
    __device__ int map_batch() const { return kPacked ? 0 : batch; }
};

// The tiles of keys that a block takes at a time: one or, if it is alone, all of one head.
template <int BlockN>
struct KeyTiles {
    // Heads come in sections. Within a section the first keys come first: under a causal mask most
    // queries see those, and long work that starts late would leave the GPU waiting for it; and
    // blocks that take turns wait for none that begin later.
    __device__ static KeyWork at(unsigned int index, const BackwardParams& call) {
        const Sizes& sizes = call.sizes;
        if (index >= count(sizes)) return KeyWork::none();
        if constexpr (kPacked) {
            const auto [batch, first_key] = row_tile<BlockN>(
                index / sizes.kv_heads, sizes.batch, sizes.seqlen_k, call.features.cu_seqlens_k);
            return {Sequence(call, batch), static_cast<int>(index % sizes.kv_heads), first_key};
        }
        const int tiles = tiles_of_head(sizes), heads = sizes.batch * sizes.kv_heads;
        const int of_section = section_heads(sizes);

        const int first_head = index / (of_section * tiles) * of_section;
        const int in_section = min(of_section, heads - first_head);
        const int place = index - first_head * tiles;
        const int head = first_head + place % in_section;
        return {Sequence(call, head / sizes.kv_heads), head % sizes.kv_heads,
                place / in_section * BlockN};
    }

    __device__ static KeyWork first(const BackwardParams& call) { return at(blockIdx.x, call); }
    // How many times something can be taken.
    __device__ static unsigned int count(const Sizes& sizes) {
        if (kPacked) return sizes.kv_heads * row_tiles<BlockN>(sizes.batch, sizes.seqlen_k);
        return sizes.batch * sizes.kv_heads * tiles_of_head(sizes);
    }

    // Goes on to the next tile, if there is one that was taken with this.
    __device__ static bool next(KeyWork& work, const Sizes& sizes) {
        return kAdding == kAlone && (work.first_key += BlockN) < sizes.seqlen_k;
    }
    __device__ static bool sets_sums(const KeyWork& work) {
        return kFirstSets && work.first_key == 0;
    }

  private:
    __device__ static int tiles_of_head(const Sizes& sizes) {
        return kAdding == kAlone ? 1 : ceil_div(sizes.seqlen_k, BlockN);
    }
    // Blocks of one length walk in step through the queries of a head: one head after the other.
    // Under a causal mask lengths differ, and blocks that add in order begin one after the other:
    // both leave SMs idle at the end of a section of too few heads. Of too many, the L2 cache does
    // not hold what they work on.
    __device__ static int section_heads(const Sizes& sizes) {
        const int enough = ceil_div(kSectionBlocks, max(1, tiles_of_head(sizes)));
        if (kAdding == kInOrder && kCausal) {
            return even(sizes, min(max(enough, kLeastOrderedHeads), kMostOrderedHeads));
        }
        if (kAdding == kInOrder) return even(sizes, enough);
        if (!kCausal) return 1;
        return sizes.heads > sizes.kv_heads ? even(sizes, enough) : cached_heads(sizes);
    }
    // At most so many, in sections of one size.
    __device__ static int even(const Sizes& sizes, int most) {
        const int heads = sizes.batch * sizes.kv_heads;
        return ceil_div(heads, ceil_div(heads, most));
    }
    // As many as the L2 cache holds queries and sums of.
    __device__ static int cached_heads(const Sizes& sizes) {
        constexpr int kRowBytes = (kHeadDim + kValueDim) * static_cast<int>(sizeof(scalar_t)) +
                                  kHeadDim * static_cast<int>(sizeof(float));
        const int head_rows = max(1, sizes.heads / sizes.kv_heads * sizes.seqlen_q);
        const int fitting = kSectionBytes / kRowBytes / head_rows;
        return min(max(fitting, 1), sizes.batch * sizes.kv_heads);
    }
};

// The tiles of queries of one head that see a tile of keys. Only from whole_begin to whole_end do
// all rows see all keys; up to last_end they see no keys of a later tile.
template <int BlockM, int BlockN>
struct QueryTiles {
    int begin, whole_begin, whole_end, end, last_end;

    __device__ QueryTiles(const Mask& mask, int first_key) {
        const int last_key = min(first_key + BlockN, mask.seqlen_k) - 1;
        const bool whole = first_key + BlockN <= mask.seqlen_k;
        begin = mask.first_row(first_key) / BlockM;
        end = ceil_div(mask.rows_end(last_key), BlockM);
        if (kUsedKeys && last_key < first_key) end = begin;  // none of the keys counts
        whole_begin = whole ? ceil_div(mask.first_row(last_key), BlockM) : end;
        whole_end = kRowsEnd ? mask.rows_end(first_key) / BlockM : end;
        const int next_key = first_key + BlockN;
        last_end = next_key < mask.seqlen_k ? mask.first_row(next_key) / BlockM : end;
    }

    __device__ bool masked(int tile) const {
        return tile < whole_begin || (kRowsEnd && tile >= whole_end);
    }
    __device__ bool any_masked() const {
        return begin < whole_begin || (kRowsEnd && whole_end < end);
    }
    // Whether no later tile of keys adds to this tile's dQ.
    __device__ bool last_of(int tile) const { return tile < last_end; }
};

// Where in the tiles of queries of a group of heads a warp is. The last tiles come first, of all
// heads: blocks that begin together then work on the same queries, which the L2 cache has, and add
// to them in the same order, whatever their mask.
template <class Tiles>
struct QueryWalk {
    const Tiles& tiles;
    int group, head, heads_end, tile;

    __device__ QueryWalk(const Tiles& tiles, const Sizes& sizes, int kv_head)
        : tiles(tiles),
          group(sizes.heads / sizes.kv_heads),
          head(group * kv_head),
          heads_end(head + group),
          tile(tiles.end - 1) {}

    __device__ bool at_end() const { return tile < tiles.begin; }
    __device__ bool masked() const { return tiles.masked(tile); }
    __device__ void advance() {
        if (++head < heads_end) return;
        head -= group;
        --tile;
    }
};

// A tile of dQ^T as the warpgroups have it: parts of 64 dims by Cols queries, each a warpgroup's
// accumulators, of which a thread's fours lie together. Parts are panels of dims, or, if there is
// but one panel, eights of queries.
template <int BlockM, int Panels, int QueryParts>
struct QuerySums {
    static constexpr int kCols = BlockM / QueryParts;
    static constexpr int kPart = kPanelCols * kCols;
    static constexpr int kParts = Panels * QueryParts;
    static constexpr int kTile = kPart * kParts;
    static_assert(Panels == 1 || QueryParts == 1, "either dims are parted or queries");

    // The query and the dim of the first of the fours with this index. The second is of the next
    // query, the other two are eight dims further on.
    __device__ static int query(int four) {
        const int part = Panels == 1 ? four / (kPart / 4) : 0;
        return part * kCols + four / kWarpgroup % (kCols / 8) * 8 + four % 4 * 2;
    }
    __device__ static int dim(int four) {
        const int part = Panels == 1 ? 0 : four / (kPart / 4);
        return part * kPanelCols + four % kWarpgroup / 32 * 16 + four % 32 / 4;
    }

    // Adds a warpgroup's part to the sums in global memory, or sets them.
    __device__ static void add(float* tile, int part, const WgmmaSums<kCols>& sums, bool set) {
        float* fours = own_fours(tile, part);
#pragma unroll
        for (int i = 0; i < kCols / 8; ++i) {
            float* to = fours + i * kWarpgroup * 4;
            if (set) {
                *reinterpret_cast<Pack<float, 4>*>(to) = four_of(sums, i);
            } else {
                ptx::add_to_global(to, four_of(sums, i).v);
            }
        }
    }

    // Writes it as it lies there.
    __device__ static void write(float* part, const WgmmaSums<kCols>& sums) {
        unsigned int thread = threadIdx.x % kWarpgroup;
        ptx::hold(thread);  // or the address would be kept in a register from tile to tile
        auto* fours = reinterpret_cast<Pack<float, 4>*>(part) + thread;
#pragma unroll
        for (int i = 0; i < kCols / 8; ++i) fours[i * kWarpgroup] = four_of(sums, i);
    }

    // Writes a warpgroup's part of dQ's first rows, rounded: what it has and, unless that is all,
    // the sums in global memory.
    __device__ static void round(float* tile, int part, WgmmaSums<kCols>& sums, bool is_all,
                                 const Matrix<scalar_t>& dq, int rows, float scale) {
        const float* fours = own_fours(tile, part);
#pragma unroll
        for (int i = 0; i < kCols / 8; ++i) {
            if (is_all) break;
            const auto four = *reinterpret_cast<const Pack<float, 4>*>(fours + i * kWarpgroup * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[4 * i + e] += four[e];
        }
        const int first_four = part * (kPart / 4) + threadIdx.x % kWarpgroup / 32 * 32;
        const int row = query(first_four) + threadIdx.x % 32 / 4;
        const int col = dim(first_four) + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < kCols / 4; ++i) {
            // Eight dims of eight queries become eight queries of eight dims.
            const unsigned int pair =
                ptx::transpose_matrix(round_pair(sums[2 * i] * scale, sums[2 * i + 1] * scale));
            write_pair(dq, row + i / 2 * 8, col + i % 2 * 8, rows, pair);
        }
    }

  private:
    __device__ static Pack<float, 4> four_of(const WgmmaSums<kCols>& sums, int i) {
        return {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
    }
    __device__ static float* own_fours(float* tile, int part) {
        return tile + part * kPart + threadIdx.x % kWarpgroup * 4;
    }
    __device__ static void write_pair(const Matrix<scalar_t>& dq, int row, int col, int rows,
                                      unsigned int pair) {
        if (row >= rows || col >= kHeadDim) return;
        scalar_t* to = dq.row(row) + col;
        if (kHeadDim % 2 == 0 || col + 1 < kHeadDim) {
            *reinterpret_cast<unsigned int*>(to) = pair;
        } else {
            *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(pair);
        }
    }
};

// The workspace: dQ's sums tile by tile, then the rows' statistics and, if blocks take turns, how
// many have added each warpgroup's part of a tile; if they stay for many tiles of keys, how many of
// those were taken.
template <int BlockM, class Sums>
struct Workspace {
    float* sums;
    RowStatistics<BlockM>* rows;
    unsigned int (*added)[kConsumers];
    unsigned int* taken;
    int heads, tiles;  // tiles of one head; of packed sequences, of all of them

    __device__ explicit Workspace(const BackwardParams& call)
        : sums(static_cast<float*>(call.workspace)),
          heads(call.sizes.heads),
          tiles(row_tiles<BlockM>(kPacked ? call.sizes.batch : 1, call.sizes.seqlen_q)) {
        const int count = (kPacked ? 1 : call.sizes.batch) * heads * tiles;
        rows = reinterpret_cast<RowStatistics<BlockM>*>(sums + static_cast<long long>(count) *
                                                                   Sums::kTile);
        added = reinterpret_cast<unsigned int (*)[kConsumers]>(rows + count);
        taken = added[kTurns ? count : 0];
    }

    // Where a tile of a sequence lies; row_tile is the other way round. A grid has a block for each
    // tile, so an int counts them.
    __device__ int place_of(const Sequence& sequence, int head, int tile) const {
        return place_from(first_place_of(sequence), head, tile);
    }
    // The same from where the sequence's first tile lies, which need not be worked out each time.
    __device__ int place_from(int first_place, int head, int tile) const {
        return first_place + head * tiles + tile;
    }
    __device__ int first_place_of(const Sequence& sequence) const {
        if constexpr (kPacked) return sequence.first_q / BlockM + sequence.batch;
        return sequence.batch * heads * tiles;
    }
    __device__ float* sums_of(const Sequence& sequence, int head, int tile) const {
        return sums_at(place_of(sequence, head, tile));
    }
    __device__ float* sums_at(int place) const {
        return sums + static_cast<long long>(place) * Sums::kTile;
    }
    // Which tile of a sequence it is that has these sums.
    __device__ HeadTile tile_of(const float* tile_sums, int first_place) const {
        const int place = static_cast<int>((tile_sums - sums) / Sums::kTile) - first_place;
        return {place / tiles, place % tiles};
    }
    __device__ RowStatistics<BlockM>& rows_of(const Sequence& sequence, int head, int tile) const {
        return rows[place_of(sequence, head, tile)];
    }
    __device__ unsigned int (&added_to(const Sequence& sequence, int head, int tile)
                                 const)[kConsumers] {
        return added[place_of(sequence, head, tile)];
    }
};

// The tile of queries of a block of the kernels before and after the main one. Those go through the
// tiles backwards: what one kernel used last, the next finds in the L2 cache.
template <int BlockM, class Sums>
struct QueryBlock {
    Workspace<BlockM, Sums> workspace;
    Sequence sequence;
    int head, tile;

    __device__ static QueryBlock own(const BackwardParams& call) {
        const Workspace<BlockM, Sums> workspace(call);
        const int index = gridDim.x - 1 - blockIdx.x;
        const int matrix = index / workspace.tiles, tile = index % workspace.tiles;
        if constexpr (kPacked) {
            const auto [batch, first_row] = row_tile<BlockM>(
                tile, call.sizes.batch, call.sizes.seqlen_q, call.features.cu_seqlens_q);
            return {workspace, Sequence(call, batch), matrix, first_row / BlockM};
        }
        const int heads = call.sizes.heads;
        return {workspace, Sequence(call, matrix / heads), matrix % heads, tile};
    }
    // Of packed sequences the grid has more tiles than queries.
    __device__ bool exists() const { return !kPacked || tile * BlockM < sequence.seqlen_q; }
    __device__ float* sums() const { return workspace.sums_of(sequence, head, tile); }
};

// Whether NaN or infinity in a row of Q makes its output NaN, and so D, if it sees any key and the
// LSE says so.
constexpr bool kQueryShowsInOutput = !kSoftcap && !kSink;

// Makes dQ zero in the rows of a tile that see no key.
template <int Threads, int BlockM>
__device__ inline void clear_unseeing_rows(const BackwardParams& call, const Sequence& sequence,
                                           int head, int tile) {
    const auto dq = sequence.queries<scalar_t>(call.dq, head);
    const Mask mask = sequence.mask(call.features);
    const int end = min((tile + 1) * BlockM, sequence.seqlen_q);
    for (int row = tile * BlockM + threadIdx.x / 32; row < end; row += Threads / 32) {
        if (mask.keys_end(row) > mask.first_key(row)) continue;
        for (int col = threadIdx.x % 32; col < kHeadDim; col += 32) dq.row(row)[col] = scalar_t{};
    }
}

// Computes a tile's rows' statistics, and prepares what blocks will add to and count. Where the
// last of them rounds dQ, rows that none of them may work on are made zero.
template <int Threads, int BlockM, class Sums>
__device__ inline void prepare_rows(const BackwardParams& call) {
    const auto at = QueryBlock<BlockM, Sums>::own(call);
    if (!at.exists()) return;
    auto* fours = reinterpret_cast<Pack<float, 4>*>(at.sums());
#pragma unroll
    for (int i = threadIdx.x; !kFirstSets && i < Sums::kTile / 4; i += Threads) fours[i] = {};
    if (kTurns && threadIdx.x < kConsumers) {
        at.workspace.added_to(at.sequence, at.head, at.tile)[threadIdx.x] = 0;
    }

    if (kRounds) clear_unseeing_rows<Threads, BlockM>(call, at.sequence, at.head, at.tile);

    // As many lanes share a row as have an element of it each time.
    constexpr int kChunk = min_of(16 / sizeof(scalar_t), kValueDim & -kValueDim);
    constexpr int kLanes = kValueDim > 16 * kChunk ? 32 : kValueDim > 8 * kChunk ? 16 : 8;
    using Chunk = Pack<scalar_t, kChunk>;
    const Sequence& sequence = at.sequence;
    const auto o = sequence.queries<const scalar_t>(call.o, at.head);
    const auto dout = sequence.queries<const scalar_t>(call.dout, at.head);
    const long long first_row = sequence.first_row(at.head, call.sizes);
    const float* lse = static_cast<const float*>(call.lse) + first_row;
    const float* dlse = call.dlse ? static_cast<const float*>(call.dlse) + first_row : nullptr;
    const auto q = sequence.queries<const scalar_t>(call.q, at.head);
    // The copy engine brings rows of the next sequence, too.
    const int rows_end = kPacked ? call.sizes.seqlen_q - sequence.first_q : sequence.seqlen_q;
    RowStatistics<BlockM>& statistics = at.workspace.rows_of(sequence, at.head, at.tile);
    float not_zero = 0;  // a sum of all elements times 0
#pragma unroll
    for (int i = threadIdx.x / kLanes; i < BlockM; i += Threads / kLanes) {
        const int row = at.tile * BlockM + i;
        const bool inside = row < rows_end;
        const bool counts = row < sequence.seqlen_q;
        const float log = counts ? lse[row] : negative_infinity();
        float sum = 0;
        for (int col = threadIdx.x % kLanes * kChunk; inside && col < kValueDim;
             col += kLanes * kChunk) {
            const Chunk a = *reinterpret_cast<const Chunk*>(o.row(row) + col);
            const Chunk b = *reinterpret_cast<const Chunk*>(dout.row(row) + col);
#pragma unroll
            for (int e = 0; e < kChunk; ++e) sum += to_acc(a[e]) * to_acc(b[e]);
        }
        not_zero += sum * 0;
        if (inside && (!kQueryShowsInOutput || log == negative_infinity())) {
            for (int col = threadIdx.x % kLanes; col < kHeadDim; col += kLanes)
                not_zero += to_acc(q.row(row)[col]) * 0;
        }
        sum = lanes_sum<kLanes>(sum);
        if (threadIdx.x % kLanes == 0) {
            statistics.minus_lse[i] = (log == negative_infinity() ? log : -log) * unit_of_lse(call);
            statistics.minus_d[i] = dlse && counts ? dlse[row] - sum : -sum;
        }
    }
    const bool nonfinite = __syncthreads_or(not_zero != 0);
    if (threadIdx.x == 0) statistics.nonfinite = nonfinite;
}

// A tile of dQ, rounded; rows are a vector longer than they are, against bank conflicts.
template <int BlockM, int Panels>
struct RoundedTile {
    static constexpr int kVector = 16 / sizeof(scalar_t);
    alignas(16) scalar_t rows[BlockM][Panels * kPanelCols + kVector];
};

// Rounds a tile of dQ. Rows that see no key have sums that nobody set.
template <int Threads, int BlockM, int Panels, class Sums>
__device__ inline void round_tile(const BackwardParams& call) {
    constexpr int kVector = RoundedTile<BlockM, Panels>::kVector;
    auto& rounded = shared_memory<RoundedTile<BlockM, Panels>, ROUND_SMEM_BYTES>().rows;
    const auto at = QueryBlock<BlockM, Sums>::own(call);
    if (!at.exists()) return;
    const float scale = call.softmax_scale;
    const auto* fours = reinterpret_cast<const Pack<float, 4>*>(at.sums());
#pragma unroll
    for (int i = threadIdx.x; i < Sums::kTile / 4; i += Threads) {
        const auto four = fours[i];
        const int query = Sums::query(i), dim = Sums::dim(i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            rounded[query + e % 2][dim + e / 2 * 8] = from_acc<scalar_t>(four[e] * scale);
        }
    }
    __syncthreads();

    constexpr int kStored = min_of(kVector, kHeadDim & -kHeadDim);
    constexpr int kRowStores = kHeadDim / kStored;
    using Stored = Pack<scalar_t, kStored>;
    const auto dq = at.sequence.template queries<scalar_t>(call.dq, at.head);
    const int first_row = at.tile * BlockM;
    const int rows = min(BlockM, at.sequence.seqlen_q - first_row);
    const Mask mask = at.sequence.mask(call.features);
    for (int i = threadIdx.x; i < rows * kRowStores; i += Threads) {
        const int row = i / kRowStores, col = i % kRowStores * kStored;
        const bool sees_any = mask.keys_end(first_row + row) > mask.first_key(first_row + row);
        *reinterpret_cast<Stored*>(dq.row(first_row + row) + col) =
            sees_any ? *reinterpret_cast<const Stored*>(&rounded[row][col]) : Stored{};
    }
}

// Computes the gradient of a head's sink from the rows' statistics.
template <int Threads, int BlockM, class Sums>
__device__ inline void sum_up_sink(const BackwardParams& call) {
    const Workspace<BlockM, Sums> workspace(call);
    write_sink_gradient<Threads>(
        call,
        [&](const Sequence& sequence, int head, int row) -> RowStats {
            const auto& statistics = workspace.rows_of(sequence, head, row / BlockM);
            const float minus_lse = statistics.minus_lse[row % BlockM] / unit_of_lse(call);
            return {-minus_lse * static_cast<float>(kLog2E), -statistics.minus_d[row % BlockM]};
        },
        shared_memory<WarpSums<Threads>, SINK_SMEM_BYTES>());
}

// Takes NaN and infinity out of a tile of keys: 0 times it would reach the queries that do not see
// those. The ones that do get it from the values, which become NaN; nothing but dP is computed from
// these. `thread` is one of Threads that do it together, each a part of a row.
template <int Threads, class KeyRows, class ValueRows>
__device__ inline void take_out_of_keys(KeyRows& k, ValueRows& v, int thread) {
    constexpr int kParts = Threads / KeyRows::kRows;
    constexpr int kCols = KeyRows::kPanels * kPanelCols;
    const int row = thread % KeyRows::kRows, part = thread / KeyRows::kRows;
    NonfiniteSearch search;
#pragma unroll
    for (int col = part * kChunkCols; col < kCols; col += kParts * kChunkCols) {
        search.look_at(k.at(row, col));
    }
    if (!search.found()) return;
#pragma unroll 1
    for (int i = 0; i < kCols / kParts; ++i) {
        scalar_t& value =
            *k.at(row, (i / kChunkCols * kParts + part) * kChunkCols + i % kChunkCols);
        if (!is_finite(value)) value = scalar_t{};
    }
    *v.at(row, part) = from_acc<scalar_t>(negative_infinity() * 0);
}

// The same for a tile of queries and dO, once nobody works with them; all consumers do it. No
// thread takes a branch of its own here, for the sake of the loop around it: its addresses and
// descriptions would no longer be uniform.
template <int Threads, class QueryRows, class OutRows>
__device__ inline void take_out_of_queries(QueryRows& q, OutRows& dout, int barrier) {
    const int thread = threadIdx.x - kWarpgroup;
    ptx::named_barrier_sync<Threads>(barrier);
    clear_nonfinite<Threads>(q, thread);
    clear_nonfinite<Threads>(dout, thread);
    ptx::proxy_fence();
    ptx::named_barrier_sync<Threads>(barrier);
}

// A ring that the consumers themselves fill, each of `writers` threads a part.
template <int Stages>
__device__ inline void init_shared_ring(Ring<Stages>& ring, int writers, int readers) {
    for (int stage = 0; stage < Stages; ++stage) {
        ptx::barrier_init(ring.full[stage], writers);
        ptx::barrier_init(ring.empty[stage], readers);
    }
}

// Arrives once for a warp, when all of its lanes are there.
__device__ inline void arrive_by_warp(ptx::Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
}

// A warp is done with a stage once its part of a product is, and what its lanes read.
template <int Stages>
__device__ inline void release(Ring<Stages>& ring, RingPosition<Stages> at) {
    arrive_by_warp(ring.empty[at.stage]);
}

// The position that one advance leads from.
template <int Stages>
__device__ inline RingPosition<Stages> before(RingPosition<Stages> at) {
    if (at.stage == 0) return {Stages - 1, at.parity ^ 1};
    return {at.stage - 1, at.parity};
}

// Blocks that add to the same sums may take turns: in the order of their keys, so that a call has
// the same bits every time and one knows that it is the last, or just the first before all others.
// Threads beside the warpgroups wait for their turns and pass them on: the warpgroups then wait for
// no memory. To pass one on takes until all others can see the sums, about half the time that a
// tile takes; so another thread does that than waits for the next.
//
// A warpgroup's turns. A stage is full once it may add its part of a tile and added once it has; it
// is empty once the thread that passes the turn on has seen that.
template <int Stages>
struct OrderRing : Ring<Stages> {
    ptx::Barrier added[Stages];

    __device__ void init() {
        Ring<Stages>::init(1);
        for (ptx::Barrier& barrier : added) ptx::barrier_init(barrier, kWarpgroup / 32);
    }
};

// Waits for the turns of all warpgroups: until those blocks have added their parts that come
// before.
template <int BlockM, int BlockN, int Stages, class Workspace, class Walk>
__device__ inline void take_turns(OrderRing<Stages> (&order)[kConsumers], RingPosition<Stages>& to,
                                  const Workspace& workspace, const BackwardParams& call,
                                  const KeyWork& work, Walk at) {
    const int first_place = workspace.first_place_of(work.sequence(call));
    for (; !at.at_end(); at.advance()) {
        const int first_tile = work.mask(call).first_key(at.tile * BlockM) / BlockN;
        const unsigned int place = work.first_key / BlockN - first_tile;
        const unsigned int turn = kAdding == kInOrder ? place : min(place, 1u);
        const auto& added = workspace.added[workspace.place_from(first_place, at.head, at.tile)];
        for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
            order[warpgroup].wait_empty(to);
            const Watchdog watchdog;
            while (turn > 0 && ptx::load_acquire(&added[warpgroup]) < turn) {
                watchdog.check("turn", turn, &added[warpgroup], Caller::here());
            }
            ptx::barrier_arrive(order[warpgroup].full[to.stage]);
        }
        to.advance();
    }
}

// Passes on those of one.
template <int Stages, class Workspace, class Walk>
__device__ inline void pass_turns(OrderRing<Stages>& order, RingPosition<Stages>& to,
                                  const Workspace& workspace, int warpgroup,
                                  const BackwardParams& call, const KeyWork& work, Walk at) {
    const int first_place = workspace.first_place_of(work.sequence(call));
    for (; !at.at_end(); at.advance()) {
        const int place = workspace.place_from(first_place, at.head, at.tile);
        wait_for(order.added[to.stage], to.parity, to.stage);
        order.release(to);
        if (kAdding == kInOrder || work.first_key == 0) {
            ptx::add_release(&workspace.added[place][warpgroup], 1);
        }
        to.advance();
    }
}

// wgmma's description of one panel of columns, with the depth along the rows.
template <class Tile>
__device__ inline unsigned int panel_depth_in_rows(const Tile& tile, int panel) {
    return operand_at(tile.data[panel], Tile::kPanelBytes);
}

// Issues s = a^T b for a panel of a's columns and Cols of b's, from a panel on; the depth runs
// along the rows of all Tiles tiles, as in dQ^T = K^T dS^T.
template <int Cols, int Tiles, class A, class B>
__device__ inline void issue_product_tn(WgmmaSums<Cols>& s, const A (&a)[Tiles], int a_panel,
                                        const B (&b)[Tiles], int b_panel) {
    using Product = ptx::Wgmma<Cols, is_bfloat16<scalar_t>>;
    hold_all(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
        unsigned int a0 = panel_depth_in_rows(a[tile], a_panel);
        const unsigned int b0 = panel_depth_in_rows(b[tile], b_panel);
        ptx::hold(a0);  // or each step's sum would be kept in a register from tile to tile
#pragma unroll
        for (int k = 0; k < A::kRows; k += kWgmmaK) {
            const unsigned long long a_k = description(a0 + rows_step(k));
            const unsigned long long b_k =
                description<B::kRowBytes>(b0 + rows_step<B::kRowBytes>(k));
            if (tile == 0 && k == 0) {
                Product::template multiply<true, true, false>(s, a_k, b_k);
            } else {
                Product::template multiply<true, true, true>(s, a_k, b_k);
            }
        }
    }
    ptx::wgmma_commit();
}

// Issues o += a b with the depth in the columns of a, as many as Depth, and in the rows of b, as in
// dV += P^T dO with P^T in shared memory.
template <int Depth, int Cols, class A, class B>
__device__ inline void issue_product_nn(WgmmaSums<Cols>& o, const A& a, const B& b) {
    using Product = ptx::Wgmma<Cols, is_bfloat16<scalar_t>>;
    const unsigned int a0 = depth_in_columns(a);
    unsigned int b0 = depth_in_rows(b);
    ptx::hold(b0);  // or each step's sum would be kept in a register from tile to tile
    hold_all(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Depth; k += kWgmmaK) {
        Product::template multiply<false, true, true>(o, description(a0 + columns_step<A>(k)),
                                                      description(b0 + rows_step(k)));
    }
    ptx::wgmma_commit();
}

// Sends out a tile of gradients by Threads threads: those of a tile of keys from the key'th on and
// of head dims from first_col on.
template <int TensorDims, int Threads, class Tile>
__device__ inline void send_out(const TensorMap& map, const Tensor& tensor, Tile& rows,
                                const BackwardParams& call, const KeyWork& work, int key,
                                int first_col) {
    const Sequence sequence = work.sequence(call);
    const int first_key = work.first_key + key, thread = threadIdx.x % Threads;
    const int count = kPacked ? end_of_keys(call, sequence) - first_key : Tile::kRows;
    if (count < Tile::kRows) {  // the copy engine would write beyond the sequence
        write_first_rows<TensorDims, Threads>(sequence.keys<scalar_t>(tensor, work.kv_head), rows,
                                              count, first_key, first_col, thread);
    } else if (thread == 0) {
        store_tile(map, rows, work.map_batch(), work.kv_head, sequence.first_k + first_key,
                   first_col);
    }
}
