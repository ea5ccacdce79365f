// Who read and wrote a piece of memory last, and whether one access comes before another.
//
// Of two accesses by different threads one comes before the other only if the first thread told the
// second so: by a barrier, or by several. If none did and one of the two writes, that is a race. It
// is found in whichever order the emulator happens to run the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "clock.hpp"

namespace emulator {

struct Access {
    // kCopy: a write under way, which has no moment yet.
    enum class Kind : std::uint8_t { kRead, kWrite, kAtomic, kCopy };
    // Threads, or what works for one: a product or a store until it is waited for, a bulk copy or
    // what a partner sends until the barrier on which its bytes arrive is.
    enum class By : std::uint8_t {
        kNobody,
        kThread,
        kProduct,
        kBulkCopy,
        kBulkStore,
        kSend,
        kPartnerCopy
    };

    Kind kind = Kind::kRead;
    By by = By::kNobody;
    std::uint16_t thread = 0;  // for reports
    std::uint32_t block = 0;
    // Agents that did the same at the same of their times: bit i is agent `first` + i.
    std::uint32_t first = 0, members = 0, time = 0;
    std::uint32_t place = 0;  // in the code

    explicit operator bool() const { return by != By::kNobody; }

    // Whether it reaches memory as threads do.
    bool generic() const { return by == By::kThread || by == By::kSend; }

    bool needs_fence_before(const Access& now) const {
        return generic() && kind != Kind::kRead && !now.generic();
    }

    bool comes_before(const Access& now, const Past& past) const {
        if (by == By::kNobody) return true;
        if (kind == Kind::kCopy) return false;
        if (block == now.block) return is_in(needs_fence_before(now) ? past.fenced : past.seen);
        const auto other = past.others.find(block);
        return other != past.others.end() && is_in(other->second);
    }

    bool is_in(const Clock& clock) const {
        for (std::uint32_t rest = members; rest; rest &= rest - 1) {
            if (clock.at(first + __builtin_ctz(rest)) < time) return false;
        }
        return true;
    }

    bool same_agents(const Access& other) const {
        return by == other.by && block == other.block && first == other.first;
    }

    // Notes an access of the same moment as part of this one, if it is.
    bool absorb(const Access& now) {
        if (!same_agents(now) || time != now.time || kind != now.kind) return false;
        members |= now.members;
        thread = now.thread;
        place = now.place;
        return true;
    }

    // An agent's later access stands for its earlier one.
    void forget(const Access& now) {
        if (!same_agents(now)) return;
        members &= ~now.members;
        if (members == 0) by = By::kNobody;
    }
};

// Accesses none of which comes before another.
class Accesses {
  public:
    explicit operator bool() const { return bool(one_); }

    // One that does not come before `now` although it must, if any.
    Access race(const Access& now, const Past& past) const {
        if (races(one_, now, past)) return one_;
        for (const Access& access : more_) {
            if (races(access, now, past)) return access;
        }
        return {};
    }

    void add(const Access& now, const Past& past) {
        if (one_.absorb(now)) return;
        for (Access& access : more_) {
            if (access.absorb(now)) return;
        }
        const auto over = [&](Access& access) {
            // Other atomic accesses are in no race with this one, but may be with a write before
            // it.
            if (now.kind == Access::Kind::kAtomic && access.kind == Access::Kind::kWrite)
                return false;
            access.forget(now);
            return access.comes_before(now, past);
        };
        if (!more_.empty())
            more_.erase(std::remove_if(more_.begin(), more_.end(), over), more_.end());
        if (over(one_)) {
            one_ = {};
            if (more_.empty()) {
                one_ = now;
                return;
            }
            std::swap(one_, more_.back());
            more_.pop_back();
        }
        // What another block did hardly ever comes before anything here: two blocks stand for all.
        if (!of_several_blocks()) more_.push_back(now);
    }

    void set(const Access& now) {
        one_ = now;
        more_.clear();
    }
    void clear() { set({}); }

  private:
    static bool races(const Access& access, const Access& now, const Past& past) {
        const bool both_atomic =
            access.kind == Access::Kind::kAtomic && now.kind == Access::Kind::kAtomic;
        return !both_atomic && !access.comes_before(now, past);
    }

    bool of_several_blocks() const {
        return std::any_of(more_.begin(), more_.end(),
                           [&](const Access& access) { return access.block != one_.block; });
    }

    Access one_;
    std::vector<Access> more_;
};

class History {
  public:
    // Notes an access. Returns one that it is in a race with, if any.
    Access add(const Access& now, const Past& past) {
        if (const Access other = writes_.race(now, past)) return other;
        if (now.kind == Access::Kind::kRead) {
            reads_.add(now, past);
            return {};
        }
        if (const Access other = reads_.race(now, past)) return other;
        writes_.add(now, past);
        // What comes after this write comes after those reads too.
        if (now.kind != Access::Kind::kAtomic) reads_.clear();
        return {};
    }

    // The copy into this memory is done.
    void end_copy(const Access& now) { writes_.set(now); }

    bool written() const { return bool(writes_); }

  private:
    Accesses writes_, reads_;
};

}  // namespace emulator
