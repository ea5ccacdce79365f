// What emulator.hpp declares, for the block that is running.
#include "block.hpp"
#include "emulator.hpp"

namespace emulator {

namespace {

void meet_in_warp(const Meeting& meeting) {
    Block& block = Block::current();
    if (!(meeting.mask >> block.lane() & 1)) {
        block.fail(std::string(meeting.operation) + ": the mask lacks the calling lane, " +
                   std::to_string(block.lane()));
    }
    block.meet(meeting);
}

}  // namespace

unsigned sync_block(const char* operation, bool aye, const char* file, int line) {
    unsigned ayes = 0;
    Block::current().meet({operation, 0, &aye, &ayes, nullptr, true, file, line});
    return ayes;
}

void sync_warp(const char* operation, unsigned mask, const void* in, void* out, Combine combine,
               const char* file, int line) {
    meet_in_warp({operation, mask, in, out, combine, false, file, line});
}

void sync_warp_memory(unsigned mask, const char* file, int line) {
    meet_in_warp({"__syncwarp", mask, nullptr, nullptr, nullptr, true, file, line});
}

void fail(const char* message) {
    Block::current().fail(message);
}

unsigned lane() {
    return Block::current().lane();
}

#define DEFINE_ATOMIC_ADD(T)                                                             \
    T atomic_add(T* address, T value) {                                                  \
        Block::current().check(Access::Kind::kAtomic, address, sizeof(T),                \
                               __builtin_return_address(0));                             \
        T old = *address, sum;                                                           \
        do {                                                                             \
            sum = old + value;                                                           \
        } while (!__atomic_compare_exchange(address, &old, &sum, true, __ATOMIC_RELAXED, \
                                            __ATOMIC_RELAXED));                          \
        return old;                                                                      \
    }
DEFINE_ATOMIC_ADD(int)
DEFINE_ATOMIC_ADD(unsigned)
DEFINE_ATOMIC_ADD(unsigned long long)
DEFINE_ATOMIC_ADD(float)
DEFINE_ATOMIC_ADD(double)

void read_shared(const void* address, unsigned bytes) {
    Block::current().check_shared(Access::Kind::kRead, address, bytes, __builtin_return_address(0));
}

void copy_async(void* to, const void* from, unsigned bytes, unsigned valid) {
    const Copy copy{static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes,
                    valid};
    Block::current().start_copy(copy, __builtin_return_address(0));
}

void wait_copies() {
    Block::current().wait_copies(__builtin_return_address(0));
}

}  // namespace emulator
