// Products of a warpgroup: what they read, when they are done, and the registers that they take.
#include "products.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

#include "block.hpp"
#include "swizzle.hpp"

namespace emulator {

namespace {

constexpr int kWarpRows = 16, kMaxColumns = 256;
// wgmma's kinds of swizzle that kernels use.
enum Swizzle { kNoSwizzle = 0, kSwizzle128 = 1, kSwizzle32 = 3 };

// An operand in shared memory, as a description says (PTX ISA, "Matrix Descriptor Format" of wgmma
// and "Strides"). Its rows, or columns where it is B, run along `across`; 32 bytes of elements
// along the depth.
class Operand {
  public:
    Operand(std::uint64_t description, bool transposed, int across, int element_bytes)
        : start_(field(description, 0) * 16),
          panel_stride_(field(description, 16) * 16),
          eights_stride_(field(description, 32) * 16),
          base_offset_(description >> 49 & 7),
          swizzle_(description >> 62),
          transposed_(transposed),
          across_(across),
          element_bytes_(element_bytes) {}

    std::string error(std::size_t shared_bytes) const {
        const bool swizzled = swizzle_ == kSwizzle128 || swizzle_ == kSwizzle32;
        if (!swizzled && (swizzle_ != kNoSwizzle || transposed_)) {
            return "an operand with a swizzle that no kernel uses";
        }
        if (transposed_ && element_bytes_ == 1) return "an operand of bytes that is transposed";
        if (swizzled && start_ / kSwizzleRowBytes % (row_bytes() / kChunkBytes) != base_offset_) {
            return "an operand that begins " + std::to_string(start_ % kSwizzleBytes) +
                   " bytes past a multiple of " + std::to_string(kSwizzleBytes);
        }
        for (const std::uint32_t chunk : chunks()) {
            if (chunk + kChunkBytes > shared_bytes) {
                return "an operand that reads byte " + std::to_string(chunk) +
                       " of shared memory, which has " + std::to_string(shared_bytes);
            }
        }
        return "";
    }

    // The 16-byte pieces that it consists of.
    std::vector<std::uint32_t> chunks() const {
        const int elements = static_cast<int>(kChunkBytes) / element_bytes_;
        std::vector<std::uint32_t> all;
        for (int i = 0; i < across_; i += transposed_ ? elements : 1) {
            for (int k = 0; k < kDepthBytes / element_bytes_; k += transposed_ ? 1 : elements) {
                all.push_back(offset(i, k));
            }
        }
        return all;
    }

    std::uint16_t at(int i, int k) const {
        std::uint16_t bits = 0;
        std::memcpy(&bits, shared_memory + offset(i, k), element_bytes_);
        return bits;
    }

  private:
    static std::size_t field(std::uint64_t description, int first_bit) {
        return description >> first_bit & 0x3fff;
    }

    std::size_t offset(int i, int k) const {
        const std::size_t slow = transposed_ ? k : i;
        const std::size_t fast = (transposed_ ? i : k) * element_bytes_;
        // What lies together: eight rows of a panel.
        const std::size_t width = row_bytes();
        const std::size_t place = start_ + fast / width * panel_stride_ +
                                  slow / kSwizzleRows * eights_stride_ +
                                  slow % kSwizzleRows * width + fast % width;
        return swizzled(place, width);
    }

    // Of a panel's rows, which without a swizzle are a chunk wide.
    std::size_t row_bytes() const {
        return swizzle_ == kSwizzle128  ? kSwizzleRowBytes
               : swizzle_ == kSwizzle32 ? 2 * kChunkBytes
                                        : kChunkBytes;
    }

    std::size_t start_, panel_stride_, eights_stride_, base_offset_;
    unsigned swizzle_;
    bool transposed_;
    int across_, element_bytes_;
};

Operand a_of(const Product& product) {
    return {product.a, product.a_transposed, kProductRows, product.element_bytes};
}
Operand b_of(const Product& product) {
    return {product.b, product.b_transposed, static_cast<int>(product.columns),
            product.element_bytes};
}

// Calls use(lane, register, row, column) for each register of a warp's fragment of d.
template <class Use>
void each_accumulator(unsigned columns, Use use) {
    for (int lane = 0; lane < 32; ++lane) {
        for (unsigned i = 0; i < columns / 2; ++i) {
            use(lane, i, lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
        }
    }
}

// The same for each element of a warp's fragment of a; `in_register` are in each, the first one
// low.
template <class Use>
void each_of_a(int in_register, Use use) {
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4 * in_register; ++i) {
            const int part = i / in_register;
            use(lane, i, lane / 4 + part % 2 * 8,
                (lane % 4 + part / 2 * 4) * in_register + i % in_register);
        }
    }
}

bool same_product(const Product& a, const Product& b) {
    return a.columns == b.columns && !a.a_registers == !b.a_registers && a.a == b.a && a.b == b.b &&
           a.a_transposed == b.a_transposed && a.b_transposed == b.b_transposed && a.add == b.add &&
           a.element_bytes == b.element_bytes && a.to_float == b.to_float;
}

}  // namespace

bool Accumulators::untouched() const {
    const auto* const now = reinterpret_cast<const unsigned char*>(registers);
    return std::all_of(now, now + bytes(), [](unsigned char byte) { return byte == 0xff; });
}

void Accumulators::spoil() const {
    std::memset(registers, 0xff, bytes());
}

Accumulators* Products::accumulators_of(const float* registers) {
    for (Accumulators& accumulators : accumulators_) {
        if (accumulators.registers == registers) return &accumulators;
    }
    return nullptr;
}

std::string Products::issue(const Product& product, std::uint32_t place) {
    if (!fenced_) return "a product with no wgmma.fence after the last group";
    const unsigned count = product.columns / 2, group = committed_ + 1;
    Accumulators* accumulators = accumulators_of(product.d);
    if (!accumulators) {
        accumulators_.push_back({product.d, {product.d, product.d + count}, group});
        accumulators = &accumulators_.back();
        accumulators->spoil();
    }
    if (accumulators->values.size() != count) {
        return "a product into accumulators that one of another shape works with";
    }
    accumulators->group = group;
    pending_.push_back({product, group, place});
    if (product.a_registers) {
        std::memcpy(pending_.back().product.a_values, product.a_registers, sizeof product.a_values);
    }
    return "";
}

bool Products::uses(std::uintptr_t address) const {
    for (const Accumulators& accumulators : accumulators_) {
        if (address - number(accumulators.registers) < accumulators.bytes()) return true;
    }
    for (const PendingProduct& pending : pending_) {
        const Product& product = pending.product;
        if (product.a_registers &&
            address - number(product.a_registers) < sizeof product.a_values) {
            return true;
        }
    }
    return false;
}

std::string Products::finish(Products* const (&lanes)[32], unsigned warp_in_group, unsigned group) {
    const std::vector<PendingProduct>& pending = lanes[0]->pending_;
    std::size_t done = 0;
    for (; done < pending.size() && pending[done].group <= group; ++done) {
        const Product& product = pending[done].product;
        const int depth = kDepthBytes / product.element_bytes;
        float a[kWarpRows][kDepthBytes], b[kDepthBytes][kMaxColumns];
        float d[kWarpRows][kMaxColumns] = {};
        float* values[32];
        for (int lane = 0; lane < 32; ++lane) {
            const Product& own = lanes[lane]->pending_[done].product;
            values[lane] = lanes[lane]->accumulators_of(own.d)->values.data();
            if (own.a_registers &&
                std::memcmp(own.a_registers, own.a_values, sizeof own.a_values) != 0) {
                return "registers of A were written before their product was waited for";
            }
        }
        if (product.a_registers) {
            const int in_register = 4 / product.element_bytes, bits = 8 * product.element_bytes;
            each_of_a(in_register, [&](int lane, int i, int row, int k) {
                const unsigned word = lanes[lane]->pending_[done].product.a_values[i / in_register];
                a[row][k] = product.to_float(word >> i % in_register * bits & ((1u << bits) - 1));
            });
        } else {
            const Operand operand = a_of(product);
            for (int row = 0; row < kWarpRows; ++row) {
                for (int k = 0; k < depth; ++k) {
                    a[row][k] = product.to_float(operand.at(warp_in_group * kWarpRows + row, k));
                }
            }
        }
        const Operand operand = b_of(product);
        for (int k = 0; k < depth; ++k) {
            for (unsigned col = 0; col < product.columns; ++col) {
                b[k][col] = product.to_float(operand.at(col, k));
            }
        }
        if (product.add) {
            each_accumulator(product.columns, [&](int lane, int i, int row, int col) {
                d[row][col] = values[lane][i];
            });
        }
        for (int row = 0; row < kWarpRows; ++row) {
            for (int k = 0; k < depth; ++k) {
                for (unsigned col = 0; col < product.columns; ++col) {
                    d[row][col] += a[row][k] * b[k][col];
                }
            }
        }
        each_accumulator(product.columns,
                         [&](int lane, int i, int row, int col) { values[lane][i] = d[row][col]; });
    }
    for (Products* const lane : lanes) {
        lane->pending_.erase(lane->pending_.begin(), lane->pending_.begin() + done);
        const auto give_back = [&](const Accumulators& accumulators) {
            if (accumulators.group > group || !accumulators.untouched()) return false;
            std::copy(accumulators.values.begin(), accumulators.values.end(),
                      accumulators.registers);
            return true;
        };
        auto& all = lane->accumulators_;
        all.erase(std::remove_if(all.begin(), all.end(), give_back), all.end());
        for (const Accumulators& accumulators : all) {
            if (accumulators.group <= group) {
                return "accumulators were written before their product was waited for";
            }
        }
    }
    return "";
}

void Block::issue(const Product& product, const void* return_to) {
    const std::string error = running_->products.issue(product, place_of(return_to));
    if (!error.empty()) fail(error);
}

void Block::fence_products() {
    running_->products.fence();
}

void Block::commit_products(const char* file, int line) {
    meet({Meeting::Of::kWarpgroup, "wgmma.commit_group", file, line});
    // The first thread goes on before any other has changed anything.
    if (running_->index % kWarpgroup == 0) read_operands();
    running_->products.commit();
}

// Notes what the group of products that ends now reads: for all of the warpgroup, and with what all
// of its threads know of the past.
void Block::read_operands() {
    const unsigned group = running_->products.committed() + 1, first = running_->index;
    const auto& mine = running_->products.pending();
    Past past = running_->past;
    for (unsigned i = 1; i < kWarpgroup; ++i) {
        const Thread& thread = threads_[first + i];
        const auto& theirs = thread.products.pending();
        past.meet(thread.past);
        const bool same = std::equal(mine.begin(), mine.end(), theirs.begin(), theirs.end(),
                                     [](const PendingProduct& a, const PendingProduct& b) {
                                         return same_product(a.product, b.product);
                                     });
        if (!same) fail("thread " + std::to_string(thread.index) + " issues another product");
    }
    for (const PendingProduct& pending : mine) {
        if (pending.group != group) continue;
        std::vector<Operand> operands{b_of(pending.product)};
        if (!pending.product.a_registers) operands.push_back(a_of(pending.product));
        Access now =
            access_by(Access::By::kProduct, product_agent(first / 32), group, first, pending.place);
        now.members = (1u << kWarpgroup / 32) - 1;  // each warp waits for its own part
        for (const Operand& operand : operands) {
            const std::string error = operand.error(shared_.bytes);
            if (!error.empty()) fail(error);
            if (!launch_.checked) continue;
            for (const std::uint32_t chunk : operand.chunks()) {
                note(now, past, shared_memory + chunk, kChunkBytes);
            }
        }
    }
}

namespace {

struct ProductWait {
    Products* products;
    unsigned warp_in_group, group;
};

void finish_products(const void* const* in, void* const* out, unsigned) {
    Products* lanes[32];
    for (int lane = 0; lane < 32; ++lane) {
        lanes[lane] = static_cast<const ProductWait*>(in[lane])->products;
    }
    const auto& wait = *static_cast<const ProductWait*>(in[0]);
    const std::string error = Products::finish(lanes, wait.warp_in_group, wait.group);
    for (int lane = 0; lane < 32; ++lane) *static_cast<std::string*>(out[lane]) = error;
}

}  // namespace

void Block::wait_products(unsigned pending_groups, const char* file, int line) {
    Thread& self = *running_;
    const unsigned warp = self.index / 32, committed = self.products.committed();
    const unsigned done = committed - std::min(committed, pending_groups);
    const ProductWait wait{&self.products, warp % (kWarpgroup / 32), done};
    std::string error;
    meet({Meeting::Of::kWarp, "wgmma.wait_group", file, line, &wait, &error, ~0u, finish_products});
    if (!error.empty()) fail(error);
    self.past.seen.raise(product_agent(warp), done);
}

void Block::set_registers(const Meeting& meeting, bool more) {
    const unsigned now = warp_registers_[running_->index / 32];
    if (more ? meeting.registers < now : meeting.registers > now) {
        fail(std::string(meeting.operation) + " to " + std::to_string(meeting.registers) +
             " registers by a thread that has " + std::to_string(now));
    }
    meet(meeting);
}

// Gives each thread of a warpgroup the registers that it asks for; false if others have too many.
bool Block::share_registers(unsigned first) {
    const unsigned wanted = threads_[first].meeting.registers;
    const auto begin = warp_registers_.begin() + first / 32, end = begin + kWarpgroup / 32;
    const unsigned have = std::accumulate(warp_registers_.begin(), warp_registers_.end(), 0u) -
                          std::accumulate(begin, end, 0u) + wanted * (kWarpgroup / 32);
    if (have > registers_at_start() * warp_registers_.size()) return false;
    std::fill(begin, end, wanted);
    return true;
}

}  // namespace emulator
