// The copy engine (TMA): what it brings to shared memory and takes from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "barriers.hpp"

namespace emulator {

constexpr int kBoxAxes = 5;  // at most

// What stands in a TensorMap on the emulator; calls.py packs it. The fastest axis first; strides
// are in bytes, that of the fastest axis left out as its elements are neighbours. Of axes that a
// tensor lacks there is one place.
struct TensorDescription {
    std::uint64_t magic, address;
    std::uint32_t element_bytes, axes;
    std::uint32_t extents[kBoxAxes], box[kBoxAxes];
    std::uint64_t strides[kBoxAxes - 1];
};
constexpr std::uint64_t kTensorMagic = 0x70614d726f736e54;

// A piece of a tile in shared memory, of 16 bytes, and the bytes of global memory that are its
// first.
struct Chunk {
    unsigned char *shared, *global;
    std::size_t inside;
};

// A tile on its way from or to global memory, in so many bytes of shared memory; between the chunks
// of narrow boxes there are gaps.
struct Transfer {
    unsigned char* shared;
    std::size_t bytes;
    std::vector<Chunk> chunks;
};

// A copy to shared memory that is not there yet.
struct BulkCopy {
    Transfer transfer;
    SharedBarrier* barrier;
    unsigned phase;   // of the barrier when it was started
    unsigned thread;  // that started it
    std::uint32_t place;
};

// What a thread sends out of shared memory, in groups that end one after the other.
struct BulkStores {
    struct Store {
        Transfer transfer;
        bool adds_floats;
        unsigned group;
        std::vector<float> values;  // to add

        void read();  // shared memory, and write it unless it is to be added
        void add() const;
    };

    // Two agents: their times are the number of groups that have read shared memory, and of those
    // that have written, too.
    unsigned agent = 0;
    unsigned committed = 0;
    std::vector<Store> waiting;
    std::vector<Store> adding;  // what they add is read, but not there

    void add();
};

}  // namespace emulator
