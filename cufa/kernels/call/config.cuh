// What the host fixes for one compiled variant, as names instead of macros. Kernels and other
// headers begin with the same for tiles and options of their own. Apart from these lines, code uses
// no macros of the host except sizes in bytes, to check them.
#pragma once

#include "call/dtype.cuh"

#if !defined(SCALAR) || !defined(KEY_SCALAR) || !defined(HEAD_DIM) || !defined(VALUE_DIM) || \
    !defined(ALIGN_BYTES) || !defined(CLUSTER_BLOCKS)
#error "the host must define SCALAR, KEY_SCALAR, HEAD_DIM, VALUE_DIM, ALIGN_BYTES, CLUSTER_BLOCKS"
#endif
#if !defined(CAUSAL) || !defined(WINDOW) || !defined(SOFTCAP) || !defined(BIAS) ||           \
    !defined(MASK_BITS) || !defined(ALIBI) || !defined(SINK) || !defined(DROPOUT) ||         \
    !defined(PACKED) || !defined(USED_KEYS) || !defined(PAGE_SIZE) || !defined(SCORE_MOD) || \
    !defined(QUERIES_AS_HEADS) || !defined(ENDS_BY_HEAD) || !defined(MASK_MOD) ||            \
    !defined(TF32_PRODUCTS) || !defined(LEAST_QUERIES) || !defined(MOST_QUERIES) ||          \
    !defined(PARTS_KEYS) || !defined(SHARES_KEYS) || !defined(MOST_PARTS_OF_HEAD)
#error "the host must define every feature"
#endif

using scalar_t = SCALAR;                        // element type of Q, K, V, O and their gradients
using key_t = KEY_SCALAR;                       // that of K and V; in few kernels it may differ
using acc_t = accumulator_t<scalar_t>;          // type of S, P, LSE and of every sum
constexpr int kHeadDim = HEAD_DIM;              // last axis of Q and K
constexpr int kValueDim = VALUE_DIM;            // last axis of V and O
constexpr int kAlignBytes = ALIGN_BYTES;        // every address and stride is a multiple of this
constexpr int kVec = 16 / sizeof(acc_t);        // accumulators in one 16-byte shared-memory access
constexpr int kClusterBlocks = CLUSTER_BLOCKS;  // blocks of a cluster; 1: there are none

// kQueriesAsHeads: the rows of a tile are query heads that share one KV head, and the kernel's
// heads are the call's queries. kEndsByHead: the keys of such a head end where the causal mask ends
// those of its query.
constexpr bool kQueriesAsHeads = QUERIES_AS_HEADS, kEndsByHead = ENDS_BY_HEAD;

// Features. Disabled ones are not compiled.
constexpr bool kCausal = CAUSAL;      // keys end at the diagonal, which ends bottom right
constexpr bool kWindow = WINDOW;      // keys begin and end at run-time distances from the diagonal
constexpr bool kSoftcap = SOFTCAP;    // scores are bounded by a tanh
using bias_t = BIAS;                  // element type of what is added to the scores; void: nothing
constexpr int kMaskBits = MASK_BITS;  // bits of one element of the mask: 8, 1, or 0 for no mask
constexpr bool kAlibi = ALIBI;        // scores fall with the distance from the diagonal
constexpr bool kSink = SINK;          // each row's softmax counts one more score, without a value
constexpr bool kDropout = DROPOUT;    // probabilities are dropped at random
constexpr bool kPacked = PACKED;      // sequences of any lengths follow each other
// Another launch processes packed sequences of fewer or more queries; 0: no such limit.
constexpr int kLeastQueries = LEAST_QUERIES, kMostQueries = MOST_QUERIES;
constexpr bool kUsedKeys = USED_KEYS;   // the call says how many keys of each sequence count
constexpr bool kPaged = PAGE_SIZE > 0;  // keys and values are in pages, listed in a table
constexpr int kPageSize = kPaged ? PAGE_SIZE : 1;  // keys of a page
constexpr bool kTf32 = TF32_PRODUCTS;  // tensor cores may round float32 operands to tf32
constexpr bool kScoreMod = SCORE_MOD;  // the caller's function changes scores
constexpr bool kMaskMod = MASK_MOD;    // the caller's function says which keys a row sees

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;
constexpr bool kBias = !is_same<bias_t, void>;
// Whether a score is more than a product times the scale.
constexpr bool kShapedScores = kSoftcap || kBias || kAlibi || kScoreMod;
// Whether a key may be seen or hidden independently of its neighbours.
constexpr bool kKeyMask = kMaskBits != 0 || kMaskMod;
// Whether rows may see some keys and not others.
constexpr bool kRangeMask = kCausal || kWindow;
// Whether the keys of some tiles of queries are split among blocks, so that all blocks end at about
// the same time. These are the tiles that would be left for an incomplete last round. Where rows
// see keys up to the diagonal, a few long tiles would end last, so it is all tiles, in parts that
// the host lists. Where only the GPU knows how many keys there are, all tiles have equally many, or
// blocks have equal shares of the keys of all tiles.
constexpr bool kPartsKeys = PARTS_KEYS;
constexpr bool kSharesKeys = SHARES_KEYS;
static_assert(kPartsKeys || !kSharesKeys, "a share may begin and end within a tile");
constexpr bool kPartsVary = kPartsKeys && !kSharesKeys && (kPacked || kUsedKeys || kPaged);
constexpr bool kPartsListed = kPartsKeys && kRangeMask && !kPartsVary;
constexpr int kMostPartsOfHead = MOST_PARTS_OF_HEAD;  // that may be listed
