// What the host passes, by value, in one struct. cufa/launch.py holds the same fields in the same
// order; a size that differs is a compile error, and a test echoes every field back to see none
// swapped.
#pragma once

// A (batch, seqlen, heads, dim) array: strides in elements, the last axis contiguous.
struct Tensor {
    void* data;
    long long batch_stride, row_stride, head_stride;
};

struct Sizes {
    int batch, heads, kv_heads, seqlen_q, seqlen_k;
    int step;  // which launch this is of a kernel that is launched several times
};

struct ForwardParams {
    Tensor q, k, v, o;
    void* lse;        // (batch, heads, seqlen_q) of acc_t, natural logarithm; null: not wanted
    void* workspace;  // its parts are named in the kernel that uses it
    double softmax_scale;
    Sizes sizes;
};

struct BackwardParams {
    Tensor q, k, v, o, dout, dq, dk, dv;
    void* lse;
    void* workspace;
    double softmax_scale;
    Sizes sizes;
};

struct SoftmaxParams {
    void *x, *y;  // (rows, cols)
    long long x_row_stride, y_row_stride;
    long long rows;
    int cols;
};

#ifndef PARAMS_BYTES
#error "the host must define PARAMS_BYTES, the size of the struct it will pass"
#endif
