// The 128-byte swizzle, in which the copy engine writes tiles and wgmma reads them.
#pragma once

#include <cstddef>

namespace emulator {

constexpr std::size_t kSwizzleRowBytes = 128, kSwizzleRows = 8;
constexpr std::size_t kSwizzleBytes = kSwizzleRows * kSwizzleRowBytes;
constexpr std::size_t kChunkBytes = 16;

// Where a byte of shared memory is found: in each eight rows of 128 bytes, the 16-byte chunk c of
// row r lies at c ^ r.
constexpr std::size_t swizzled(std::size_t offset) {
    return offset ^ (offset / kSwizzleRowBytes % kSwizzleRows) * kChunkBytes;
}

}  // namespace emulator
