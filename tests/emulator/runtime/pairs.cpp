// Blocks 2i and 2i + 1, partners.
#include "pairs.hpp"

#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "block.hpp"
#include "places.hpp"

namespace emulator {

namespace {

// Moves all elements to the end of others.
template <class From, class To>
void move_to(From& from, To& to) {
    std::move(from.begin(), from.end(), std::back_inserter(to));
    from.clear();
}

Access access_of(const Deed& deed, unsigned block, Access::Kind kind) {
    Access access;
    access.kind = kind;
    access.by = Access::By::kThread;
    access.thread = deed.thread;
    access.block = block;
    access.first = deed.thread / 32 * 32;
    access.members = 1u << deed.thread % 32;
    access.time = deed.time;
    access.place = deed.place;
    return access;
}

std::string name_of(unsigned block, const Deed& deed) {
    return "block " + std::to_string(block) + ", thread " + std::to_string(deed.thread);
}

}  // namespace

void Block::use_partner() {
    if (launch_.cluster != 2) fail("the launch has no clusters of two blocks");
    if (partner() >= launch_.blocks) fail("the last block has no partner");
    pair_.in_use = true;
}

Deed Block::deed_at(const void* barrier, const void* return_to) {
    use_partner();
    return {running_->index, running_->past.seen.at(running_->index), place_of(return_to),
            shared_offset(barrier)};
}

// What comes before, as the partner counts.
Past Block::told_to_partner(const Past& past) const {
    Past told;
    told.others = past.others;
    told.seen = std::exchange(told.others[partner()], {});
    told.others.erase(partner());
    told.others[index_] = past.seen;
    return told;
}

void Block::sync_pair(const char* file, int line) {
    use_partner();
    meet({Meeting::Of::kPair, "barrier.cluster", file, line});
}

void Block::arrive_at_partner(const void* barrier, const void* return_to) {
    const Deed deed = deed_at(barrier, return_to);
    pair_.out.arrivals.push_back({deed, told_to_partner(running_->past)});
    tick(*running_);
}

void Block::send_to_partner(float* to, const float (&values)[4], const void* barrier,
                            const void* return_to) {
    check(Access::Kind::kRead, values, sizeof values, return_to);
    Send send{deed_at(barrier, return_to), shared_offset(to), {}};
    std::memcpy(send.values, values, sizeof values);
    if (const std::size_t past = send.to % sizeof values) {
        fail("misaligned: sends 16 bytes to " + std::to_string(past) +
             " bytes past a multiple of that");
    }
    if (send.to + sizeof values > shared_.bytes) fail("sends to beyond shared memory");
    post(send);
}

void Block::copy_to_partner(const void* from, std::size_t bytes, const void* barrier,
                            const void* return_to) {
    const Transfer transfer = line(from, from, bytes);
    const Deed deed = deed_at(barrier, return_to);
    auto& [agent, count] = running_->partner_copies;
    if (agent == 0) agent = agents_++;
    ++count;
    const Access now =
        access_by(Access::By::kPartnerCopy, agent, count, running_->index, deed.place);
    note(now, running_->past, from, bytes);
    for (const Chunk& chunk : transfer.chunks) {
        Send send{deed, shared_offset(chunk.shared), {}, agent, count};
        std::memcpy(send.values, chunk.shared, sizeof send.values);
        post(send);
    }
}

void Block::post(const Send& send) {
    const Clock& known = running_->past.others[partner()];
    std::vector<Sends>& batches = pair_.out.sends;
    if (batches.empty() || !(batches.back().known == known)) batches.push_back({known, {}});
    batches.back().all.push_back(send);
}

// Lets threads go on that have all met at pair_sync, as the partner's have; false if not.
bool Block::release_pair() {
    for (const Thread& thread : threads_) {
        if (!thread.waits_in(Meeting::Of::kPair)) return false;
    }
    if (!pair_.synced) {
        pair_.at_sync.clear();
        for (const Thread& thread : threads_) pair_.at_sync.join(thread.past);
        pair_.out.syncs.push_back(told_to_partner(pair_.at_sync));
        pair_.synced = true;
    }
    if (pair_.syncs.empty()) return false;
    pair_.at_sync.join(pair_.syncs.front());
    pair_.syncs.pop_front();
    pair_.synced = false;
    for (Thread& thread : threads_) {
        thread.resume_with(pair_.at_sync);
        tick(thread);
    }
    return true;
}

// Only within Signals::exclusively.
void Block::post_mail() {
    Mail& out = pair_.out;
    if (out.sends.empty() && out.arrivals.empty() && out.syncs.empty()) return;
    Mailbox& box = launch_.mailboxes[partner()];
    if (box.ended && !(out.sends.empty() && out.arrivals.empty())) {
        const bool sends = !out.sends.empty();
        const Deed& deed = sends ? out.sends.front().all.front().deed : out.arrivals.front().deed;
        failure_ = (sends ? "a send of thread " : "an arrival of thread ") +
                   std::to_string(deed.thread) + " comes when its partner has ended";
        details_ = place_line(deed.place);
    }
    move_to(out.sends, box.mail.sends);
    move_to(out.arrivals, box.mail.arrivals);
    move_to(out.syncs, box.mail.syncs);
    launch_.signals->notify();
}

// Posts what there is for the partner, and takes what is there from it; false if no thread can go
// on for that.
bool Block::exchange_mail() {
    if (!pair_.in_use || !failure_.empty()) return false;
    Mail got;
    launch_.signals->exclusively([&] {
        post_mail();
        Mailbox& mine = launch_.mailboxes[index_];
        const Mailbox& theirs = launch_.mailboxes[partner()];
        mine.in_use = true;
        got = std::exchange(mine.mail, {});
        pair_.version = launch_.signals->version();
        pair_.partner_ended = theirs.ended;
    });
    const bool any = !got.arrivals.empty() || !got.syncs.empty();
    move_to(got.sends, pair_.under_way);
    move_to(got.syncs, pair_.syncs);
    for (const Arrival& arrival : got.arrivals) {
        if (!failure_.empty()) return false;
        take_arrival(arrival);
    }
    return any && failure_.empty();
}

void Block::take_arrival(const Arrival& arrival) {
    SharedBarrier* const barrier = barrier_for_partner(arrival.deed, arrival.told.seen);
    if (!barrier) return;
    if (barrier->missing == 0) {
        failure_ = "one arrival too many at " + barrier->describe();
        blame_partner(arrival.deed);
        return;
    }
    barrier->partner_arriving.join(arrival.told);
    pair_.arrived[arrival.deed.thread] = arrival.deed;
    --barrier->missing;
    end_phase_if_complete(*barrier);
}

// A barrier of which the partner must know that it is set up; null if it does not.
SharedBarrier* Block::barrier_for_partner(const Deed& deed, const Clock& known) {
    const auto found = barriers_.find(deed.barrier);
    if (found == barriers_.end()) {
        failure_ =
            "there is no barrier at byte " + std::to_string(deed.barrier) + " of shared memory";
        blame_partner(deed);
        return nullptr;
    }
    Past past;
    past.others[index_] = known;
    const Access now = access_of(deed, partner(), Access::Kind::kAtomic);
    if (!note_in(shared_, now, past, shared_.begin + deed.barrier, sizeof(std::uint64_t))) {
        blame_partner(deed);
        return nullptr;
    }
    return &found->second;
}

// Brings the oldest sends that are under way; false if there are none.
bool Block::bring_sends() {
    if (pair_.under_way.empty() || !failure_.empty()) return false;
    const Sends sends = std::move(pair_.under_way.front());
    pair_.under_way.pop_front();
    Past past;
    past.others[index_] = sends.known;
    SharedBarrier* barrier = nullptr;
    for (const Send& send : sends.all) {
        if (!barrier || barrier->at != send.deed.barrier) {
            barrier = barrier_for_partner(send.deed, sends.known);
        }
        if (!barrier || !land(send, past, *barrier)) return false;
    }
    return true;
}

bool Block::land(const Send& send, const Past& past, SharedBarrier& barrier) {
    const std::uintptr_t to = shared_.begin + send.to;
    const Access sent = access_of(send.deed, partner(), Access::Kind::kWrite);
    if (!note_in(shared_, sent, past, to, sizeof send.values)) {
        blame_partner(send.deed);
        return false;
    }
    std::memcpy(shared_memory + send.to, send.values, sizeof send.values);
    const auto by = send.reader == 0 ? Access::By::kSend : Access::By::kPartnerCopy;
    Access landed =
        access_by(by, barrier.agent, barrier.phase + 1, send.deed.thread, send.deed.place);
    landed.kind = Access::Kind::kWrite;
    shared_.each_history(to, sizeof send.values, [&](History& history) {
        history.end_copy(landed);
        return false;
    });
    barrier.partner_arriving.seen.raise(barrier.agent, landed.time);
    if (send.reader != 0) barrier.partner_arriving.others[partner()].raise(send.reader, send.read);
    pair_.landed[barrier.agent] = send.deed;
    pair_.landed[barrier.agent].time = landed.time;
    barrier.bytes -= static_cast<long long>(sizeof send.values);
    end_phase_if_complete(barrier);
    return true;
}

// The failure is the partner's.
void Block::blame_partner(const Deed& deed) {
    failure_ = "from " + name_of(partner(), deed) + ": " + failure_;
    details_ = place_line(deed.place) + details_;
}

// Looks at what the partner did or does here while nobody waits for it: it might as well come when
// the block has ended.
void Block::end_pair() {
    Mail left;
    launch_.signals->exclusively([&] {
        post_mail();
        Mailbox& mine = launch_.mailboxes[index_];
        mine.ended = true;
        left = std::exchange(mine.mail, {});
        const bool has_partner = partner() < launch_.blocks;
        if (has_partner && launch_.mailboxes[partner()].in_use) launch_.signals->notify();
    });
    if (!failure_.empty()) return;
    const auto fail_for = [&](const Deed& deed, const char* what) {
        failure_ = std::string("ends with no wait for ") + what + " of " + name_of(partner(), deed);
        details_ = place_line(deed.place);
    };
    move_to(left.sends, pair_.under_way);
    if (!pair_.under_way.empty()) {
        fail_for(pair_.under_way.front().all.front().deed, "a send");
    } else if (!left.arrivals.empty()) {
        fail_for(left.arrivals.front().deed, "an arrival");
    }
    if (pair_.landed.empty() && pair_.arrived.empty()) return;
    Past known;
    for (const Thread& thread : threads_) known.join(thread.past);
    for (const auto& [agent, deed] : pair_.landed) {
        if (known.seen.at(agent) < deed.time) fail_for(deed, "a send");
    }
    for (const auto& [thread, deed] : pair_.arrived) {
        if (known.others[partner()].at(thread) < deed.time) fail_for(deed, "an arrival");
    }
}

}  // namespace emulator
