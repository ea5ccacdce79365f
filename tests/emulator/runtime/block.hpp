// One block at a time: its threads as fibers, the points at which they meet, its shared memory.
#pragma once

#include <array>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "barriers.hpp"
#include "bulk.hpp"
#include "emulator.hpp"
#include "fiber.hpp"
#include "memory.hpp"
#include "pairs.hpp"
#include "products.hpp"
#include "signals.hpp"

namespace emulator {

// That of the block that runs on this thread of the operating system.
extern __thread unsigned char* shared_memory;

// What all blocks of a launch have in common.
struct Launch {
    const char* kernel;
    void (*call)(const void* params);
    unsigned char* (*shared_memory)();
    const void* params;
    unsigned blocks, threads;
    unsigned cluster;  // blocks that reach each other's shared memory: 1, or 2, which are partners
    unsigned blocks_per_sm;  // that share its registers
    std::size_t shared_bytes;
    bool checked;
    std::uint64_t max_steps;  // of a block
    std::uintptr_t module;    // of the kernel: where its code begins
    std::deque<Region> global{};
    Signals* signals = nullptr;
    std::vector<Mailbox> mailboxes{};
};

// What a thread waits for.
struct Meeting {
    // All threads of the block; lanes of a warp; all of a warpgroup; as many as a named barrier
    // counts; the end of a phase of a barrier in shared memory; a signal of any block; all threads
    // of the block and of its partner.
    enum class Of { kBlock, kWarp, kWarpgroup, kNamedBarrier, kPhase, kSignal, kPair };

    Of of;
    const char* operation;
    const char* file;
    int line;
    // Of threads that vote: a bool, and how many of them are true.
    const void* in = nullptr;
    void* out = nullptr;
    unsigned mask = 0;  // of lanes
    Combine combine = nullptr;
    bool orders_memory = false;
    unsigned registers = 0;            // what each thread of the warpgroup shall have; 0: as it is
    unsigned named = 0;                // which barrier
    SharedBarrier* barrier = nullptr;  // whose phase of
    unsigned parity = 0;               // must end
    bool for_partner = false;          // and whose arrivals there are waited for, too
    Signals::Version version = 0;      // of the signals that have been seen

    bool same_operation(const Meeting& other) const;
    bool same_line(const Meeting& other) const;
};

// A copy into shared memory that its thread has not waited for yet.
struct Copy {
    unsigned char* to;
    const unsigned char* from;
    unsigned bytes, valid;
    unsigned group = 0;  // how many its thread had committed before
};

struct Thread {
    enum class State { kReady, kWaiting, kReturned };

    Thread(unsigned index, void (*main)(void*)) : index(index), fiber(main, this) {}

    // At the same point of the code, as far as the block is concerned.
    bool stands_with(const Thread& other) const;

    bool waits_in(Meeting::Of of) const { return state == State::kWaiting && meeting.of == of; }
    void resume_with(const Past& told) {
        past.join(told);
        state = State::kReady;
    }

    const unsigned index;
    State state = State::kReady;
    Meeting meeting{};
    Past past;
    std::vector<Copy> copies;  // the oldest first
    unsigned copy_groups = 0;
    Products products;
    BulkStores stores;
    PartnerCopies partner_copies;
    // What it acquired last: to see it again means to wait.
    const unsigned* polled = nullptr;
    unsigned polled_value = 0;
    Fiber fiber;
};

// A thread of the operating system has one of these and runs block after block on it.
//
// The agents of its clocks are its threads, then a warp's products for each warp, then one for each
// barrier in shared memory and one for each thread that stores boxes
// or copies to the partner.
class Block {
  public:
    explicit Block(Launch& launch);

    // The one that runs on this thread of the operating system.
    static Block& current();

    // One step of it, if any runs.
    static void count_step();

    // Runs one block. What it returns is empty, or says what went wrong.
    std::string run(unsigned index);

    // For the built-ins and the instrumentation of the kernel that is running.
    unsigned lane() const { return running_->index % 32; }
    unsigned shared_offset(const void* address);
    void meet(const Meeting& meeting);
    // Looks at an access before it is done. Most are to what is local to a thread.
    void check(Access::Kind kind, const void* address, std::size_t size, const void* return_to) {
        const Thread& self = *running_;
        if (self.fiber.has_on_stack(number(address)) && self.products.none()) return;
        check_others(kind, address, size, return_to);
    }
    void check_shared(Access::Kind kind, const void* address, std::size_t size,
                      const void* return_to);
    void start_copy(const Copy& copy, const void* return_to);
    void commit_copies();
    void wait_copies(unsigned pending_groups, const void* return_to);
    void fence_proxy();
    [[noreturn]] void fail(const std::string& message, const std::string& details = "");

    void init_barrier(const void* at, unsigned arrivals, const void* return_to);
    void fence_barriers();
    void arrive(const void* at, unsigned announced_bytes, const void* return_to);
    void wait_phase(const void* at, unsigned parity, bool for_partner, const char* file, int line,
                    const void* return_to);
    void arrive_named(const Meeting& meeting, unsigned threads, bool waits);

    void copy_box(void* to, const void* map, const void* barrier, const int (&at)[kBoxAxes],
                  int axes, const void* return_to);
    void copy_bytes(void* to, const void* from, std::size_t bytes, const void* barrier,
                    const void* return_to);
    void store_box(const void* map, const void* from, const int (&at)[kBoxAxes], int axes,
                   const void* return_to);
    void add_floats(float* to, const float* from, std::size_t bytes, const void* return_to);
    void commit_stores();
    void wait_stores_read();
    void wait_stores();

    unsigned load_acquire(const unsigned* address, const char* file, int line,
                          const void* return_to);
    void add_release(unsigned* address, unsigned value, const void* return_to);

    unsigned rank_in_pair() const { return index_ % 2; }
    void sync_pair(const char* file, int line);
    void arrive_at_partner(const void* barrier, const void* return_to);
    void copy_to_partner(const void* from, std::size_t bytes, const void* barrier,
                         const void* return_to);
    void send_to_partner(float* to, const float (&values)[4], const void* barrier,
                         const void* return_to);

    void issue(const Product& product, const void* return_to);
    void fence_products();
    void commit_products(const char* file, int line);
    void wait_products(unsigned pending_groups, const char* file, int line);
    void set_registers(const Meeting& meeting, bool more);

  private:
    // block.cpp
    static void run_thread(void* thread);
    void begin(unsigned index);
    void resume(Thread& thread);
    bool resume_ready();
    bool all_returned() const;
    bool release();
    bool release_block();
    bool release_warp(unsigned first);
    bool release_warpgroup(unsigned first);
    void combine(unsigned first, unsigned lanes);
    unsigned registers_at_start() const;
    void tick(Thread& thread);
    [[noreturn]] void stop();
    [[noreturn]] void fail_steps();
    std::string describe_failure() const;
    std::string describe_deadlock() const;
    std::string describe_wait(const Thread& thread) const;
    std::string prefix() const;
    std::string stack_of(const Thread& thread) const;
    // In the kernel's code.
    std::uint32_t place_of(const void* return_to) const;

    // access.cpp
    Access access_now(Access::Kind kind, const void* return_to) const;
    Access access_by(Access::By by, unsigned agent, std::uint32_t time, unsigned thread,
                     std::uint32_t place) const;
    // Not inlined, as check() would then save registers for it each time.
    [[gnu::noinline]] void check_others(Access::Kind kind, const void* address, std::size_t size,
                                        const void* return_to);
    void note(const Access& now, const Past& past, const void* address, std::size_t size);
    bool note_in(Region& region, const Access& now, const Past& past, std::uintptr_t address,
                 std::size_t size);
    Region* find_region(std::uintptr_t address);
    [[noreturn]] void fail_bounds(Access::Kind kind, std::uintptr_t address, std::size_t size);

    // barriers.cpp
    SharedBarrier& barrier_at(const void* at, const void* return_to);
    void end_phase_if_complete(SharedBarrier& barrier);

    // bulk.cpp
    Transfer box_at(const void* map, const void* shared, const int (&at)[kBoxAxes], int axes);
    Transfer line(const void* shared, const void* global, std::size_t bytes);
    Transfer room_for(const void* shared, std::size_t bytes, std::size_t alignment);
    void note_global(const Access& now, const Transfer& transfer);
    void start_bulk_copy(Transfer transfer, const void* barrier, const void* return_to);
    void start_bulk_store(Transfer transfer, bool adds_floats, const void* return_to);
    bool bring_copy();

    // signals.cpp
    bool wait_signal();

    // pairs.cpp
    unsigned partner() const { return index_ ^ 1; }
    void use_partner();
    Deed deed_at(const void* barrier, const void* return_to);
    Past told_to_partner(const Past& past) const;
    bool release_pair();
    void post_mail();
    bool exchange_mail();
    void take_arrival(const Arrival& arrival);
    SharedBarrier* barrier_for_partner(const Deed& deed, const Clock& known);
    bool bring_sends();
    void post(const Send& send);
    bool land(const Send& send, const Past& past, SharedBarrier& barrier);
    void blame_partner(const Deed& deed);
    void end_pair();

    // products.cpp
    void read_operands();
    bool share_registers(unsigned first);
    unsigned product_agent(unsigned warp) const { return threads_.size() + warp; }

    Launch& launch_;
    Region shared_;
    std::deque<Thread> threads_;
    Thread* running_ = nullptr;
    unsigned index_ = 0, agents_ = 0;
    std::unordered_map<std::uint64_t, SharedBarrier> barriers_;  // by byte of shared memory
    std::array<NamedBarrier, kNamedBarriers> named_barriers_;
    std::deque<BulkCopy> bulk_copies_;      // the oldest first
    std::vector<unsigned> warp_registers_;  // of each thread of a warp
    Pair pair_;
    std::string failure_, details_;
    bool abandoned_ = false;  // as another block has failed
};

}  // namespace emulator
