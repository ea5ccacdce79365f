// What the host fixes for one compiled variant, turned from macros into names. Below this header,
// and below the few lines at the top of each kernel that do the same for its tiles, no macro
// appears.
#pragma once

#include "dtype.cuh"

#if !defined(SCALAR) || !defined(HEAD_DIM) || !defined(VALUE_DIM) || !defined(CAUSAL) || \
    !defined(ALIGN_BYTES)
#error "the host must define SCALAR, HEAD_DIM, VALUE_DIM, CAUSAL and ALIGN_BYTES"
#endif

using scalar_t = SCALAR;                  // element type of Q, K, V, O and their gradients
using acc_t = accumulator_t<scalar_t>;    // type of S, P, LSE and of every sum
constexpr int kHeadDim = HEAD_DIM;        // last axis of Q and K
constexpr int kValueDim = VALUE_DIM;      // last axis of V and O
constexpr bool kCausal = CAUSAL;          // bottom-right aligned
constexpr int kAlignBytes = ALIGN_BYTES;  // every address and stride is a multiple of this
constexpr int kVec = 16 / sizeof(acc_t);  // accumulators in one 16-byte shared-memory access
