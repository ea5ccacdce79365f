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
unsigned atomic_max(unsigned* address, unsigned value);
// Each element by itself.
void atomic_add_vector(float* address, const float (&values)[4]);
// The old value; the new one is one more, or 0 after `last`.
unsigned atomic_increment(unsigned* address, unsigned last);

// A read or write by an instruction that takes nothing but shared memory, at a multiple of its
// size.
void read_shared(const void* address, unsigned bytes);
void write_shared(void* address, unsigned bytes);

// A copy of `valid` bytes and zeros after them into shared memory. Until the calling thread waits
// for it the destination holds NaN, and touching it is a race.
void copy_async(void* to, const void* from, unsigned bytes, unsigned valid);
// Ends a group: the calling thread's copies that are in none yet.
void commit_copies();
// Waits for the calling thread's copies but those of its last groups.
void wait_copies(unsigned pending_groups);

// The offset of an address in shared memory.
unsigned shared_address(const void* address);

// Barriers in shared memory (mbarrier).
void barrier_init(const void* barrier, unsigned arrivals);
void barrier_init_fence();
void barrier_arrive(const void* barrier, unsigned announced_bytes);
void barrier_wait(const void* barrier, unsigned parity, const char* file, int line);

// Barrier `id` of a part of the block: arrives, and waits too or goes on.
void named_barrier(const char* operation, unsigned id, unsigned threads, bool waits,
                   const char* file, int line);

// The same for threads that vote and wait; returns how many of them say aye.
unsigned vote_at_named_barrier(const char* operation, unsigned id, unsigned threads, bool aye,
                               const char* file, int line);

// What the calling thread knows to be written, wgmma and the copy engine see from now on.
void proxy_fence();

// Starts the copy of a box of a tensor to shared memory. It is there as late as it can be: when all
// threads wait. Until then the destination holds NaN, and touching it is a race.
void copy_box(void* to, const void* map, const void* barrier, const int (&at)[5], int axes);
// The same for contiguous bytes.
void copy_bytes(void* to, const void* from, unsigned bytes, const void* barrier);
// Starts the copy of a box from shared memory. It reads when it is waited for, and until then
// writing its source is a race.
void store_box(const void* map, const void* from, const int (&at)[5], int axes);
// The same for contiguous floats, which are added to what is there.
void add_floats(float* to, const float* from, unsigned bytes);
void commit_stores();
// They have read shared memory.
void wait_stores_read();
// They are complete. Until then, or the thread's end, what they add is not there, and the thread
// may not signal (add_release).
void wait_stores();

// Between blocks: what comes before an addition comes before what follows a load that sees it. A
// thread that loads the same value again waits until any block has added something.
unsigned load_acquire(const unsigned* address, const char* file, int line);
void add_release(unsigned* address, unsigned value);

// Partners, blocks 2i and 2i + 1, run at the same time.
unsigned rank_in_pair();
// Waits until all threads of both are here.
void pair_sync(const char* file, int line);
// Arrives at the barrier that lies at the same place in the partner's shared memory.
void barrier_arrive_at_partner(const void* barrier);
// Starts to store floats at the same place there; their bytes arrive on the partner's barrier. They
// are there as late as they can be: when all threads of the partner wait.
void send_to_partner(float* to, const float (&four)[4], const void* barrier);
// The same for bytes of shared memory, which the copy engine reads. Nothing here says when it has,
// but for the partner's barrier.
void copy_to_partner(const void* from, unsigned bytes, const void* barrier);
// As barrier_wait; and what comes before the partner's arrivals, or is what it sent, comes before
// what follows. After barrier_wait that is chance.
void barrier_wait_for_partner(const void* barrier, unsigned parity, const char* file, int line);

// A product of a warpgroup: d = a b or d += a b in float32.
struct Product {
    float* d;
    unsigned columns;
    const unsigned* a_registers;  // null: `a` describes shared memory
    unsigned long long a, b;
    bool a_transposed, b_transposed, add;
    int element_bytes;  // of a and b
    float (*to_float)(unsigned short);
    unsigned a_values[4];
};
void wgmma_issue(const Product& product);
void wgmma_fence();
void wgmma_commit(const char* file, int line);
void wgmma_wait(unsigned pending_groups, const char* file, int line);

// Gives up registers, or waits until there are enough, so that a thread has `count`.
void set_registers(const char* operation, unsigned count, bool more, const char* file, int line);

// How the loader calls a kernel whose parameter it has as bytes.
constexpr unsigned kMaxParamsBytes = 4096;
struct Entry {
    void (*call)(const void* params);
    unsigned char* (*shared_memory)();
    unsigned params_bytes;
};

// The module's, for each thread of the operating system.
unsigned char* find_shared_memory();

template <class Params, void (*kernel)(Params)>
EMULATOR_UNCHECKED void call(const void* params) {
    kernel(*static_cast<const Params*>(params));
}

template <auto kernel>
struct EntryOf;
template <class Params, void (*kernel)(Params)>
struct EntryOf<kernel> {
    static_assert(sizeof(Params) <= kMaxParamsBytes, "CUDA passes at most 4096 bytes");
    static constexpr Entry value{call<Params, kernel>, find_shared_memory, sizeof(Params)};
};

}  // namespace emulator

#define EMULATOR_ENTRY(kernel)                                                                  \
    extern "C" __attribute__((visibility("default"))) const emulator::Entry entry_of_##kernel = \
        emulator::EntryOf<kernel>::value;
