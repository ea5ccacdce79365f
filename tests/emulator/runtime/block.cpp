#include "block.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "places.hpp"

struct Index {
    unsigned x, y, z;
};

// The built-in variables; kernels see them as const.
__thread Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

__thread unsigned char* shared_memory;

namespace {

__thread Block* current_block;
// A block's, for itself as each piece of code counts.
__thread std::uint64_t steps_left;

// "threads 0-31, 40", for reports.
std::string list(const std::vector<unsigned>& threads) {
    std::string text = threads.size() == 1 ? "thread " : "threads ";
    for (std::size_t first = 0, last; first < threads.size(); first = last + 1) {
        last = first;
        while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) ++last;
        if (first > 0) text += ", ";
        text += std::to_string(threads[first]);
        if (last > first) text += "-" + std::to_string(threads[last]);
    }
    return text;
}

}  // namespace

bool Meeting::same_operation(const Meeting& other) const {
    return of == other.of && mask == other.mask && named == other.named &&
           barrier == other.barrier && parity == other.parity && registers == other.registers &&
           !std::strcmp(operation, other.operation);
}

bool Meeting::same_line(const Meeting& other) const {
    return line == other.line && !std::strcmp(file, other.file);
}

bool Thread::stands_with(const Thread& other) const {
    if (state != other.state || state != State::kWaiting) return state == other.state;
    return meeting.same_operation(other.meeting) && meeting.same_line(other.meeting);
}

Block::Block(Launch& launch)
    : launch_(launch),
      shared_("shared memory", number(launch.shared_memory()), launch.shared_bytes, true) {
    for (unsigned i = 0; i < launch.threads; ++i) threads_.emplace_back(i, run_thread);
    current_block = this;
    shared_memory = launch.shared_memory();
    blockDim = {launch.threads, 1, 1};
    gridDim = {launch.blocks, 1, 1};
}

Block& Block::current() {
    return *current_block;
}

void Block::count_step() {
    if (--steps_left == 0) current_block->fail_steps();
}

void Block::begin(unsigned index) {
    index_ = index;
    blockIdx = {index, 0, 0};
    steps_left = launch_.max_steps;
    // NaN in every floating-point type, for the flavour that does not check what was written.
    std::memset(shared_memory, 0xff, launch_.shared_bytes);
    if (launch_.checked) shared_.start_history();
    const unsigned warps = (threads_.size() + 31) / 32;
    agents_ = threads_.size() + warps;
    barriers_.clear();
    named_barriers_.fill({});
    bulk_copies_.clear();
    warp_registers_.assign(warps, registers_at_start());
    pair_ = {};
    for (Thread& thread : threads_) {
        thread.state = Thread::State::kReady;
        thread.past.clear();
        tick(thread);
        thread.copies.clear();
        thread.copy_groups = 0;
        thread.products = {};
        thread.stores = {};
        thread.polled = nullptr;
    }
}

std::string Block::run(unsigned index) {
    begin(index);
    for (;;) {
        const bool resumed = resume_ready();
        if (!failure_.empty()) return describe_failure();
        if (all_returned()) break;
        if (release() || resumed || bring_copy()) continue;
        if (exchange_mail() || bring_sends() || wait_signal()) continue;
        if (abandoned_) return "";
        return failure_.empty() ? describe_deadlock() : prefix() + failure_ + "\n" + details_;
    }
    end_pair();
    if (!bulk_copies_.empty()) {
        failure_ = "a copy is still under way to shared memory when the block ends";
        details_ = place_line(bulk_copies_.front().place);
    }
    return failure_.empty() ? "" : prefix() + failure_ + "\n" + details_;
}

void Block::run_thread(void* thread) {
    auto& self = *static_cast<Thread*>(thread);
    const Launch& launch = current_block->launch_;
    for (;;) {
        launch.call(launch.params);
        if (!self.products.idle()) current_block->fail("returns before its products are done");
        if (!self.stores.waiting.empty()) {
            current_block->fail("returns before its stores have read shared memory");
        }
        self.stores.add();
        self.state = Thread::State::kReturned;
        self.fiber.suspend();
    }
}

// What a thread has if all have the same number of registers, which comes in eights.
unsigned Block::registers_at_start() const {
    constexpr std::size_t kRegistersPerSm = 65536, kMostOfAThread = 255, kStep = 8;
    const std::size_t threads = launch_.blocks_per_sm * threads_.size();
    return std::min(kRegistersPerSm / threads, kMostOfAThread) / kStep * kStep;
}

// From here on a thread does what it has not told anybody yet.
void Block::tick(Thread& thread) {
    thread.past.seen.raise(thread.index, thread.past.seen.at(thread.index) + 1);
}

void Block::resume(Thread& thread) {
    running_ = &thread;
    threadIdx = {thread.index, 0, 0};
    thread.fiber.resume();
}

bool Block::resume_ready() {
    bool any = false;
    for (Thread& thread : threads_) {
        if (thread.state != Thread::State::kReady) continue;
        any = true;
        resume(thread);
        if (!failure_.empty()) break;
    }
    return any;
}

bool Block::all_returned() const {
    return std::all_of(threads_.begin(), threads_.end(), [](const Thread& thread) {
        return thread.state == Thread::State::kReturned;
    });
}

unsigned Block::shared_offset(const void* address) {
    const auto number = reinterpret_cast<std::uintptr_t>(address);
    if (!shared_.contains(number)) fail("takes an address outside of shared memory for one inside");
    return number - shared_.begin;
}

void Block::meet(const Meeting& meeting) {
    running_->meeting = meeting;
    running_->state = Thread::State::kWaiting;
    running_->fiber.suspend();
}

// Lets those go on who have all met; false if there are none.
bool Block::release() {
    bool any = release_block() || release_pair();
    for (unsigned first = 0; first < threads_.size(); first += 32) any |= release_warp(first);
    for (unsigned first = 0; first < threads_.size(); first += kWarpgroup) {
        any |= release_warpgroup(first);
    }
    return any;
}

// A barrier that only some threads of the block reach, or not all in the same line, is an error.
bool Block::release_block() {
    const Thread& front = threads_.front();
    if (!front.waits_in(Meeting::Of::kBlock)) return false;
    for (const Thread& thread : threads_) {
        if (!thread.stands_with(front)) return false;
    }
    unsigned ayes = 0;
    Past all;
    for (const Thread& thread : threads_) {
        ayes += *static_cast<const bool*>(thread.meeting.in);
        all.join(thread.past);
    }
    for (Thread& thread : threads_) {
        *static_cast<unsigned*>(thread.meeting.out) = ayes;
        thread.resume_with(all);
        tick(thread);
    }
    return true;
}

bool Block::release_warp(unsigned first) {
    const unsigned count = std::min<unsigned>(32, threads_.size() - first);
    const unsigned existing = ~0u >> (32 - count);
    bool any = false;
    for (unsigned lane = 0; lane < count; ++lane) {
        const Thread& caller = threads_[first + lane];
        if (!caller.waits_in(Meeting::Of::kWarp)) continue;
        unsigned arrived = 0;
        for (unsigned other = 0; other < count; ++other) {
            const Thread& thread = threads_[first + other];
            if (thread.state == Thread::State::kWaiting &&
                thread.meeting.same_operation(caller.meeting))
                arrived |= 1u << other;
        }
        if (arrived != (caller.meeting.mask & existing)) continue;
        combine(first, arrived);
        any = true;
    }
    return any;
}

// Ends the operation in which these lanes of a warp have met.
void Block::combine(unsigned first, unsigned lanes) {
    const void* in[32] = {};
    void* out[32] = {};
    const Meeting* meeting = nullptr;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        Thread& thread = threads_[first + lane];
        thread.state = Thread::State::kReady;
        meeting = &thread.meeting;
        in[lane] = meeting->in;
        out[lane] = meeting->out;
    }
    if (meeting->combine) meeting->combine(in, out, lanes);
    if (!meeting->orders_memory) return;
    Past all;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (lanes >> lane & 1) all.join(threads_[first + lane].past);
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        threads_[first + lane].past.join(all);
        tick(threads_[first + lane]);
    }
}

// All of a warpgroup must be in the same line.
bool Block::release_warpgroup(unsigned first) {
    const Thread& front = threads_[first];
    if (!front.waits_in(Meeting::Of::kWarpgroup) || first + kWarpgroup > threads_.size()) {
        return false;
    }
    for (unsigned i = 0; i < kWarpgroup; ++i) {
        if (!threads_[first + i].stands_with(front)) return false;
    }
    if (front.meeting.registers != 0 && !share_registers(first)) return false;
    for (unsigned i = 0; i < kWarpgroup; ++i) threads_[first + i].state = Thread::State::kReady;
    return true;
}

void Block::fail(const std::string& message, const std::string& details) {
    failure_ = message;
    details_ = details;
    stop();
}

// Ends the block, for what the failure says.
void Block::stop() {
    running_->fiber.suspend();
    __builtin_unreachable();
}

void Block::fail_steps() {
    fail("a block of this kernel has taken " + std::to_string(launch_.max_steps) +
         " steps and has not come to an end");
}

std::string Block::prefix() const {
    return std::string(launch_.kernel) + ", block " + std::to_string(index_) + ": ";
}

// The kernel's functions; what they call here is left out.
std::string Block::stack_of(const Thread& thread) const {
    std::string text;
    thread.fiber.walk_stack([&](std::uintptr_t return_to) {
        if (module_of(return_to) == launch_.module) text += place_line(return_to - launch_.module);
    });
    return text;
}

std::uint32_t Block::place_of(const void* return_to) const {
    return number(return_to) - launch_.module;
}

std::string Block::describe_failure() const {
    return std::string(launch_.kernel) + ", block " + std::to_string(index_) + ", thread " +
           std::to_string(running_->index) + ": " + failure_ + "\n" + stack_of(*running_) +
           details_;
}

std::string Block::describe_deadlock() const {
    std::string text = prefix() + "threads wait for others that do not come\n";
    std::vector<bool> told(threads_.size());
    for (const Thread& first : threads_) {
        if (told[first.index]) continue;
        std::vector<unsigned> group;
        for (const Thread& thread : threads_) {
            if (!thread.stands_with(first)) continue;
            told[thread.index] = true;
            group.push_back(thread.index);
        }
        text += list(group) + describe_wait(first) + "\n";
        if (first.state != Thread::State::kReturned) text += stack_of(first);
    }
    return text;
}

std::string Block::describe_wait(const Thread& thread) const {
    if (thread.state == Thread::State::kReturned) return " returned";
    const Meeting& meeting = thread.meeting;
    std::string text = std::string(" in ") + meeting.operation;
    switch (meeting.of) {
        case Meeting::Of::kBlock:
        case Meeting::Of::kPair:
            break;
        case Meeting::Of::kWarp: {
            char mask[24];
            std::snprintf(mask, sizeof mask, " of lanes 0x%08x", meeting.mask);
            return text + mask;
        }
        case Meeting::Of::kWarpgroup:
            if (meeting.registers != 0) text += " to " + std::to_string(meeting.registers);
            return text + " of a warpgroup";
        case Meeting::Of::kNamedBarrier: {
            const NamedBarrier& barrier = named_barriers_[meeting.named];
            return text + " at barrier " + std::to_string(meeting.named) + ", where " +
                   std::to_string(barrier.arrived) + " of " + std::to_string(barrier.threads) +
                   " threads have arrived";
        }
        case Meeting::Of::kSignal:
            return text + " for another value";
        case Meeting::Of::kPhase:
            return text + " for a phase of parity " + std::to_string(meeting.parity) + " of " +
                   meeting.barrier->describe();
    }
    return text;
}

}  // namespace emulator
