// A thread's share of its warpgroup's products (wgmma).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "emulator.hpp"

namespace emulator {

constexpr unsigned kWarpgroup = 128;
constexpr int kProductRows = 64, kDepthBytes = 32;

struct PendingProduct {
    Product product;
    unsigned group;
    std::uint32_t place;
};

// Accumulators hold nothing to be relied on until they are waited for: meanwhile they are spoilt,
// and what they will be is kept here.
struct Accumulators {
    float* registers;
    std::vector<float> values;
    unsigned group;  // the last one of their products

    std::size_t bytes() const { return values.size() * sizeof(float); }
    bool untouched() const;
    void spoil() const;
};

class Products {
  public:
    // Empty, or why this product must not be issued now.
    std::string issue(const Product& product, std::uint32_t place);
    void fence() { fenced_ = true; }
    void commit() {
        ++committed_;
        fenced_ = false;
    }

    unsigned committed() const { return committed_; }
    const std::vector<PendingProduct>& pending() const { return pending_; }
    bool idle() const { return pending_.empty(); }
    // Whether no register is a product's.
    bool none() const { return accumulators_.empty() && pending_.empty(); }

    // Whether an address is of a register that a product works with.
    bool uses(std::uintptr_t address) const;

    // Does what all lanes of a warp share of the groups up to `group`. Empty, or what a lane did to
    // registers meanwhile.
    static std::string finish(Products* const (&lanes)[32], unsigned warp_in_group, unsigned group);

  private:
    Accumulators* accumulators_of(const float* registers);

    std::vector<PendingProduct> pending_;
    std::vector<Accumulators> accumulators_;
    unsigned committed_ = 0;
    bool fenced_ = false;
};

}  // namespace emulator
