// Barriers in shared memory, and those of a part of a block.
#include "barriers.hpp"

#include "block.hpp"

namespace emulator {

std::string SharedBarrier::describe() const {
    const unsigned parity = phase & 1;
    std::string text = "the barrier at byte " + std::to_string(at) +
                       " of shared memory, whose phase " + std::to_string(phase) + ", of parity " +
                       std::to_string(parity) + ", lacks " + std::to_string(missing) + " of " +
                       std::to_string(arrivals) + " arrivals";
    if (bytes > 0) text += " and " + std::to_string(bytes) + " bytes";
    if (bytes < 0) text += " and has " + std::to_string(-bytes) + " bytes that nobody announced";
    return text;
}

void Block::init_barrier(const void* at, unsigned arrivals, const void* return_to) {
    check_shared(Access::Kind::kWrite, at, sizeof(std::uint64_t), return_to);
    const unsigned offset = shared_offset(at);
    if (arrivals == 0) fail("a barrier for no arrivals");
    const SharedBarrier barrier{offset, agents_, arrivals, running_->index};
    if (!barriers_.emplace(offset, barrier).second) {
        fail("the barrier at byte " + std::to_string(offset) + " of shared memory is set up twice");
    }
    ++agents_;
}

void Block::fence_barriers() {
    for (auto& [at, barrier] : barriers_) {
        if (barrier.initializer == running_->index) barrier.known_to_copies = true;
    }
}

SharedBarrier& Block::barrier_at(const void* at, const void* return_to) {
    const auto found = barriers_.find(shared_offset(at));
    if (found == barriers_.end()) {
        fail("there is no barrier at byte " + std::to_string(shared_offset(at)) +
             " of shared memory");
    }
    check_shared(Access::Kind::kAtomic, at, sizeof(std::uint64_t), return_to);
    return found->second;
}

void Block::arrive(const void* at, unsigned announced_bytes, const void* return_to) {
    SharedBarrier& barrier = barrier_at(at, return_to);
    if (barrier.missing == 0) fail("one arrival too many at " + barrier.describe());
    running_->polled = nullptr;  // it goes on: what it sees again after this, it does not wait for
    barrier.arriving.join(running_->past);
    tick(*running_);
    barrier.bytes += announced_bytes;
    --barrier.missing;
    end_phase_if_complete(barrier);
}

void Block::end_phase_if_complete(SharedBarrier& barrier) {
    if (!barrier.complete()) return;
    barrier.end_phase();
    for (Thread& thread : threads_) {
        if (!thread.waits_in(Meeting::Of::kPhase) || thread.meeting.barrier != &barrier) continue;
        if (!barrier.ended(thread.meeting.parity)) continue;
        thread.resume_with(barrier.arrived);
        if (thread.meeting.for_partner) thread.past.join(barrier.partner_arrived);
    }
}

void Block::wait_phase(const void* at, unsigned parity, bool for_partner, const char* file,
                       int line, const void* return_to) {
    SharedBarrier& barrier = barrier_at(at, return_to);
    if (parity > 1) fail("waits for a phase of parity " + std::to_string(parity));
    if (barrier.ended(parity)) {
        running_->past.join(barrier.arrived);
        if (for_partner) running_->past.join(barrier.partner_arrived);
        return;
    }
    Meeting meeting{Meeting::Of::kPhase, "mbarrier.try_wait", file, line};
    meeting.barrier = &barrier;
    meeting.parity = parity;
    meeting.for_partner = for_partner;
    meet(meeting);
}

void Block::arrive_named(const Meeting& meeting, unsigned threads, bool waits) {
    const std::string name = "barrier " + std::to_string(meeting.named);
    if (meeting.named >= kNamedBarriers) fail("there is no " + name);
    if (threads % 32 != 0 || threads > threads_.size()) {
        fail(name + " of " + std::to_string(threads) + " threads");
    }
    NamedBarrier& barrier = named_barriers_[meeting.named];
    if (barrier.arrived == 0) barrier.threads = threads;
    if (barrier.threads != threads) {
        fail(name + " of " + std::to_string(threads) +
             " threads, at which others arrived as one of " + std::to_string(barrier.threads));
    }
    barrier.arriving.join(running_->past);
    tick(*running_);
    if (meeting.in != nullptr) barrier.ayes += *static_cast<const bool*>(meeting.in);
    if (++barrier.arrived < threads) {
        if (waits) meet(meeting);
        return;
    }
    const NamedBarrier ended = std::exchange(barrier, {});
    const auto tell = [&](const Meeting& of) {
        if (of.out != nullptr) *static_cast<unsigned*>(of.out) = ended.ayes;
    };
    for (Thread& thread : threads_) {
        if (!thread.waits_in(Meeting::Of::kNamedBarrier)) continue;
        if (thread.meeting.named != meeting.named) continue;
        tell(thread.meeting);
        thread.resume_with(ended.arriving);
    }
    tell(meeting);
    if (waits) running_->resume_with(ended.arriving);
}

}  // namespace emulator
