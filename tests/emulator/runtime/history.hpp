// Who read and wrote a piece of memory last, and whether a barrier lies between two accesses.
//
// A thread's time is counted in barriers: how many __syncthreads its block has passed, and how many
// __syncwarp its warp. Of two accesses by different threads one comes before the other only if the
// threads met in between; if they did not and one of the two writes, that is a race. It is found in
// whichever order the emulator happens to run the threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace emulator {

struct Access {
    // kCopy: a write under way, which has no moment yet.
    enum class Kind : std::uint8_t { kRead, kWrite, kAtomic, kCopy };
    // Several threads, none of whose accesses comes before another's, are noted as one access.
    enum class By : std::uint8_t { kNobody, kThread, kWarp, kBlock, kGrid };

    Kind kind = Kind::kRead;
    By by = By::kNobody;
    std::uint16_t thread = 0;
    std::uint32_t block = 0;
    std::uint32_t block_time = 0, warp_time = 0;
    std::uint32_t place = 0;  // in the code

    explicit operator bool() const { return by != By::kNobody; }

    bool same_warp(const Access& other) const {
        return block == other.block && thread / 32 == other.thread / 32;
    }

    bool comes_before(const Access& now) const {
        if (kind == Kind::kCopy) return false;
        switch (by) {
            case By::kNobody:
                return true;
            case By::kGrid:
                return false;
            case By::kThread:
                if (block == now.block && thread == now.thread) return true;
                [[fallthrough]];
            case By::kWarp:
                if (same_warp(now) && warp_time < now.warp_time) return true;
                [[fallthrough]];
            case By::kBlock:
                return block == now.block && block_time < now.block_time;
        }
        __builtin_unreachable();
    }

    // Notes a later or harmlessly simultaneous access beside this one.
    void add(const Access& now) {
        Access sum = now;
        if (!comes_before(now)) {
            sum.by = same_warp(now) ? By::kWarp : block == now.block ? By::kBlock : By::kGrid;
            sum.by = std::max(sum.by, by);
            sum.warp_time = std::max(warp_time, now.warp_time);
        }
        *this = sum;
    }
};

class History {
  public:
    // Notes an access. Returns one that it is in a race with, if any.
    Access add(const Access& now) {
        const bool both_atomic =
            writes_.kind == Access::Kind::kAtomic && now.kind == Access::Kind::kAtomic;
        if (!writes_.comes_before(now) && !both_atomic) return writes_;
        if (now.kind == Access::Kind::kRead) {
            reads_.add(now);
        } else {
            if (!reads_.comes_before(now)) return reads_;
            writes_.add(now);
            reads_ = {};  // what comes after this write comes after those reads too
        }
        return {};
    }

    // The copy into this memory is done.
    void end_copy(const Access& now) { writes_ = now; }

    bool written() const { return bool(writes_); }

  private:
    Access writes_, reads_;
};

}  // namespace emulator
