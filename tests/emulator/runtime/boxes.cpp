// Boxes of tensors, to shared memory and from it.
#include "boxes.hpp"

#include <algorithm>
#include <cstring>

#include "block.hpp"
#include "places.hpp"
#include "swizzle.hpp"

namespace emulator {

namespace {

// Calls use(first byte in shared memory, first byte in the tensor, bytes inside the tensor) for
// each chunk of a box.
template <class Use>
void each_chunk(const Box& box, Use use) {
    for (std::size_t index = 0; index < box.rows(); ++index) {
        const Box::Row row = box.row(index);
        for (std::size_t byte = 0; byte < box.row_bytes(); byte += kChunkBytes) {
            const std::size_t left = row.inside > byte ? row.inside - byte : 0;
            use(box.shared + swizzled(index * kSwizzleRowBytes + byte), row.global + byte,
                std::min(left, kChunkBytes));
        }
    }
}

}  // namespace

Box::Row Box::row(std::size_t index) const {
    std::size_t offset = std::size_t(at[0]) * tensor.element_bytes;
    bool inside = true;
    for (int axis = 1; axis < kBoxAxes; ++axis) {
        const auto place = at[axis] + static_cast<long long>(index % tensor.box[axis]);
        index /= tensor.box[axis];
        inside = inside && 0 <= place && place < tensor.extents[axis];
        offset += place * tensor.strides[axis - 1];
    }
    const std::size_t row_end = tensor.extents[0] * tensor.element_bytes;
    const std::size_t begin = std::size_t(at[0]) * tensor.element_bytes;
    const std::size_t left = row_end > begin ? row_end - begin : 0;
    return {reinterpret_cast<unsigned char*>(tensor.address + offset),
            inside ? std::min(left, row_bytes()) : 0};
}

Box Block::box_of(const void* map, const void* shared, const int (&at)[kBoxAxes]) {
    Box box{};
    std::memcpy(&box.tensor, map, sizeof box.tensor);
    std::copy(std::begin(at), std::end(at), box.at);
    if (box.tensor.magic != kTensorMagic) fail("a tensor map that nobody encoded");
    if (box.row_bytes() != kSwizzleRowBytes)
        fail("a box whose rows are not as long as the swizzle");
    if (at[0] < 0) fail("a box that begins before the first column");
    const unsigned offset = shared_offset(shared);
    if (const std::size_t past = offset % kSwizzleBytes) {
        fail("misaligned: a box at " + std::to_string(past) + " bytes past a multiple of " +
             std::to_string(kSwizzleBytes));
    }
    if (offset + box.bytes() > shared_.bytes) fail("a box that goes beyond shared memory");
    box.shared = reinterpret_cast<unsigned char*>(shared_.begin + offset);
    return box;
}

// Looks at the rows of the tensor that a box touches.
void Block::note_global_rows(Access now, const Box& box) {
    for (std::size_t index = 0; index < box.rows(); ++index) {
        const Box::Row row = box.row(index);
        if (row.inside > 0) note(now, running_->past, row.global, row.inside);
    }
}

void Block::copy_box(void* to, const void* map, const void* barrier, const int (&at)[kBoxAxes],
                     const void* return_to) {
    const Box box = box_of(map, to, at);
    SharedBarrier& arrives_on = barrier_at(barrier, return_to);
    if (!arrives_on.known_to_copies) {
        fail("a copy that arrives on a barrier of which the copy engine has not been told");
    }
    Access now = access_now(Access::Kind::kRead, return_to);
    now.by = Access::By::kBox;
    now.first = arrives_on.agent;
    now.members = 1;
    now.time = arrives_on.phase + 1;
    note_global_rows(now, box);
    now.kind = Access::Kind::kCopy;
    note(now, running_->past, to, box.bytes());
    std::memset(to, 0xff, box.bytes());
    boxes_.push_back({box, &arrives_on, arrives_on.phase, running_->index, now.place});
}

// Brings the oldest copy that is under way; false if there is none.
bool Block::bring_box() {
    if (boxes_.empty()) return false;
    const BoxCopy copy = boxes_.front();
    boxes_.pop_front();
    SharedBarrier& barrier = *copy.barrier;
    if (barrier.phase != copy.phase) {
        failure_ =
            "a copy of thread " + std::to_string(copy.thread) +
            " brings bytes for a phase that has ended without them: fewer were announced than "
            "copied, on " +
            barrier.describe();
        details_ = place_line(copy.place);
        return false;
    }
    each_chunk(copy.box, [](unsigned char* to, const unsigned char* from, std::size_t inside) {
        std::memcpy(to, from, inside);
        std::memset(to + inside, 0, kChunkBytes - inside);
    });
    Access now;
    now.kind = Access::Kind::kWrite;
    now.by = Access::By::kBox;
    now.thread = copy.thread;
    now.block = index_;
    now.first = barrier.agent;
    now.members = 1;
    now.time = copy.phase + 1;
    now.place = copy.place;
    shared_.each_history(reinterpret_cast<std::uintptr_t>(copy.box.shared), copy.box.bytes(),
                         [&](History& history) {
                             history.end_copy(now);
                             return false;
                         });
    barrier.bytes -= static_cast<long long>(copy.box.bytes());
    barrier.arriving.seen.raise(barrier.agent, now.time);
    end_phase_if_complete(barrier);
    return true;
}

void Block::store_box(const void* map, const void* from, const int (&at)[kBoxAxes],
                      const void* return_to) {
    const Box box = box_of(map, from, at);
    BoxStores& stores = running_->stores;
    if (stores.agent == 0) stores.agent = agents_++;
    Access now = access_now(Access::Kind::kRead, return_to);
    now.by = Access::By::kStore;
    now.first = stores.agent;
    now.members = 1;
    now.time = stores.committed + 1;
    note(now, running_->past, from, box.bytes());
    now.kind = Access::Kind::kWrite;
    note_global_rows(now, box);
    stores.waiting.push_back({box, stores.committed + 1});
}

void Block::commit_stores() {
    ++running_->stores.committed;
}

void Block::wait_stores_read() {
    BoxStores& stores = running_->stores;
    const auto send = [&](const BoxStores::Store& store) {
        if (store.group > stores.committed) return false;
        each_chunk(store.box, [](const unsigned char* from, unsigned char* to, std::size_t inside) {
            std::memcpy(to, from, inside);
        });
        return true;
    };
    stores.waiting.erase(std::remove_if(stores.waiting.begin(), stores.waiting.end(), send),
                         stores.waiting.end());
    if (stores.agent != 0) running_->past.seen.raise(stores.agent, stores.committed);
}

}  // namespace emulator
