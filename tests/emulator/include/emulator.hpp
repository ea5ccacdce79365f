// What the runtime offers to the built-ins and to the twins of ptx_*.cuh.
#pragma once

// For code that runs beside kernels: what it touches in memory is not looked at.
#define EMULATOR_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))
// As last parameters of a function: where it is called.
#define EMULATOR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace emulator {

// Waits until all threads of the block are at this barrier; how many of them say aye.
unsigned sync_block(const char* operation, bool aye, const char* file, int line);

// Waits until all lanes in the mask have called the same operation with the same mask. Then
// combine(in, out, lanes), if there is one, runs once for all: it has what each of those lanes
// passed, by lane.
using Combine = void (*)(const void* const* in, void* const* out, unsigned lanes);
void sync_warp(const char* operation, unsigned mask, const void* in, void* out, Combine combine,
               const char* file, int line);

// As sync_warp; and what the lanes did in memory before comes before what any of them does after.
void sync_warp_memory(unsigned mask, const char* file, int line);

[[noreturn]] void fail(const char* message);
unsigned lane();

int atomic_add(int* address, int value);
unsigned atomic_add(unsigned* address, unsigned value);
unsigned long long atomic_add(unsigned long long* address, unsigned long long value);
float atomic_add(float* address, float value);
double atomic_add(double* address, double value);

// A read by an instruction that takes nothing but shared memory, at a multiple of its size.
void read_shared(const void* address, unsigned bytes);

// A copy of `valid` bytes and zeros after them into shared memory. Until the calling thread waits
// for it the destination holds NaN, and touching it is a race.
void copy_async(void* to, const void* from, unsigned bytes, unsigned valid);
// Waits for all copies of the calling thread.
void wait_copies();

// How the loader calls a kernel whose parameter it has as bytes.
constexpr unsigned kMaxParamsBytes = 4096;
struct Entry {
    void (*call)(const void* params);
    unsigned params_bytes;
};

template <class Params, void (*kernel)(Params)>
EMULATOR_UNCHECKED void call(const void* params) {
    kernel(*static_cast<const Params*>(params));
}

template <auto kernel>
struct EntryOf;
template <class Params, void (*kernel)(Params)>
struct EntryOf<kernel> {
    static_assert(sizeof(Params) <= kMaxParamsBytes, "CUDA passes at most 4096 bytes");
    static constexpr Entry value{call<Params, kernel>, sizeof(Params)};
};

}  // namespace emulator

#define EMULATOR_ENTRY(kernel)                                                                  \
    extern "C" __attribute__((visibility("default"))) const emulator::Entry entry_of_##kernel = \
        emulator::EntryOf<kernel>::value;
