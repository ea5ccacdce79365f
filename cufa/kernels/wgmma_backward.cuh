// What the Hopper backward is made of: which keys a block works on, which tiles of queries those
// take in, and where the sums of dQ and the rows' statistics lie.
#pragma once

#include "mask.cuh"
#include "online_softmax.cuh"
#include "schedule.cuh"
#include "tensor.cuh"
#include "wgmma_tiles.cuh"

constexpr int kConsumers = 2;  // warpgroups of a block that compute

// A tile of keys of one KV head; batch -1: there is none left.
struct KeyWork {
    int batch, kv_head, first_key;

    __device__ bool exists() const { return batch >= 0; }
    __device__ static KeyWork none() { return {-1, 0, 0}; }
};

// The tiles of keys that a block takes at a time: one or, if WholeHead, all of one head. The sums
// of dQ are then its own, and its first tile, which every query that sees any key sees, sets them;
// so does the block of a head's first tile if blocks add in order.
template <int BlockN, bool WholeHead, bool Causal, int SectionBytes, int OrderedHeads>
struct KeyTiles {
    // Heads come in sections. Within a section the first keys come first: under a causal mask most
    // queries see those, and long work that starts late would leave the GPU waiting for it; and
    // blocks that add in order wait for none that begin later.
    __device__ static KeyWork at(unsigned int index, const Sizes& sizes) {
        if (index >= count(sizes)) return KeyWork::none();
        const int tiles = tiles_of_head(sizes), heads = sizes.batch * sizes.kv_heads;
        const int section_heads = OrderedHeads > 0 ? ordered_heads(heads) : cached_heads(sizes);

        const int first_head = index / (section_heads * tiles) * section_heads;
        const int in_section = min(section_heads, heads - first_head);
        const int place = index - first_head * tiles;
        const int head = first_head + place % in_section;
        return {head / sizes.kv_heads, head % sizes.kv_heads, place / in_section * BlockN};
    }

    __device__ static KeyWork first(const Sizes& sizes) { return at(blockIdx.x, sizes); }
    // How many times something can be taken.
    __device__ static unsigned int count(const Sizes& sizes) {
        return sizes.batch * sizes.kv_heads * tiles_of_head(sizes);
    }

    // Goes on to the next tile, if there is one that was taken with this.
    __device__ static bool next(KeyWork& work, const Sizes& sizes) {
        return WholeHead && (work.first_key += BlockN) < sizes.seqlen_k;
    }
    __device__ static bool sets_sums(const KeyWork& work) {
        return (WholeHead || OrderedHeads > 0) && work.first_key == 0;
    }

  private:
    __device__ static int tiles_of_head(const Sizes& sizes) {
        return WholeHead ? 1 : ceil_div(sizes.seqlen_k, BlockN);
    }
    // Under a causal mask, as many as the L2 cache holds queries and sums of.
    __device__ static int cached_heads(const Sizes& sizes) {
        constexpr int kRowBytes = (kHeadDim + kValueDim) * static_cast<int>(sizeof(scalar_t)) +
                                  kHeadDim * static_cast<int>(sizeof(float));
        const int head_rows = max(1, sizes.heads / sizes.kv_heads * sizes.seqlen_q);
        const int fitting = Causal ? SectionBytes / kRowBytes / head_rows : 1;
        return min(max(fitting, 1), sizes.batch * sizes.kv_heads);
    }
    // In sections of one size, since the fewer heads there are, the more blocks stand in line.
    __device__ static int ordered_heads(int heads) {
        return ceil_div(heads, ceil_div(heads, max(OrderedHeads, 1)));
    }
};

// The tiles of queries of one head that see a tile of keys. Of those before `unmasked` some rows do
// not see some keys.
template <int BlockM, int BlockN>
struct QueryTiles {
    int begin, unmasked, end;

    __device__ QueryTiles(const Sizes& sizes, int first_key) {
        const Mask mask{sizes.seqlen_q, sizes.seqlen_k};
        const int last_key = first_key + BlockN - 1;
        begin = mask.first_row(first_key) / BlockM;
        end = ceil_div(mask.seqlen_q, BlockM);
        unmasked = last_key < mask.seqlen_k ? ceil_div(mask.first_row(last_key), BlockM) : end;
    }
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
    __device__ bool masked() const { return tile < tiles.unmasked; }
    __device__ void advance() {
        if (++head < heads_end) return;
        head -= group;
        --tile;
    }
};

// What the softmax and its gradient need of each row of a tile: P = 2^(S - lse), dS = P (dP - d).
// Rows that see no key, and those past the last one, have an lse of +inf, which makes P 0.
template <int BlockM>
struct RowStatistics {
    alignas(16) float lse_log2[BlockM];
    float d[BlockM];
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
        float* fours = tile + part * kPart + threadIdx.x % kWarpgroup * 4;
#pragma unroll
        for (int i = 0; i < kCols / 8; ++i) {
            const Pack<float, 4> four{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2],
                                      sums[4 * i + 3]};
            float* to = fours + i * kWarpgroup * 4;
            if (set) {
                *reinterpret_cast<Pack<float, 4>*>(to) = four;
            } else {
                ptx::add_to_global(to, four.v);
            }
        }
    }
};

// The workspace: dQ's sums tile by tile, then the rows' statistics and, if blocks add in order, how
// many have added each warpgroup's part of a tile; if they stay for many tiles of keys, how many of
// those were taken.
template <int BlockM, class Sums, bool Ordered = false>
struct Workspace {
    float* sums;
    RowStatistics<BlockM>* rows;
    unsigned int (*added)[kConsumers];
    unsigned int* taken;
    int heads, tiles;  // tiles of one head

    __device__ Workspace(void* memory, const Sizes& sizes)
        : sums(static_cast<float*>(memory)),
          heads(sizes.heads),
          tiles(ceil_div(sizes.seqlen_q, BlockM)) {
        rows = reinterpret_cast<RowStatistics<BlockM>*>(sums_of(sizes.batch, 0, 0));
        added = reinterpret_cast<unsigned int (*)[kConsumers]>(&rows_of(sizes.batch, 0, 0));
        taken = added[Ordered ? tile_at(sizes.batch, 0, 0) : 0];
    }

    // A grid has a block for each tile, so an int counts them.
    __device__ int tile_at(int batch, int head, int tile) const {
        return (batch * heads + head) * tiles + tile;
    }
    __device__ float* sums_of(int batch, int head, int tile) const {
        return sums + static_cast<long long>(tile_at(batch, head, tile)) * Sums::kTile;
    }
    __device__ RowStatistics<BlockM>& rows_of(int batch, int head, int tile) const {
        return rows[tile_at(batch, head, tile)];
    }
    __device__ unsigned int (&added_to(int batch, int head, int tile) const)[kConsumers] {
        return added[tile_at(batch, head, tile)];
    }
};

// The tile of queries of a block of the kernels before and after the main one. Those go through the
// tiles backwards: what one kernel used last, the next finds in the L2 cache.
template <class Workspace>
struct QueryBlock {
    Workspace workspace;
    int batch, head, tile;

    __device__ explicit QueryBlock(const BackwardParams& call)
        : workspace(call.workspace, call.sizes) {
        const int index = gridDim.x - 1 - blockIdx.x;
        batch = index / workspace.tiles / call.sizes.heads;
        head = index / workspace.tiles % call.sizes.heads;
        tile = index % workspace.tiles;
    }
    __device__ float* sums() const { return workspace.sums_of(batch, head, tile); }
};

// Computes a tile's rows' statistics and, if blocks share in its sums, sets those to zero or, if
// they add in order and the first sets them, how many have.
template <int Threads, int BlockM, class Sums, bool Shared, bool Ordered>
__device__ inline void prepare_rows(const BackwardParams& call) {
    const QueryBlock<Workspace<BlockM, Sums>> at(call);
    auto* fours = reinterpret_cast<Pack<float, 4>*>(at.sums());
#pragma unroll
    for (int i = threadIdx.x; Shared && !Ordered && i < Sums::kTile / 4; i += Threads) {
        fours[i] = {};
    }
    if (Ordered && threadIdx.x < kConsumers) {
        at.workspace.added_to(at.batch, at.head, at.tile)[threadIdx.x] = 0;
    }

    // As many lanes share a row as have an element of it each time.
    constexpr int kChunk = min_of(16 / sizeof(scalar_t), kValueDim & -kValueDim);
    constexpr int kLanes = kValueDim > 16 * kChunk ? 32 : kValueDim > 8 * kChunk ? 16 : 8;
    using Chunk = Pack<scalar_t, kChunk>;
    const auto o = matrix_of<const scalar_t>(call.o, at.batch, at.head);
    const auto dout = matrix_of<const scalar_t>(call.dout, at.batch, at.head);
    const float* lse =
        static_cast<const float*>(call.lse) + first_row_of(at.batch, at.head, call.sizes);
    RowStatistics<BlockM>& statistics = at.workspace.rows_of(at.batch, at.head, at.tile);
#pragma unroll
    for (int i = threadIdx.x / kLanes; i < BlockM; i += Threads / kLanes) {
        const int row = at.tile * BlockM + i;
        const bool inside = row < call.sizes.seqlen_q;
        float sum = 0;
        for (int col = threadIdx.x % kLanes * kChunk; inside && col < kValueDim;
             col += kLanes * kChunk) {
            const Chunk a = *reinterpret_cast<const Chunk*>(o.row(row) + col);
            const Chunk b = *reinterpret_cast<const Chunk*>(dout.row(row) + col);
#pragma unroll
            for (int e = 0; e < kChunk; ++e) sum += to_acc(a[e]) * to_acc(b[e]);
        }
        sum = lanes_sum<kLanes>(sum);
        if (threadIdx.x % kLanes == 0) {
            const float log = inside ? lse[row] : negative_infinity();
            statistics.lse_log2[i] =
                log == negative_infinity() ? -log : log * static_cast<float>(kLog2E);
            statistics.d[i] = sum;
        }
    }
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
    const QueryBlock<Workspace<BlockM, Sums>> at(call);
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
    const auto dq = matrix_of<scalar_t>(call.dq, at.batch, at.head);
    const int first_row = at.tile * BlockM;
    const int rows = min(BlockM, call.sizes.seqlen_q - first_row);
    const Mask mask{call.sizes.seqlen_q, call.sizes.seqlen_k};
    for (int i = threadIdx.x; i < rows * kRowStores; i += Threads) {
        const int row = i / kRowStores, col = i % kRowStores * kStored;
        const bool sees_any = mask.keys_end(first_row + row) > 0;
        *reinterpret_cast<Stored*>(dq.row(first_row + row) + col) =
            sees_any ? *reinterpret_cast<const Stored*>(&rounded[row][col]) : Stored{};
    }
}

// The softmax and its gradient in the registers of a warpgroup that has S^T and dP^T of 64 keys.
template <int BlockM>
struct KeySoftmax {
    float scale_log2;
    int first_row[2];  // of a thread's two keys: the first row that sees them
    int query;         // the first of the two that a thread has of each eight of a tile

    KeySoftmax() = default;
    __device__ KeySoftmax(const Sizes& sizes, int first_key, double softmax_scale)
        : scale_log2(softmax_scale * kLog2E), query(threadIdx.x % 4 * 2) {
        const Mask mask{sizes.seqlen_q, sizes.seqlen_k};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = threadIdx.x % kWarpgroup / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
            const int key = first_key + row;
            first_row[half] = key < mask.seqlen_k ? mask.first_row(key) : mask.seqlen_q + BlockM;
        }
    }

    // Whether there is NaN or infinity among the operands of S or, which shows in D, in a row of
    // dO. Times 0, everything else is 0.
    __device__ bool finds_nonfinite(const WgmmaSums<BlockM>& s,
                                    const RowStatistics<BlockM>& rows) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < BlockM / 2; ++i) sum += s[i] * 0;
#pragma unroll
        for (int i = 0; i < BlockM / 8; ++i) {
            const auto d = pair_at(rows.d, i);
            sum += d[0] * 0 + d[1] * 0;
        }
        return sum != 0;
    }

    // S^T becomes P^T = 2^(S^T - LSE).
    template <bool Masked>
    __device__ void exponentiate(WgmmaSums<BlockM>& s, const RowStatistics<BlockM>& rows,
                                 int tile) const {
#pragma unroll
        for (int i = 0; i < BlockM / 8; ++i) {
            const auto shift = pair_at(rows.lse_log2, i);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& x = s[4 * i + e];
                x = exp2_of(x * scale_log2 - shift[e % 2]);
                if (Masked && !sees(i, e, tile)) x = 0;
            }
        }
    }

    // dP^T becomes dS^T = P^T o (dP^T - D).
    template <bool Masked>
    __device__ void differentiate(WgmmaSums<BlockM>& dp, const WgmmaSums<BlockM>& p,
                                  const RowStatistics<BlockM>& rows, int tile) const {
#pragma unroll
        for (int i = 0; i < BlockM / 8; ++i) {
            const auto sum = pair_at(rows.d, i);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& x = dp[4 * i + e];
                x = p[4 * i + e] * (x - sum[e % 2]);
                if (Masked && !sees(i, e, tile)) x = 0;
            }
        }
    }

  private:
    __device__ Pack<float, 2> pair_at(const float (&values)[BlockM], int i) const {
        return *reinterpret_cast<const Pack<float, 2>*>(values + i * 8 + query);
    }
    // Whether element 4i + e of a thread's scores is of a row that sees its key.
    __device__ bool sees(int i, int e, int tile) const {
        return i * 8 + e % 2 >= first_row[e / 2] - tile * BlockM - query;
    }
};

// Adds NaN and infinity in dO to the gradients of the values that those rows see, for a warpgroup's
// 64 keys and the rows that do not see all of the block's: 0 times it must not reach the other
// keys, so it was taken out of the products' operands. It is looked for anew, since nothing need be
// remembered.
template <int Cols, int BlockM, int BlockN>
__device__ inline void add_nonfinite(WgmmaSums<Cols>& dv, const BackwardParams& call, KeyWork work,
                                     int first_key, int first_col) {
    const QueryTiles<BlockM, BlockN> tiles(call.sizes, work.first_key);
    const KeySoftmax<BlockM> softmax(call.sizes, first_key, call.softmax_scale);
    const int group = call.sizes.heads / call.sizes.kv_heads;
    const int end_row = min(tiles.unmasked * BlockM, call.sizes.seqlen_q);
#pragma unroll 1
    for (int head = work.kv_head * group; head < (work.kv_head + 1) * group; ++head) {
        const auto dout = matrix_of<const scalar_t>(call.dout, work.batch, head);
#pragma unroll 1
        for (int row = tiles.begin * BlockM; row < end_row; ++row) {
#pragma unroll
            for (int i = 0; i < Cols / 2; ++i) {
                const int col = first_col + i / 4 * 8 + softmax.query + i % 2;
                if (row < softmax.first_row[i / 2 % 2] || col >= kValueDim) continue;
                const scalar_t value = dout.row(row)[col];
                if (!is_finite(value)) dv[i] += to_acc(value);
            }
        }
    }
}

// A ring that the consumers themselves fill, each of `writers` threads a part.
template <int Stages>
__device__ inline void init_shared_ring(Ring<Stages>& ring, int writers, int readers) {
    for (int stage = 0; stage < Stages; ++stage) {
        ptx::barrier_init(ring.full[stage], writers);
        ptx::barrier_init(ring.empty[stage], readers);
    }
}

// A warp is done with a stage once its part of a product is, and what its lanes read.
template <int Stages>
__device__ inline void release(Ring<Stages>& ring, RingPosition<Stages> at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring.release(at);
}

// The position that one advance leads from.
template <int Stages>
__device__ inline RingPosition<Stages> before(RingPosition<Stages> at) {
    if (at.stage == 0) return {Stages - 1, at.parity ^ 1};
    return {at.stage - 1, at.parity};
}

// Keeps a warpgroup's place among the blocks that add to the same sums, which do so in the order of
// their keys, so that a call has the same bits every time. One thread beside the warpgroup does it,
// which then waits for no memory: a stage is full once it may add its part of a tile, and empty
// once it has.
template <int Stages, class Workspace, class Walk>
__device__ inline void keep_order(Ring<Stages>& order, RingPosition<Stages>& to,
                                  const Workspace& workspace, int warpgroup, int batch,
                                  unsigned int turn, Walk at) {
    for (; !at.at_end(); at.advance()) {
        unsigned int* added = &workspace.added_to(batch, at.head, at.tile)[warpgroup];
        const Watchdog watchdog;
        while (ptx::load_acquire(added) != turn) {
            watchdog.check("turn", turn, added, Caller::here());
        }
        ptx::barrier_arrive(order.full[to.stage]);
        wait_for(order.empty[to.stage], to.parity, to.stage);
        ptx::add_release(added, 1);
        to.advance();
    }
}

// wgmma's description of one panel of columns, with the depth along the rows.
template <class Tile>
__device__ inline unsigned int panel_depth_in_rows(const Tile& tile, int panel) {
    return operand_at(tile.data[panel], Tile::kRows * kPanelRowBytes);
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
            const unsigned long long b_k = description(b0 + rows_step(k));
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

// Reads a warp's 16 rows of a tile, from first_row on, as write_rows wrote them.
template <int Cols, class Tile>
__device__ inline void read_rows(WgmmaOperand<Cols>& values, Tile& tile, int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Cols / kWgmmaK; ++i) {
        const int col = i * kWgmmaK + lane / 16 * kChunkCols;
        ptx::ldmatrix_x4(values[i], tile.at(first_row + lane % 16, col));
    }
}

// What round_to_operand rounded.
template <int Cols>
__device__ inline void widen_operand(WgmmaSums<Cols>& sums, const WgmmaOperand<Cols>& operand) {
#pragma unroll
    for (int i = 0; i < Cols / kWgmmaK * 4; ++i) {
        const unsigned int pair = operand[i / 4][i % 4];
        sums[2 * i] = to_acc(scalar_t{static_cast<unsigned short>(pair)});
        sums[2 * i + 1] = to_acc(scalar_t{static_cast<unsigned short>(pair >> 16)});
    }
}
