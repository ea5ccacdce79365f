// What a block tells others, and learns from them.
#include "signals.hpp"

#include <algorithm>

#include "block.hpp"

namespace emulator {

// A thread that sees what it saw before waits until there is a signal, as it would by trying again.
unsigned Block::load_acquire(const unsigned* address, const char* file, int line,
                             const void* return_to) {
    check(Access::Kind::kAtomic, address, sizeof *address, return_to);
    Thread& self = *running_;
    for (bool waited = false;; waited = true) {
        Meeting meeting{Meeting::Of::kSignal, "ld.acquire", file, line};
        unsigned value = 0;
        launch_.signals->exclusively([&] {
            value = *address;
            meeting.version = launch_.signals->version();
            for (const auto& [block, clock] :
                 launch_.signals->at(reinterpret_cast<std::uintptr_t>(address)).others) {
                (block == index_ ? self.past.seen : self.past.others[block]).join(clock);
            }
        });
        const bool again = self.polled == address && self.polled_value == value;
        self.polled = address;
        self.polled_value = value;
        if (waited || !again) return value;
        meet(meeting);
    }
}

void Block::add_release(unsigned* address, unsigned value, const void* return_to) {
    check(Access::Kind::kAtomic, address, sizeof *address, return_to);
    if (!running_->stores.adding.empty()) fail("signals before what it adds is there");
    launch_.signals->exclusively([&] {
        *address += value;
        Past& told = launch_.signals->at(reinterpret_cast<std::uintptr_t>(address));
        told.others[index_].join(running_->past.seen);
        for (const auto& [block, clock] : running_->past.others) told.others[block].join(clock);
        launch_.signals->notify();
    });
    tick(*running_);
}

// Lets those go on who wait for a signal, once there is one; the partner's mail comes with one,
// too. False if there will be none.
bool Block::wait_signal() {
    if (!failure_.empty()) return false;
    const auto waits = [](const Thread& thread) { return thread.waits_in(Meeting::Of::kSignal); };
    const bool any = std::any_of(threads_.begin(), threads_.end(), waits);
    const bool for_partner = pair_.in_use && !pair_.partner_ended;
    if (!any && !for_partner) return false;
    Signals::Version oldest = for_partner ? pair_.version : launch_.signals->kNone;
    for (const Thread& thread : threads_) {
        if (waits(thread)) oldest = std::min(oldest, thread.meeting.version);
    }
    const Signals::End end = launch_.signals->wait(oldest);
    abandoned_ = end == Signals::End::kAbandoned;
    if (end != Signals::End::kSignal) return false;
    for (Thread& thread : threads_) {
        if (waits(thread)) thread.state = Thread::State::kReady;
    }
    return true;
}

}  // namespace emulator
