// What the loader calls.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "block.hpp"
#include "places.hpp"
#include "signals.hpp"

namespace {

using emulator::Block;
using emulator::Launch;
using emulator::Signals;

struct Buffer {
    const char* name;
    std::uintptr_t address;
    std::uint64_t bytes;
    std::int32_t writeable;
    std::uint32_t element_bytes;
};

// The report of the first block that fails, or "". Blocks are begun in order and those before a
// failing one are finished, so that which one is reported does not depend on the number of threads.
std::string run_blocks(Launch& launch, unsigned threads) {
    std::atomic<unsigned> next = 0;
    unsigned failed = launch.blocks;
    std::string report;
    std::deque<std::thread> workers;
    std::function<void()> work;
    Signals signals([&] {
        if (next >= launch.blocks) return false;
        workers.emplace_back(work);
        return true;
    });
    launch.signals = &signals;
    work = [&] {
        Block block(launch);
        for (unsigned index; (index = next++) < launch.blocks;) {
            std::string error = block.run(index);
            if (error.empty()) continue;
            next = launch.blocks;
            signals.exclusively([&] {
                if (index >= failed) return;
                failed = index;
                report = std::move(error);
            });
            signals.abandon();
            break;
        }
        signals.finish();
    };
    for (unsigned i = 0; i < threads; ++i) {
        signals.begin();
        signals.exclusively([&] { workers.emplace_back(work); });
    }
    for (std::size_t i = 0;; ++i) {
        std::thread* worker = nullptr;
        signals.exclusively([&] {
            if (i < workers.size()) worker = &workers[i];
        });
        if (!worker) return report;
        worker->join();
    }
}

}  // namespace

// Null, or what went wrong: valid until this thread's next launch.
extern "C" const char* emulator_launch(const emulator::Entry* entry, const char* kernel,
                                       unsigned blocks, unsigned block_threads, unsigned cluster,
                                       unsigned blocks_per_sm, std::uint64_t shared_bytes,
                                       const void* params, const Buffer* buffers,
                                       unsigned buffer_count, int checked, std::uint64_t max_steps,
                                       unsigned threads) {
    alignas(64) unsigned char aligned_params[emulator::kMaxParamsBytes];
    std::memcpy(aligned_params, params, entry->params_bytes);
    const auto module = emulator::module_of(reinterpret_cast<std::uintptr_t>(entry->call));
    Launch launch{kernel,        entry->call, entry->shared_memory, aligned_params, blocks,
                  block_threads, cluster,     blocks_per_sm,        shared_bytes,   checked != 0,
                  max_steps,     module};
    launch.mailboxes.resize(blocks);
    for (unsigned i = 0; i < buffer_count; ++i) {
        const Buffer& buffer = buffers[i];
        auto& region = launch.global.emplace_back(buffer.name, buffer.address, buffer.bytes,
                                                  buffer.writeable != 0);
        if (checked && buffer.writeable) region.start_history(buffer.element_bytes);
    }
    static thread_local std::string report;
    report = run_blocks(launch, threads);
    return report.empty() ? nullptr : report.c_str();
}
