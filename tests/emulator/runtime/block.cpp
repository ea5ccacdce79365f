#include "block.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "places.hpp"

struct Index {
    unsigned x, y, z;
};

// The built-in variables; kernels see them as const. The module defines the shared memory, as large
// as SMEM_BYTES.
__thread Index threadIdx, blockIdx, blockDim, gridDim;
extern __thread unsigned char bytes[];

namespace emulator {

namespace {

__thread Block* current_block;

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

std::string stack_of(const Thread& thread) {
    std::string text;
    thread.fiber.walk_stack(
        [&](std::uintptr_t return_to) { text += place_line(offset_in_module(return_to)); });
    return text;
}

}  // namespace

bool Meeting::same_operation(const Meeting& other) const {
    return mask == other.mask && !std::strcmp(operation, other.operation);
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
      shared_("shared memory", reinterpret_cast<std::uintptr_t>(bytes), launch.shared_bytes, true) {
    for (unsigned i = 0; i < launch.threads; ++i) threads_.emplace_back(i, run_thread);
    current_block = this;
    blockDim = {launch.threads, 1, 1};
    gridDim = {launch.blocks, 1, 1};
}

Block& Block::current() {
    return *current_block;
}

std::string Block::run(unsigned index) {
    index_ = index;
    time_ = 0;
    blockIdx = {index, 0, 0};
    // NaN in every floating-point type, for the flavour that does not check what was written.
    std::memset(bytes, 0xff, launch_.shared_bytes);
    if (launch_.checked) shared_.start_history();
    for (Thread& thread : threads_) {
        thread.state = Thread::State::kReady;
        thread.warp_time = 0;
        thread.copies.clear();
    }
    do {
        for (Thread& thread : threads_) {
            if (thread.state == Thread::State::kReady) resume(thread);
            if (!failure_.empty()) return describe_failure();
        }
        if (all_returned()) return "";
    } while (release());
    return describe_deadlock();
}

void Block::run_thread(void* thread) {
    auto& self = *static_cast<Thread*>(thread);
    const Launch& launch = current_block->launch_;
    for (;;) {
        launch.call(launch.params);
        self.state = Thread::State::kReturned;
        self.fiber.suspend();
    }
}

void Block::resume(Thread& thread) {
    running_ = &thread;
    threadIdx = {thread.index, 0, 0};
    thread.fiber.resume();
}

bool Block::all_returned() const {
    return std::all_of(threads_.begin(), threads_.end(), [](const Thread& thread) {
        return thread.state == Thread::State::kReturned;
    });
}

void Block::meet(const Meeting& meeting) {
    running_->meeting = meeting;
    running_->state = Thread::State::kWaiting;
    running_->fiber.suspend();
}

// Lets those go on who have all met; false if there are none.
bool Block::release() {
    bool any = release_block();
    for (unsigned first = 0; first < threads_.size(); first += 32) any |= release_warp(first);
    return any;
}

// A barrier that only some threads of the block reach, or not all in the same line, is an error.
bool Block::release_block() {
    const Thread& front = threads_.front();
    if (front.state != Thread::State::kWaiting || front.meeting.mask != 0) return false;
    for (const Thread& thread : threads_) {
        if (!thread.stands_with(front)) return false;
    }
    unsigned ayes = 0;
    for (const Thread& thread : threads_) ayes += *static_cast<const bool*>(thread.meeting.in);
    for (Thread& thread : threads_) {
        *static_cast<unsigned*>(thread.meeting.out) = ayes;
        thread.state = Thread::State::kReady;
    }
    ++time_;
    return true;
}

bool Block::release_warp(unsigned first) {
    const unsigned count = std::min<unsigned>(32, threads_.size() - first);
    const unsigned existing = ~0u >> (32 - count);
    bool any = false;
    for (unsigned lane = 0; lane < count; ++lane) {
        const Thread& caller = threads_[first + lane];
        if (caller.state != Thread::State::kWaiting || caller.meeting.mask == 0) continue;
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
    unsigned latest = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        Thread& thread = threads_[first + lane];
        thread.state = Thread::State::kReady;
        meeting = &thread.meeting;
        in[lane] = meeting->in;
        out[lane] = meeting->out;
        latest = std::max(latest, thread.warp_time);
    }
    if (meeting->combine) meeting->combine(in, out, lanes);
    if (!meeting->orders_memory) return;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (lanes >> lane & 1) threads_[first + lane].warp_time = latest + 1;
    }
}

void Block::fail(const std::string& message, const std::string& details) {
    failure_ = message;
    details_ = details;
    running_->fiber.suspend();
    __builtin_unreachable();
}

std::string Block::describe_failure() const {
    return std::string(launch_.kernel) + ", block " + std::to_string(index_) + ", thread " +
           std::to_string(running_->index) + ": " + failure_ + "\n" + stack_of(*running_) +
           details_;
}

std::string Block::describe_deadlock() const {
    std::string text = std::string(launch_.kernel) + ", block " + std::to_string(index_) +
                       ": threads wait for others that do not come\n";
    std::vector<bool> told(threads_.size());
    for (const Thread& first : threads_) {
        if (told[first.index]) continue;
        std::vector<unsigned> group;
        for (const Thread& thread : threads_) {
            if (!thread.stands_with(first)) continue;
            told[thread.index] = true;
            group.push_back(thread.index);
        }
        if (first.state == Thread::State::kReturned) {
            text += list(group) + " returned\n";
            continue;
        }
        text += list(group) + " in " + first.meeting.operation;
        if (first.meeting.mask != 0) {
            char mask[24];
            std::snprintf(mask, sizeof mask, " of lanes 0x%08x", first.meeting.mask);
            text += mask;
        }
        text += "\n" + stack_of(first);
    }
    return text;
}

}  // namespace emulator
