// The memory that a kernel may touch, and what happened to it during the launch.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "history.hpp"

namespace emulator {

// Adds to memory of all blocks; the old value.
template <class T>
T add_atomically(T* address, T value) {
    T old = *address, sum;
    do {
        sum = old + value;
    } while (
        !__atomic_compare_exchange(address, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

inline std::uintptr_t number(const void* address) {
    return reinterpret_cast<std::uintptr_t>(address);
}

// For a few instructions. There may be more threads than cores: who waits lets others go on.
class Lock {
  public:
    void lock() {
        while (taken_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    void unlock() { taken_.clear(std::memory_order_release); }

  private:
    std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
};

class Region {
  public:
    Region(std::string name, std::uintptr_t begin, std::size_t bytes, bool writeable)
        : name(std::move(name)), begin(begin), bytes(bytes), writeable(writeable) {}

    const std::string name;
    const std::uintptr_t begin;
    const std::size_t bytes;
    const bool writeable;

    bool contains(std::uintptr_t address) const { return address - begin < bytes; }

    // How many bytes an address lies before the region or past its end.
    std::size_t distance(std::uintptr_t address) const {
        if (contains(address)) return 0;
        return address < begin ? begin - address : address - (begin + bytes);
    }

    // From now on races are found. Nobody has read or written anything yet. Threads may own
    // neighbouring elements, of `element_bytes` at least.
    void start_history(std::size_t element_bytes = kMostGranule) {
        granule_ = std::min(element_bytes, kMostGranule);
        histories_ = std::make_unique<History[]>((bytes + granule_ - 1) / granule_);
    }

    // Calls use(history) for each part of an access that lies inside, until one call returns true.
    template <class Use>
    void each_history(std::uintptr_t address, std::size_t size, Use use) {
        if (!histories_) return;
        const std::size_t last = (address - begin + size - 1) / granule_;
        for (std::size_t i = (address - begin) / granule_; i <= last;) {
            const std::lock_guard guard(locks_[i / kLocked % kLocks]);
            for (const std::size_t end = std::min(last, i | (kLocked - 1)); i <= end; ++i) {
                if (use(histories_[i])) return;
            }
        }
    }

  private:
    static constexpr std::size_t kMostGranule = 2;  // there may be two elements in larger ones
    // Histories in a row that share a lock, and locks: blocks on several threads seldom need the
    // same one.
    static constexpr std::size_t kLocked = 1024, kLocks = 64;

    std::size_t granule_ = kMostGranule;  // bytes that share a history
    std::unique_ptr<History[]> histories_;
    std::array<Lock, kLocks> locks_;
};

}  // namespace emulator
