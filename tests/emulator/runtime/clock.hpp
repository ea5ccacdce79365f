// What of a block's past a thread may count on: vector clocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace emulator {

// How far each agent of a block has come, as far as is known. Agents are the threads, whose time
// goes on whenever they tell others what they did, and what works for them meanwhile: see Block.
class Clock {
  public:
    std::uint32_t at(unsigned agent) const { return agent < times_.size() ? times_[agent] : 0; }

    void raise(unsigned agent, std::uint32_t time) {
        grow(agent + 1);
        times_[agent] = std::max(times_[agent], time);
    }

    bool operator==(const Clock& other) const { return times_ == other.times_; }

    // What one or the other knows.
    void join(const Clock& other) {
        grow(other.times_.size());
        for (std::size_t i = 0; i < other.times_.size(); ++i) {
            times_[i] = std::max(times_[i], other.times_[i]);
        }
    }

    // What both know.
    void meet(const Clock& other) {
        times_.resize(std::min(times_.size(), other.times_.size()));
        for (std::size_t i = 0; i < times_.size(); ++i) {
            times_[i] = std::min(times_[i], other.times_[i]);
        }
    }

  private:
    void grow(std::size_t agents) {
        if (agents > times_.size()) times_.resize(agents);
    }

    std::vector<std::uint32_t> times_;
};

// What comes before a moment. Wgmma and the copy engine reach memory by another way, the
// asynchronous proxy: of what threads wrote, they see what a proxy fence came after.
struct Past {
    Clock seen, fenced;
    std::map<unsigned, Clock>
        others;  // of other blocks, by block: what they released and this acquired

    void join(const Past& other) {
        seen.join(other.seen);
        fenced.join(other.fenced);
        for (const auto& [block, clock] : other.others) others[block].join(clock);
    }
    void meet(const Past& other) {
        seen.meet(other.seen);
        fenced.meet(other.fenced);
        for (auto& [block, clock] : others) {
            const auto found = other.others.find(block);
            clock.meet(found == other.others.end() ? Clock{} : found->second);
        }
    }
    void clear() { *this = {}; }
};

}  // namespace emulator
