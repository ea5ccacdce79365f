// What the copy engine does.
#include "bulk.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "block.hpp"
#include "places.hpp"
#include "swizzle.hpp"

namespace emulator {

namespace {

// Where a row of a box is in the tensor, how many of its bytes come before that, and how many lie
// before the tensor's end.
struct BoxRow {
    std::uint64_t address;
    std::size_t before, inside;
};

BoxRow box_row(const TensorDescription& tensor, const int (&at)[kBoxAxes], std::size_t index) {
    const long long first = static_cast<long long>(at[0]) * tensor.element_bytes;
    const auto end = static_cast<long long>(tensor.extents[0]) * tensor.element_bytes;
    BoxRow row{tensor.address + first, std::size_t(std::max(-first, 0LL)),
               std::size_t(std::max(end - first, 0LL))};
    for (int axis = 1; axis < kBoxAxes; ++axis) {
        const auto place = at[axis] + static_cast<long long>(index % tensor.box[axis]);
        index /= tensor.box[axis];
        if (place < 0 || place >= tensor.extents[axis]) row.inside = 0;
        row.address += place * tensor.strides[axis - 1];
    }
    return row;
}

}  // namespace

// The tile of a box whose first element has these coordinates.
Transfer Block::box_at(const void* map, const void* shared, const int (&at)[kBoxAxes], int axes) {
    TensorDescription tensor;
    std::memcpy(&tensor, map, sizeof tensor);
    if (tensor.magic != kTensorMagic) fail("a tensor map that nobody encoded");
    if (tensor.axes != static_cast<unsigned>(axes)) fail("a box with another number of axes");
    const std::size_t row_bytes = tensor.box[0] * tensor.element_bytes;
    if (row_bytes > kSwizzleRowBytes || row_bytes % kChunkBytes != 0) {
        fail("a box whose rows are longer than the swizzle, or no sixteens of bytes");
    }
    if (at[0] < 0 && at[0] * static_cast<long long>(tensor.element_bytes) % kChunkBytes != 0) {
        fail("a box that begins before the first column, and not by sixteens of bytes");
    }
    std::size_t rows = 1;
    for (int axis = 1; axis < kBoxAxes; ++axis) rows *= tensor.box[axis];
    Transfer transfer = room_for(shared, rows * kSwizzleRowBytes, kSwizzleBytes);
    for (std::size_t index = 0; index < rows; ++index) {
        const BoxRow row = box_row(tensor, at, index);
        for (std::size_t byte = 0; byte < row_bytes; byte += kChunkBytes) {
            const bool is_inside = byte >= row.before && byte < row.inside;
            const std::size_t left = is_inside ? row.inside - byte : 0;
            transfer.chunks.push_back({transfer.shared + swizzled(index * kSwizzleRowBytes + byte),
                                       reinterpret_cast<unsigned char*>(row.address + byte),
                                       std::min(left, kChunkBytes)});
        }
    }
    return transfer;
}

Transfer Block::room_for(const void* shared, std::size_t bytes, std::size_t alignment) {
    const unsigned offset = shared_offset(shared);
    if (const std::size_t past = offset % alignment) {
        fail("misaligned: a bulk copy at " + std::to_string(past) + " bytes past a multiple of " +
             std::to_string(alignment));
    }
    if (offset + bytes > shared_.bytes) fail("a bulk copy that goes beyond shared memory");
    return {reinterpret_cast<unsigned char*>(shared_.begin + offset), bytes, {}};
}

// Looks at what a transfer touches in global memory.
void Block::note_global(const Access& now, const Transfer& transfer) {
    for (const Chunk& chunk : transfer.chunks) {
        if (chunk.inside > 0) note(now, running_->past, chunk.global, chunk.inside);
    }
}

void Block::copy_box(void* to, const void* map, const void* barrier, const int (&at)[kBoxAxes],
                     int axes, const void* return_to) {
    start_bulk_copy(box_at(map, to, at, axes), barrier, return_to);
}

void Block::copy_bytes(void* to, const void* from, std::size_t bytes, const void* barrier,
                       const void* return_to) {
    start_bulk_copy(line(to, from, bytes), barrier, return_to);
}

// Contiguous bytes.
Transfer Block::line(const void* shared, const void* global, std::size_t bytes) {
    auto* const first = static_cast<unsigned char*>(const_cast<void*>(global));
    if (bytes % kChunkBytes != 0 || reinterpret_cast<std::uintptr_t>(first) % kChunkBytes != 0) {
        fail("misaligned: a bulk copy takes sixteens of bytes from a multiple of 16 on");
    }
    Transfer transfer = room_for(shared, bytes, kChunkBytes);
    for (std::size_t byte = 0; byte < bytes; byte += kChunkBytes) {
        transfer.chunks.push_back({transfer.shared + byte, first + byte, kChunkBytes});
    }
    return transfer;
}

void Block::start_bulk_copy(Transfer transfer, const void* barrier, const void* return_to) {
    SharedBarrier& arrives_on = barrier_at(barrier, return_to);
    if (!arrives_on.known_to_copies) {
        fail("a copy that arrives on a barrier of which the copy engine has not been told");
    }
    const std::uint32_t place = place_of(return_to);
    Access now = access_by(Access::By::kBulkCopy, arrives_on.agent, arrives_on.phase + 1,
                           running_->index, place);
    note_global(now, transfer);
    now.kind = Access::Kind::kCopy;
    note(now, running_->past, transfer.shared, transfer.bytes);
    std::memset(transfer.shared, 0xff, transfer.bytes);
    bulk_copies_.push_back(
        {std::move(transfer), &arrives_on, arrives_on.phase, running_->index, place});
}

// Brings the oldest copy that is under way; false if there is none.
bool Block::bring_copy() {
    if (bulk_copies_.empty()) return false;
    const BulkCopy copy = std::move(bulk_copies_.front());
    bulk_copies_.pop_front();
    SharedBarrier& barrier = *copy.barrier;
    if (barrier.phase != copy.phase) {
        failure_ =
            "a copy of thread " + std::to_string(copy.thread) +
            " brings bytes for a phase that has ended without them: fewer were announced than "
            "are copied, on " +
            barrier.describe();
        details_ = place_line(copy.place);
        return false;
    }
    for (const Chunk& chunk : copy.transfer.chunks) {
        std::memcpy(chunk.shared, chunk.global, chunk.inside);
        std::memset(chunk.shared + chunk.inside, 0, kChunkBytes - chunk.inside);
    }
    Access now =
        access_by(Access::By::kBulkCopy, barrier.agent, copy.phase + 1, copy.thread, copy.place);
    now.kind = Access::Kind::kWrite;
    shared_.each_history(reinterpret_cast<std::uintptr_t>(copy.transfer.shared),
                         copy.transfer.bytes, [&](History& history) {
                             history.end_copy(now);
                             return false;
                         });
    barrier.bytes -= static_cast<long long>(copy.transfer.chunks.size() * kChunkBytes);
    barrier.arriving.seen.raise(barrier.agent, now.time);
    end_phase_if_complete(barrier);
    return true;
}

void Block::store_box(const void* map, const void* from, const int (&at)[kBoxAxes], int axes,
                      const void* return_to) {
    // An H200 loads such boxes, and calls it an illegal instruction to store one.
    if (std::any_of(std::begin(at), std::end(at), [](int begin) { return begin < 0; })) {
        fail("stores a box that begins before its tensor");
    }
    start_bulk_store(box_at(map, from, at, axes), false, return_to);
}

void Block::add_floats(float* to, const float* from, std::size_t bytes, const void* return_to) {
    start_bulk_store(line(from, to, bytes), true, return_to);
}

void Block::start_bulk_store(Transfer transfer, bool adds_floats, const void* return_to) {
    BulkStores& stores = running_->stores;
    if (stores.agent == 0) stores.agent = std::exchange(agents_, agents_ + 2);
    const std::uint32_t place = place_of(return_to);
    Access now = access_by(Access::By::kBulkStore, stores.agent, stores.committed + 1,
                           running_->index, place);
    for (const Chunk& chunk : transfer.chunks) {  // what is dropped need not be there
        if (chunk.inside > 0) note(now, running_->past, chunk.shared, kChunkBytes);
    }
    now.kind = adds_floats ? Access::Kind::kAtomic : Access::Kind::kWrite;
    ++now.first;
    note_global(now, transfer);
    stores.waiting.push_back({std::move(transfer), adds_floats, now.time, {}});
}

void BulkStores::Store::read() {
    for (const Chunk& chunk : transfer.chunks) {
        if (adds_floats) {
            const auto* const floats = reinterpret_cast<const float*>(chunk.shared);
            values.insert(values.end(), floats, floats + kChunkBytes / sizeof(float));
        } else {
            std::memcpy(chunk.global, chunk.shared, chunk.inside);
        }
    }
}

void BulkStores::Store::add() const {
    const float* value = values.data();
    for (const Chunk& chunk : transfer.chunks) {
        auto* const sums = reinterpret_cast<float*>(chunk.global);
        for (std::size_t i = 0; i < kChunkBytes / sizeof(float); ++i) {
            add_atomically(sums + i, *value++);
        }
    }
}

void BulkStores::add() {
    for (const Store& store : adding) store.add();
    adding.clear();
}

void Block::commit_stores() {
    ++running_->stores.committed;
}

void Block::wait_stores_read() {
    BulkStores& stores = running_->stores;
    const auto read = [&](BulkStores::Store& store) {
        if (store.group > stores.committed) return false;
        store.read();
        if (store.adds_floats) stores.adding.push_back(std::move(store));
        return true;
    };
    stores.waiting.erase(std::remove_if(stores.waiting.begin(), stores.waiting.end(), read),
                         stores.waiting.end());
    if (stores.agent != 0) running_->past.seen.raise(stores.agent, stores.committed);
}

void Block::wait_stores() {
    wait_stores_read();
    BulkStores& stores = running_->stores;
    stores.add();
    if (stores.agent != 0) running_->past.seen.raise(stores.agent + 1, stores.committed);
}

}  // namespace emulator
