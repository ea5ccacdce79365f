// A function on a stack of its own that can be left in the middle and resumed.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

namespace emulator {

// Room for a fiber's stack. It is kept for the next one: to map it anew for each thread of each
// launch would take as long as many a kernel.
class Stack {
  public:
    static constexpr std::size_t kBytes = 256 * 1024;

    Stack() : begin_(take()) {}
    Stack(const Stack&) = delete;
    ~Stack() {
        const std::lock_guard guard(mutex_);
        unused_.push_back(begin_);
    }

    unsigned char* begin() const { return begin_; }

    bool contains(std::uintptr_t address) const {
        return address - reinterpret_cast<std::uintptr_t>(begin_) < kBytes;
    }

  private:
    static constexpr std::size_t kGuardBytes = 64 * 1024;  // of whole pages on any machine

    static unsigned char* take() {
        const std::lock_guard guard(mutex_);
        if (unused_.empty()) return map();
        unsigned char* const begin = unused_.back();
        unused_.pop_back();
        return begin;
    }

    static unsigned char* map() {
        void* const memory = mmap(nullptr, kGuardBytes + kBytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        mprotect(memory, kGuardBytes, PROT_NONE);  // a stack that overflows must not go unnoticed
        return static_cast<unsigned char*>(memory) + kGuardBytes;
    }

    // Of all threads of the operating system.
    inline static std::mutex mutex_;
    inline static std::vector<unsigned char*> unused_;

    unsigned char* const begin_;
};

// ucontext makes the stack, but changes the signal mask, a system call, on every switch. _longjmp
// does not, and can go to another stack just as well.
class Fiber {
  public:
    // main must never return: it suspends when it is done.
    Fiber(void (*main)(void*), void* argument) : main_(main), argument_(argument) {
        getcontext(&start_);
        start_.uc_stack.ss_sp = stack_.begin();
        start_.uc_stack.ss_size = Stack::kBytes;
        start_.uc_link = nullptr;
        const auto self = reinterpret_cast<std::uintptr_t>(this);
        makecontext(&start_, reinterpret_cast<void (*)()>(enter), 2, unsigned(self >> 32),
                    unsigned(self));
    }
    Fiber(const Fiber&) = delete;

    // Runs the fiber until it suspends.
    void resume() {
        if (_setjmp(resumer_) != 0) return;
        if (started_) _longjmp(here_, 1);
        started_ = true;
        setcontext(&start_);
    }

    // Called on the fiber: goes back to who resumed it.
    void suspend() {
        frame_ = __builtin_frame_address(0);
        if (_setjmp(here_) == 0) _longjmp(resumer_, 1);
    }

    bool has_on_stack(std::uintptr_t address) const { return stack_.contains(address); }

    // Calls use(address) for what each function on the stack of the suspended fiber will do next,
    // the innermost first. Relies on -fno-omit-frame-pointer.
    template <class Use>
    void walk_stack(Use use) const {
        auto frame = static_cast<const std::uintptr_t*>(frame_);
        while (has_on_stack(reinterpret_cast<std::uintptr_t>(frame))) {
            use(frame[1]);
            frame = reinterpret_cast<const std::uintptr_t*>(frame[0]);
        }
    }

  private:
    // makecontext passes on nothing but int.
    static void enter(unsigned high, unsigned low) {
        auto* const self = reinterpret_cast<Fiber*>(std::uintptr_t(high) << 32 | low);
        self->main_(self->argument_);
        __builtin_unreachable();
    }

    void (*main_)(void*);
    void* argument_;
    Stack stack_;
    bool started_ = false;
    const void* frame_ = nullptr;
    ucontext_t start_;
    jmp_buf here_, resumer_;
};

}  // namespace emulator
