// One block at a time: its threads as fibers, the points at which they meet, its shared memory.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "emulator.hpp"
#include "fiber.hpp"
#include "memory.hpp"

namespace emulator {

// What all blocks of a launch have in common.
struct Launch {
    const char* kernel;
    void (*call)(const void* params);
    const void* params;
    unsigned blocks, threads;
    std::size_t shared_bytes;
    bool checked;
    std::deque<Region> global;
};

// An operation in which threads wait for each other.
struct Meeting {
    const char* operation;
    unsigned mask;   // of lanes; 0 for one of the whole block
    const void* in;  // of the whole block: a bool, and how many of them are true
    void* out;
    Combine combine;
    bool orders_memory;
    const char* file;
    int line;

    bool same_operation(const Meeting& other) const;
    bool same_line(const Meeting& other) const;
};

// A copy into shared memory that its thread has not waited for yet.
struct Copy {
    unsigned char* to;
    const unsigned char* from;
    unsigned bytes, valid;
};

struct Thread {
    enum class State { kReady, kWaiting, kReturned };

    Thread(unsigned index, void (*main)(void*)) : index(index), fiber(main, this) {}

    // At the same point of the code, as far as the block is concerned.
    bool stands_with(const Thread& other) const;

    const unsigned index;
    State state = State::kReady;
    Meeting meeting{};
    unsigned warp_time = 0;
    std::vector<Copy> copies;
    Fiber fiber;
};

// A thread of the operating system has one of these and runs block after block on it.
class Block {
  public:
    explicit Block(Launch& launch);

    // The one that runs on this thread of the operating system.
    static Block& current();

    // Runs one block. What it returns is empty, or says what went wrong.
    std::string run(unsigned index);

    // For the built-ins and the instrumentation of the kernel that is running.
    unsigned lane() const { return running_->index % 32; }
    void meet(const Meeting& meeting);
    void check(Access::Kind kind, const void* address, std::size_t size, const void* return_to);
    void check_shared(Access::Kind kind, const void* address, std::size_t size,
                      const void* return_to);
    void start_copy(const Copy& copy, const void* return_to);
    void wait_copies(const void* return_to);
    [[noreturn]] void fail(const std::string& message, const std::string& details = "");

  private:
    // block.cpp
    static void run_thread(void* thread);
    void resume(Thread& thread);
    bool all_returned() const;
    bool release();
    bool release_block();
    bool release_warp(unsigned first);
    void combine(unsigned first, unsigned lanes);
    std::string describe_failure() const;
    std::string describe_deadlock() const;

    // access.cpp
    Access access_now(Access::Kind kind, const void* return_to) const;
    Region* find_region(std::uintptr_t address);
    [[noreturn]] void fail_bounds(Access::Kind kind, std::uintptr_t address, std::size_t size);

    Launch& launch_;
    Region shared_;
    std::deque<Thread> threads_;
    Thread* running_ = nullptr;
    unsigned index_ = 0, time_ = 0;
    std::string failure_, details_;
};

}  // namespace emulator
