// The copy engine (TMA): boxes of a tensor, to shared memory and from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "barriers.hpp"

namespace emulator {

constexpr int kBoxAxes = 4;

// What stands in a TensorMap on the emulator; calls.py packs it. The fastest axis first; strides
// are in bytes, that of the fastest axis left out as its elements are neighbours.
struct TensorDescription {
    std::uint64_t magic, address;
    std::uint32_t element_bytes;
    std::uint32_t extents[kBoxAxes], box[kBoxAxes];
    std::uint32_t padding;
    std::uint64_t strides[kBoxAxes - 1];
};
constexpr std::uint64_t kTensorMagic = 0x70614d726f736e54;

struct Box {
    TensorDescription tensor;
    int at[kBoxAxes];
    unsigned char* shared;

    std::size_t row_bytes() const { return tensor.box[0] * tensor.element_bytes; }
    std::size_t rows() const { return std::size_t(tensor.box[1]) * tensor.box[2] * tensor.box[3]; }
    std::size_t bytes() const { return rows() * row_bytes(); }

    // A row of the box: its first byte in the tensor, and how many bytes lie inside it. There are
    // none before the first element, since a box begins inside the tensor on the fastest axis.
    struct Row {
        unsigned char* global;
        std::size_t inside;
    };
    Row row(std::size_t index) const;
};

// A copy to shared memory that is not there yet.
struct BoxCopy {
    Box box;
    SharedBarrier* barrier;
    unsigned phase;   // of the barrier when it was started
    unsigned thread;  // that started it
    std::uint32_t place;
};

// What a thread sends out of shared memory, in groups that end one after the other.
struct BoxStores {
    struct Store {
        Box box;
        unsigned group;
    };

    unsigned agent = 0;  // its time is the number of groups that have read shared memory
    unsigned committed = 0;
    std::vector<Store> waiting;
};

}  // namespace emulator
