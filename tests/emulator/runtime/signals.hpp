// What blocks of a launch tell each other while they run.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "clock.hpp"

namespace emulator {

// Blocks that run at the same time, each on a thread of the operating system. If all wait for a
// signal of another, one more block is begun: a GPU runs many at once.
class Signals {
  public:
    using Version = std::uint64_t;
    static constexpr Version kNone = ~Version{0};

    explicit Signals(std::function<bool()> begin_another)
        : begin_another_(std::move(begin_another)) {}

    // Runs with no other signal between.
    template <class Use>
    void exclusively(Use use) {
        const std::lock_guard<std::mutex> lock(mutex_);
        use();
    }

    // What comes before the value at this address. Only within `exclusively`.
    Past& at(std::uintptr_t address) { return told_[address]; }

    // Only within `exclusively`.
    Version version() const { return version_; }
    // There is a new signal. Only within `exclusively`.
    void notify() {
        ++version_;
        running_ += waiting_;
        waiting_ = 0;
        changed_.notify_all();
    }

    // Why a block waits no longer: there is a signal after that version; none can come; one that
    // will not come is nothing to report, as another block has failed.
    enum class End { kSignal, kStuck, kAbandoned };

    End wait(Version seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (version_ != seen) return End::kSignal;
        ++waiting_;
        --running_;
        if (running_ == 0 && begin_another_()) ++running_;
        end_if_stuck();
        changed_.wait(lock, [&] { return version_ != seen || stuck_ || abandoned_; });
        if (version_ != seen) return End::kSignal;
        return stuck_ ? End::kStuck : End::kAbandoned;
    }

    // What runs blocks, one after the other, begins and ends.
    void begin() {
        exclusively([&] { ++running_; });
    }
    void finish() {
        exclusively([&] {
            --running_;
            end_if_stuck();
        });
    }
    void abandon() {
        exclusively([&] {
            abandoned_ = true;
            changed_.notify_all();
        });
    }

  private:
    void end_if_stuck() {
        if (running_ > 0 || abandoned_) return;
        stuck_ = true;
        changed_.notify_all();
    }

    std::function<bool()> begin_another_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<std::uintptr_t, Past> told_;
    Version version_ = 0;
    unsigned running_ = 0, waiting_ = 0;
    bool stuck_ = false, abandoned_ = false;
};

}  // namespace emulator
