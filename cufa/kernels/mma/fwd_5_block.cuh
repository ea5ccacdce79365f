// What a block of fwd_5_mma processes: how its warps divide it, its shared memory, and how much is
// unrolled with the registers that remain.
#pragma once

#include "mma/handover.cuh"
#include "mma/mma_products.cuh"
#include "scores/seen_key_bits.cuh"
#include "softmax/exp2_table.cuh"

constexpr int kThreads = THREADS, kWarps = kThreads / 32, kBlocksPerSm = BLOCKS_PER_SM;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kSplit = SPLIT;  // warps that share rows and divide the output's columns
constexpr int kRowWarps = kWarps / kSplit;
constexpr int kTiles = kBlockM / (kRowWarps * kMmaM);
constexpr int kDims = round_up(kValueDim, kMmaK* kSplit) / kSplit;  // columns of a warp's output
static_assert(kRowWarps * kSplit == kWarps, "SPLIT must divide the warps");
static_assert(kTiles * (kRowWarps * kMmaM) == kBlockM, "a warp must own whole 16-row tiles");
static_assert(kBlockN % kMmaK == 0, "BLOCK_N must be a multiple of 16");
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");

using Scores = Accumulators<kTiles, kBlockN>;

// The warp's first row in the block's tile, and its first column of the output.
__device__ inline int warp_row() {
    const int warp = threadIdx.x / 32;
    return (kSplit == 1 ? warp : warp % kRowWarps) * kTiles * kMmaM;
}
__device__ inline int warp_col() {
    return kSplit == 1 ? 0 : threadIdx.x / 32 / kRowWarps * kDims;
}

// The row in the block's tile of a lane's half of its fragments `m`.
__device__ inline int row_of(int m, int half) {
    return fragment_row(warp_row(), m, half);
}

constexpr bool kHandsOver = HANDS_OVER;

// The handovers of K and V, if warps use them.
template <bool Used>
struct KeyHandovers {
    Handover keys, values;

    __device__ void init() {
        if (threadIdx.x % 32 == 0) nonfinite[threadIdx.x / 32] = 0;
        if (threadIdx.x > 0) return;
        keys.init(kThreads, kWarps);
        values.init(kThreads, kWarps);
    }
    // Whether NaN or infinity was taken out of values. Each thread notes it for its part before it
    // announces the part, so it is known for all tiles that are whole.
    __device__ void note_nonfinite(bool found) {
        if (__any_sync(0xffffffffu, found) && threadIdx.x % 32 == 0)
            nonfinite[threadIdx.x / 32] = 1;
    }
    __device__ bool noted_nonfinite() const {
        unsigned int noted = 0;
        for (const unsigned int by_warp : nonfinite) noted |= by_warp;
        return noted != 0;
    }

  private:
    unsigned int nonfinite[kWarps];
};
template <>
struct KeyHandovers<false> {
    static constexpr NoHandover keys{}, values{};

    __device__ void init() {}
    __device__ void note_nonfinite(bool) {}
    __device__ bool noted_nonfinite() const { return false; }
};

// Powers of two are looked up by this many bits. Threads compute several entries of the table at
// once, if all have equally many: one by one, each would wait for the one before.
constexpr int kRootBits = 10;
constexpr int kRootsAtOnce = (1 << kRootBits) % (4 * kThreads) == 0 ? 4 : 1;

struct Smem : Exp2Table<acc_t, kRootBits>, KeyHandovers<kHandsOver> {
    MmaTile<kBlockM, kHeadDim> q;
    MmaTile<kBlockN, kHeadDim> k;
    MmaTile<kBlockN, kDims * kSplit> v;

    __device__ void init() {
        Exp2Table<acc_t, kRootBits>::template init<kRootsAtOnce>();
        KeyHandovers<kHandsOver>::init();
    }
};

// What a mask or a mask_mod shows of each tile of scores; or, with KEY_BITS, what a mask of which
// all rows see the same shows of each tile of keys, and which keys these are.
constexpr bool kKeyBits = KEY_BITS;
// Whether all rows of a tile see the same keys.
constexpr bool kRowsAlike = kKeyBits && !kRangeMask;
template <bool KeyBits, int Rows, int Keys>
struct SeenOf : SeenTiles<Rows, Keys> {
    using Tiles = SeenTiles<Rows, Keys>;

    __device__ SeenOf(const ForwardParams& params, const Sequence& sequence, int head)
        : Tiles(static_cast<SeenPart*>(params.workspace), params, sequence, head) {}

    // Finds out about a tile, by one warp of the grid.
    __device__ static void find(const ForwardParams& params, long long warp) {
        if (kKeyMask && warp < Tiles::count(params))
            Tiles::find(static_cast<SeenPart*>(params.workspace), params, warp);
    }
};
template <int Rows, int Keys>
struct SeenOf<true, Rows, Keys> : SeenKeyBits<Keys> {
    using SeenKeyBits<Keys>::SeenKeyBits;
};
using Seen = SeenOf<kKeyBits, kBlockM, kBlockN>;

// Whether accumulators leave so few registers that ptxas, which loads operands ahead of all
// unrolled steps, would spill. Where a mask cuts tiles, P is rounded early and ptxas does not
// spill.
constexpr int kSumRegisters = sizeof(Fragment) / 4 * kTiles * (kBlockN + kDims) / kMmaN;
constexpr bool kFewRegisters = sizeof(scalar_t) == 2 && !kCutTiles && kSumRegisters >= 192;
// Steps of Q K^T that are unrolled; even float64 has registers for some here.
constexpr int kHeadSteps = decltype(Smem::q)::kCols / kMmaK;
constexpr int kFewSteps = ptx::kBlackwell ? ceil_div(kHeadSteps, 2) : 4;
constexpr int kScoreSteps = sizeof(scalar_t) == 8 ? 8 : kFewRegisters ? kFewSteps : kStepsAtOnce;
// Whether a step of a product takes so long that the operands of the next need not be loaded
// meanwhile. With twice as many sums, Blackwell's ptxas would spill them.
constexpr bool kLongSteps =
    sizeof(scalar_t) == 4 && !kTf32 && !(ptx::kBlackwell && kTiles * kDims > 128);
