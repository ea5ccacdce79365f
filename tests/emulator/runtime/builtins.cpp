// What emulator.hpp declares, for the block that is running.
#include <algorithm>

#include "block.hpp"
#include "emulator.hpp"
#include "memory.hpp"

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

// The old value; the new one is change(old). Its caller is named in reports.
template <class Change>
unsigned change_atomically(unsigned* address, const void* caller, const Change& change) {
    Block::current().check(Access::Kind::kAtomic, address, sizeof *address, caller);
    unsigned old = *address;
    while (!__atomic_compare_exchange_n(address, &old, change(old), true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return old;
}

}  // namespace

unsigned sync_block(const char* operation, bool aye, const char* file, int line) {
    unsigned ayes = 0;
    Block::current().meet({Meeting::Of::kBlock, operation, file, line, &aye, &ayes});
    return ayes;
}

void sync_warp(const char* operation, unsigned mask, const void* in, void* out, Combine combine,
               const char* file, int line) {
    meet_in_warp({Meeting::Of::kWarp, operation, file, line, in, out, mask, combine, false});
}

void sync_warp_memory(unsigned mask, const char* file, int line) {
    meet_in_warp(
        {Meeting::Of::kWarp, "__syncwarp", file, line, nullptr, nullptr, mask, nullptr, true});
}

void fail(const char* message) {
    Block::current().fail(message);
}

unsigned lane() {
    return Block::current().lane();
}

#define DEFINE_ATOMIC_ADD(T)                                              \
    T atomic_add(T* address, T value) {                                   \
        Block::current().check(Access::Kind::kAtomic, address, sizeof(T), \
                               __builtin_return_address(0));              \
        return add_atomically(address, value);                            \
    }
DEFINE_ATOMIC_ADD(int)
DEFINE_ATOMIC_ADD(unsigned)
DEFINE_ATOMIC_ADD(unsigned long long)
DEFINE_ATOMIC_ADD(float)
DEFINE_ATOMIC_ADD(double)

void atomic_add_vector(float* address, const float (&values)[4]) {
    Block& block = Block::current();
    if (const auto past = reinterpret_cast<std::uintptr_t>(address) % sizeof values) {
        block.fail("misaligned: adds 16 bytes at " + std::to_string(past) +
                   " bytes past a multiple of that");
    }
    block.check(Access::Kind::kAtomic, address, sizeof values, __builtin_return_address(0));
    for (int i = 0; i < 4; ++i) add_atomically(address + i, values[i]);
}

unsigned atomic_max(unsigned* address, unsigned value) {
    return change_atomically(address, __builtin_return_address(0),
                             [&](unsigned old) { return std::max(old, value); });
}

unsigned atomic_increment(unsigned* address, unsigned last) {
    return change_atomically(address, __builtin_return_address(0),
                             [&](unsigned old) { return old >= last ? 0 : old + 1; });
}

void read_shared(const void* address, unsigned bytes) {
    Block::current().check_shared(Access::Kind::kRead, address, bytes, __builtin_return_address(0));
}

void write_shared(void* address, unsigned bytes) {
    Block::current().check_shared(Access::Kind::kWrite, address, bytes,
                                  __builtin_return_address(0));
}

void copy_async(void* to, const void* from, unsigned bytes, unsigned valid) {
    const Copy copy{static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes,
                    valid};
    Block::current().start_copy(copy, __builtin_return_address(0));
}

void commit_copies() {
    Block::current().commit_copies();
}

void wait_copies(unsigned pending_groups) {
    Block::current().wait_copies(pending_groups, __builtin_return_address(0));
}

unsigned shared_address(const void* address) {
    return Block::current().shared_offset(address);
}

void barrier_init(const void* barrier, unsigned arrivals) {
    Block::current().init_barrier(barrier, arrivals, __builtin_return_address(0));
}

void barrier_init_fence() {
    Block::current().fence_barriers();
}

void barrier_arrive(const void* barrier, unsigned announced_bytes) {
    Block::current().arrive(barrier, announced_bytes, __builtin_return_address(0));
}

void barrier_wait(const void* barrier, unsigned parity, const char* file, int line) {
    Block::current().wait_phase(barrier, parity, false, file, line, __builtin_return_address(0));
}

unsigned rank_in_pair() {
    return Block::current().rank_in_pair();
}

void pair_sync(const char* file, int line) {
    Block::current().sync_pair(file, line);
}

void barrier_arrive_at_partner(const void* barrier) {
    Block::current().arrive_at_partner(barrier, __builtin_return_address(0));
}

void send_to_partner(float* to, const float (&four)[4], const void* barrier) {
    Block::current().send_to_partner(to, four, barrier, __builtin_return_address(0));
}

void copy_to_partner(const void* from, unsigned bytes, const void* barrier) {
    Block::current().copy_to_partner(from, bytes, barrier, __builtin_return_address(0));
}

void barrier_wait_for_partner(const void* barrier, unsigned parity, const char* file, int line) {
    Block::current().wait_phase(barrier, parity, true, file, line, __builtin_return_address(0));
}

void named_barrier(const char* operation, unsigned id, unsigned threads, bool waits,
                   const char* file, int line) {
    Meeting meeting{Meeting::Of::kNamedBarrier, operation, file, line};
    meeting.named = id;
    Block::current().arrive_named(meeting, threads, waits);
}

unsigned vote_at_named_barrier(const char* operation, unsigned id, unsigned threads, bool aye,
                               const char* file, int line) {
    unsigned ayes = 0;
    Meeting meeting{Meeting::Of::kNamedBarrier, operation, file, line, &aye, &ayes};
    meeting.named = id;
    Block::current().arrive_named(meeting, threads, true);
    return ayes;
}

void proxy_fence() {
    Block::current().fence_proxy();
}

void copy_box(void* to, const void* map, const void* barrier, const int (&at)[5], int axes) {
    Block::current().copy_box(to, map, barrier, at, axes, __builtin_return_address(0));
}

void copy_bytes(void* to, const void* from, unsigned bytes, const void* barrier) {
    Block::current().copy_bytes(to, from, bytes, barrier, __builtin_return_address(0));
}

void store_box(const void* map, const void* from, const int (&at)[5], int axes) {
    Block::current().store_box(map, from, at, axes, __builtin_return_address(0));
}

void add_floats(float* to, const float* from, unsigned bytes) {
    Block::current().add_floats(to, from, bytes, __builtin_return_address(0));
}

void commit_stores() {
    Block::current().commit_stores();
}

void wait_stores_read() {
    Block::current().wait_stores_read();
}

void wait_stores() {
    Block::current().wait_stores();
}

unsigned load_acquire(const unsigned* address, const char* file, int line) {
    return Block::current().load_acquire(address, file, line, __builtin_return_address(0));
}

void add_release(unsigned* address, unsigned value) {
    Block::current().add_release(address, value, __builtin_return_address(0));
}

void wgmma_issue(const Product& product) {
    Block::current().issue(product, __builtin_return_address(0));
}

void wgmma_fence() {
    Block::current().fence_products();
}

void wgmma_commit(const char* file, int line) {
    Block::current().commit_products(file, line);
}

void wgmma_wait(unsigned pending_groups, const char* file, int line) {
    Block::current().wait_products(pending_groups, file, line);
}

void set_registers(const char* operation, unsigned count, bool more, const char* file, int line) {
    Meeting meeting{Meeting::Of::kWarpgroup, operation, file, line};
    meeting.registers = count;
    Block::current().set_registers(meeting, more);
}

}  // namespace emulator
