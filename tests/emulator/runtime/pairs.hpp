// What the two blocks of a cluster, partners, tell each other.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "clock.hpp"
#include "signals.hpp"

namespace emulator {

// What a thread of a block does in its partner.
struct Deed {
    unsigned thread;
    std::uint32_t time;   // of the thread
    std::uint32_t place;  // in the code
    unsigned barrier;     // the byte of the partner's shared memory
};

// Sixteen bytes on their way.
struct Send {
    Deed deed;
    unsigned to;  // the byte of the partner's shared memory
    float values[4];
    // The agent that reads them, at which of its times, if it is not the thread.
    unsigned reader = 0;
    std::uint32_t read = 0;
};
// Those of threads that know the same of the partner.
struct Sends {
    Clock known;
    std::vector<Send> all;
};

// `told` is what comes before it, as the partner counts: its own agents are seen, ours are others.
struct Arrival {
    Deed deed;
    Past told;
};

// What the copy engine copies to the partner for a thread: an agent, whose time is the number of
// copies.
struct PartnerCopies {
    unsigned agent = 0;
    std::uint32_t count = 0;
};

struct Mail {
    std::vector<Sends> sends;
    std::vector<Arrival> arrivals;
    std::vector<Past> syncs;  // what comes before all threads of the block were at pair_sync
};

// Of a block. Only for use within Signals::exclusively.
struct Mailbox {
    Mail mail;
    bool in_use = false, ended = false;  // as the block is
};

// What a block has to do with its partner.
struct Pair {
    bool in_use = false;
    // When it last looked into its mailbox.
    Signals::Version version = 0;
    bool partner_ended = false;

    Mail out;  // not posted yet
    std::deque<Sends> under_way;
    std::deque<Past> syncs;  // of the partner, that this block has not met
    bool synced = false;     // whether all threads are at pair_sync and the partner knows
    Past at_sync;

    // What came from the partner last: by the agent of the barrier, for which it is a phase; by
    // thread.
    std::map<unsigned, Deed> landed, arrived;
};

}  // namespace emulator
