// The caller's mask in memory: the keys that each row of one head sees, in bytes or bits.
#pragma once

#include "call/tensor.cuh"

struct KeyMask : Matrix<const unsigned char> {
    KeyMask() = default;
    __device__ KeyMask(const Features& features, int batch, int head)
        : Matrix(matrix_of<const unsigned char>(features.mask, batch, head)) {}

    // Neither argument may be past its end.
    __device__ bool shows(int row, int key) const {
        if constexpr (kMaskBits == 1) return this->row(row)[key / 8] >> key % 8 & 1;
        return this->row(row)[key] != 0;
    }
};
