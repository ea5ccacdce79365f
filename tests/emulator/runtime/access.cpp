// What a kernel may do to memory and what not.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "block.hpp"
#include "places.hpp"

namespace emulator {

namespace {

const char* verb(Access::Kind kind) {
    switch (kind) {
        case Access::Kind::kRead:
            return "reads";
        case Access::Kind::kWrite:
            return "writes";
        case Access::Kind::kAtomic:
            return "changes atomically";
        case Access::Kind::kCopy:
            return "starts a copy to";
    }
    __builtin_unreachable();
}

std::string describe(Access::Kind kind, std::size_t size) {
    return std::string(verb(kind)) + " " + std::to_string(size) + " bytes ";
}

// What comes before `now` in a thread of `block` only by chance.
std::string describe(const Access& other, const Access& now, const Past& past) {
    std::string who = "thread " + std::to_string(other.thread);
    if (other.block != now.block) who = "block " + std::to_string(other.block) + ", " + who;
    if (other.kind == Access::Kind::kCopy) return "to which a copy of " + who + " is under way";
    Access by_thread = now;
    by_thread.by = Access::By::kThread;
    const bool only_fence = other.needs_fence_before(now) && other.comes_before(by_thread, past);
    const char* const no_fence = " with no proxy fence between";
    switch (other.by) {
        case Access::By::kProduct:
            return "which a product of the warpgroup of " + who + " " + verb(other.kind) +
                   " with no wait for it between";
        case Access::By::kBulkCopy:
            return "which a copy of " + who + " " + verb(other.kind) +
                   " with no wait for its barrier between";
        case Access::By::kBulkStore:
            return "which a store of " + who + " " + verb(other.kind) +
                   " with no wait for it between";
        case Access::By::kSend:
        case Access::By::kPartnerCopy:
            if (other.kind == Access::Kind::kRead) {
                return "which a copy of " + who +
                       " to its partner reads with no wait for what the "
                       "partner does after it";
            }
            who = "block " + std::to_string(other.block ^ 1) + ", thread ";
            return (other.by == Access::By::kSend ? "which a send of " : "which a copy of ") + who +
                   std::to_string(other.thread) + " " + verb(other.kind) +
                   (only_fence ? no_fence : " with no wait for its barrier between");
        default:
            break;
    }
    if (other.members & (other.members - 1)) who += " among others";
    return "which " + who + " " + verb(other.kind) +
           (only_fence ? no_fence : " with no barrier between");
}

}  // namespace

Access Block::access_now(Access::Kind kind, const void* return_to) const {
    Access now;
    now.kind = kind;
    now.by = Access::By::kThread;
    now.thread = running_->index;
    now.block = index_;
    now.first = running_->index / 32 * 32;
    now.members = 1u << running_->index % 32;
    now.time = running_->past.seen.at(running_->index);
    now.place = place_of(return_to);
    return now;
}

// A read by what works for a thread.
Access Block::access_by(Access::By by, unsigned agent, std::uint32_t time, unsigned thread,
                        std::uint32_t place) const {
    Access now;
    now.by = by;
    now.thread = thread;
    now.block = index_;
    now.first = agent;
    now.members = 1;
    now.time = time;
    now.place = place;
    return now;
}

void Block::check_others(Access::Kind kind, const void* pointer, std::size_t size,
                         const void* return_to) {
    if (!launch_.checked) return;
    const std::uintptr_t address = number(pointer);
    if (running_->fiber.has_on_stack(address)) {
        if (!running_->products.uses(address)) return;
        fail(describe(kind, size) + "of registers that a product works with");
    }
    note(access_now(kind, return_to), running_->past, pointer, size);
}

// Looks at an access to memory that others may see, and remembers it.
void Block::note(const Access& now, const Past& past, const void* pointer, std::size_t size) {
    const std::uintptr_t address = number(pointer);
    Region* const region = find_region(address);
    if (!region || !region->contains(address + size - 1)) fail_bounds(now.kind, address, size);
    if (!note_in(*region, now, past, address, size)) stop();
}

// False, and the failure says why, if this must not be.
bool Block::note_in(Region& region, const Access& now, const Past& past, std::uintptr_t address,
                    std::size_t size) {
    const auto what = [&] {
        return describe(now.kind, size) + "of " + region.name + " at byte " +
               std::to_string(address - region.begin) + ", ";
    };
    const bool reads = now.kind == Access::Kind::kRead;
    if (!reads && !region.writeable) {
        failure_ = what() + "which is read-only";
        return false;
    }

    Access other;
    bool unwritten = false;
    region.each_history(address, size, [&](History& history) {
        unwritten = reads && &region == &shared_ && !history.written();
        other = history.add(now, past);
        return unwritten || other;
    });
    if (unwritten) failure_ = what() + "which no thread has written";
    if (other) {
        failure_ = "race: " + what() + describe(other, now, past);
        details_ = "the other access:\n" + place_line(other.place);
    }
    return failure_.empty();
}

void Block::check_shared(Access::Kind kind, const void* pointer, std::size_t size,
                         const void* return_to) {
    const std::uintptr_t address = number(pointer);
    if (!shared_.contains(address)) fail_bounds(kind, address, size);
    if (const std::size_t past = address % size) {
        fail("misaligned: " + describe(kind, size) + std::to_string(past) +
             " bytes past a multiple of that");
    }
    check(kind, pointer, size, return_to);
}

// PTX promises a copy's data to nobody before its thread has waited, so that is when it comes, and
// until then the place for it is spoilt.
void Block::start_copy(const Copy& copy, const void* return_to) {
    if (copy.valid > copy.bytes) fail("a copy of more bytes than it has room for");
    if (const std::size_t past = number(copy.from) % copy.bytes) {
        fail("misaligned: copies " + std::to_string(copy.bytes) + " bytes from " +
             std::to_string(past) + " bytes past a multiple of that");
    }
    if (copy.valid > 0) check(Access::Kind::kRead, copy.from, copy.valid, return_to);
    check_shared(Access::Kind::kCopy, copy.to, copy.bytes, return_to);
    std::memset(copy.to, 0xff, copy.bytes);
    running_->copies.push_back(copy);
    running_->copies.back().group = running_->copy_groups;
}

void Block::commit_copies() {
    ++running_->copy_groups;
}

void Block::wait_copies(unsigned pending_groups, const void* return_to) {
    const Access now = access_now(Access::Kind::kWrite, return_to);
    std::vector<Copy>& copies = running_->copies;
    const auto pending = std::find_if(copies.begin(), copies.end(), [&](const Copy& copy) {
        return copy.group + pending_groups >= running_->copy_groups;
    });
    for (const Copy& copy : std::vector<Copy>(copies.begin(), pending)) {
        std::memcpy(copy.to, copy.from, copy.valid);
        std::memset(copy.to + copy.valid, 0, copy.bytes - copy.valid);
        shared_.each_history(number(copy.to), copy.bytes, [&](History& history) {
            history.end_copy(now);
            return false;
        });
    }
    copies.erase(copies.begin(), pending);
}

void Block::fence_proxy() {
    Thread& self = *running_;
    self.past.fenced.join(self.past.seen);
    tick(self);
    for (auto& [at, barrier] : barriers_) {
        if (barrier.initializer == self.index) barrier.known_to_copies = true;
    }
}

Region* Block::find_region(std::uintptr_t address) {
    if (shared_.contains(address)) return &shared_;
    for (Region& region : launch_.global) {
        if (region.contains(address)) return &region;
    }
    return nullptr;
}

void Block::fail_bounds(Access::Kind kind, std::uintptr_t address, std::size_t size) {
    const std::string what = describe(kind, size);
    for (const Thread& thread : threads_) {
        if (!thread.fiber.has_on_stack(address)) continue;
        fail(what + "of what is local to thread " + std::to_string(thread.index));
    }
    const Region* nearest = &shared_;
    for (const Region& region : launch_.global) {
        if (region.distance(address) < nearest->distance(address)) nearest = &region;
    }
    constexpr std::size_t kFar = 1 << 30;
    if (nearest->distance(address) > kFar) {
        char text[24];
        std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
        fail(what + "at address " + text + ", far from any array");
    }
    const auto offset = static_cast<std::ptrdiff_t>(address - nearest->begin);
    fail(what + "out of bounds: at byte " + std::to_string(offset) + " of " + nearest->name +
         ", which has " + std::to_string(nearest->bytes));
}

}  // namespace emulator
