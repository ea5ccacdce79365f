// Barriers at which threads arrive without waiting, or wait without arriving.
#pragma once

#include <cstdint>
#include <string>

#include "clock.hpp"

namespace emulator {

// An mbarrier. A phase ends when all threads have arrived and all announced bytes are there.
struct SharedBarrier {
    std::uint64_t at;  // the byte of shared memory
    // The agent for what copies bring: its time is the number of phases that have ended.
    unsigned agent;
    unsigned arrivals;  // in each phase
    unsigned initializer;
    bool known_to_copies = false;

    unsigned missing = arrivals;  // of the arrivals of this phase
    long long bytes = 0;          // announced, but not there yet
    unsigned phase = 0;
    // What comes before the end of this phase, and of the last one: in this block, and for those
    // who wait for the partner too.
    Past arriving{}, arrived{};
    Past partner_arriving{}, partner_arrived{};

    // Whether the last phase that ended is of this parity, as the one before the first counts.
    bool ended(unsigned parity) const { return (phase & 1) != parity; }
    bool complete() const { return missing == 0 && bytes == 0; }

    void end_phase() {
        arrived = arriving;
        partner_arrived = partner_arriving;
        missing = arrivals;
        ++phase;
    }

    std::string describe() const;
};

// A numbered barrier of a part of a block, in hardware.
struct NamedBarrier {
    unsigned threads = 0;  // as who arrived first said
    unsigned arrived = 0;
    unsigned ayes = 0;  // votes
    Past arriving{};
};
constexpr unsigned kNamedBarriers = 16;

}  // namespace emulator
