// The 128-byte swizzle, in which the copy engine writes tiles and wgmma reads them, and narrower
// ones that wgmma reads too.
#pragma once

#include <cstddef>

namespace emulator {

constexpr std::size_t kSwizzleRowBytes = 128, kSwizzleRows = 8;
constexpr std::size_t kSwizzleBytes = kSwizzleRows * kSwizzleRowBytes;
constexpr std::size_t kChunkBytes = 16;

// Where a byte of shared memory is found: in each eight rows of 128 bytes, the 16-byte chunk c of
// row r lies at c ^ r. In 128 bytes of narrower rows, as many chunks as a row has change places.
constexpr std::size_t swizzled(std::size_t offset, std::size_t row_bytes = kSwizzleRowBytes) {
    const std::size_t last = row_bytes / kChunkBytes - 1;
    return offset ^ (offset / kSwizzleRowBytes & last) * kChunkBytes;
}

}  // namespace emulator
