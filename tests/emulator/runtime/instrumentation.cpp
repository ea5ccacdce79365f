// What the compiler calls in a kernel that is compiled with -fsanitize=thread,undefined and
// -fsanitize-coverage: of the sanitizers only the instrumentation is used, not their own runtime
// libraries.
#include <cstddef>
#include <cstdint>
#include <string>

#include "block.hpp"

using emulator::Access;
using emulator::Block;

// Before each access to memory that another thread might see.
#define CHECK(kind, address, size) \
    Block::current().check(kind, address, size, __builtin_return_address(0))
#define DEFINE_CHECKS(size)                         \
    void __tsan_read##size(void* address) {         \
        CHECK(Access::Kind::kRead, address, size);  \
    }                                               \
    void __tsan_write##size(void* address) {        \
        CHECK(Access::Kind::kWrite, address, size); \
    }

extern "C" {
DEFINE_CHECKS(1)
DEFINE_CHECKS(2)
DEFINE_CHECKS(4)
DEFINE_CHECKS(8)
DEFINE_CHECKS(16)
void __tsan_read_range(void* address, std::size_t size) {
    CHECK(Access::Kind::kRead, address, size);
}
void __tsan_write_range(void* address, std::size_t size) {
    CHECK(Access::Kind::kWrite, address, size);
}
// At the start of each piece of code without a jump; also while the module is loaded.
void __sanitizer_cov_trace_pc() {
    Block::count_step();
}
void __tsan_init() {}

// Where the language itself forbids what a kernel is about to do. All begin with the place in the
// source, which reports take from the stack instead.
struct SourceLocation {
    const char* file;
    std::uint32_t line, column;
};
struct TypeDescriptor {
    std::uint16_t kind, info;
    char name[];
};
struct TypeMismatch {
    SourceLocation location;
    const TypeDescriptor& type;
    unsigned char log2_alignment, access;
};
[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data,
                                                        std::uintptr_t address) {
    const auto alignment = std::uintptr_t(1) << data->log2_alignment;
    Block::current().fail("misaligned address of " + std::string(data->type.name) + ": " +
                          std::to_string(address % alignment) + " bytes past a multiple of " +
                          std::to_string(alignment));
}
struct OutOfBounds {
    SourceLocation location;
    const TypeDescriptor &array, &index;
};
[[noreturn]] void __ubsan_handle_out_of_bounds_abort(OutOfBounds* data, std::uintptr_t index) {
    Block::current().fail("index " + std::to_string(static_cast<std::intptr_t>(index)) +
                          " out of bounds for " + data->array.name);
}
#define DEFINE_HANDLER(name, message)                   \
    [[noreturn]] void __ubsan_handle_##name##_abort() { \
        Block::current().fail(message);                 \
    }
DEFINE_HANDLER(add_overflow, "integer overflow in an addition")
DEFINE_HANDLER(sub_overflow, "integer overflow in a subtraction")
DEFINE_HANDLER(mul_overflow, "integer overflow in a multiplication")
DEFINE_HANDLER(negate_overflow, "integer overflow in a negation")
DEFINE_HANDLER(divrem_overflow, "integer division by zero, or overflow in one")
DEFINE_HANDLER(shift_out_of_bounds, "shift by a negative number of bits, or by too many")
}
