// A thread pool for kernels that run on cores which other processes use too.
//
//   parallel(max_threads, [&](Team& team) {          the body runs on every thread that joins, the caller included
//       team.parallel_for(n, [&](int i) { .. });     a phase: each index is computed once, by some thread
//       team.parallel_ranges(n, min_size, [&](int a, int b) { .. });
//   });
//
// A phase ends when its indexes are done, not when every thread has arrived: nobody waits for a preempted thread unless
// it holds an index. A thread that arrives late passes through the finished phases without doing anything, so outside a
// phase the body may only compute local values, the same in every thread. An index is computed by the same instructions
// on any thread: results do not depend on the number of threads.
//
// Each thread starts with its own share of the indexes, so that undisturbed threads read the same weights step after
// step, and then steals indexes that other threads have not started. A thread that waits, within a call or for the next
// one, spins for some microseconds and then sleeps in the kernel; how long it spins between calls depends on whether
// other processes want the CPUs.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace mlflow_llm {

// Tell the core that the loop is only waiting.
inline void pause() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    asm volatile("yield");
#endif
}

constexpr int MAX_THREADS = 1024;
constexpr int RANGES_PER_THREAD = 4;  // other threads can steal at this granularity

// Spin time of helper threads between calls, in microseconds. Waking a sleeping thread costs a virtual machine a good
// part of a step, so with exclusive CPUs helpers spin for as long as the rest of a step takes.
inline std::atomic<int>& idle_spin_us() {
    static std::atomic<int> us{0};
    return us;
}

// A futex: its waiters spin first and then sleep. The two kinds of waiters are woken separately.
class Futex {
  public:
    using Clock = std::chrono::steady_clock;
    enum Waiter : uint32_t { HELPER = 1, CALLER = 2 };

    std::atomic<uint32_t> value{0};

    // Return once done(value) is true; `value` must be changed before wake() is called.
    template <class Done>
    void wait(Waiter waiter, Clock::duration spin, const Done& done) {
        if (done(value.load(std::memory_order_acquire))) return;
        if (spin.count() > 0) {
            const Clock::time_point end = Clock::now() + spin;
            do {
                for (int i = 0; i < 8; i++) {
                    pause();
                    if (done(value.load(std::memory_order_acquire))) return;
                }
            } while (Clock::now() < end);
        }
        sleepers.fetch_add(1);  // before `value` is read again: whoever changes it reads `sleepers` afterwards
        for (uint32_t seen; !done(seen = value.load());)
            syscall(SYS_futex, &value, FUTEX_WAIT_BITSET_PRIVATE, seen, nullptr, nullptr, waiter);
        sleepers.fetch_sub(1);
    }

    void wake(Waiter waiter) {
        if (sleepers.load()) syscall(SYS_futex, &value, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, nullptr, nullptr, waiter);
    }

  private:
    std::atomic<int> sleepers{0};
};

class Pool;

// One thread's view of a call. Without a pool it is the only thread.
struct Team {
    int thread = 0, threads = 1;
    Pool* pool = nullptr;
    uint32_t phase = 0;

    // Call work(i) for each i in [0, n) and return when all are done.
    template <class Work>
    void parallel_for(int n, const Work& work);

    // Call work(first, last) for ranges that partition [0, n), of at least `min_size` where n allows. All threads get
    // the same number of ranges.
    template <class Work>
    void parallel_ranges(int n, int min_size, const Work& work) {
        if (n <= 0) return;
        if (!pool) return work(0, n);
        const int max_count = std::min(threads * RANGES_PER_THREAD, n / std::max(min_size, 1));
        const int count = max_count > threads ? max_count / threads * threads : std::min(n, threads);
        parallel_for(count, [&](int i) { work(int(int64_t(n) * i / count), int(int64_t(n) * (i + 1) / count)); });
    }
};

// Helper threads and the call they work on. The pool serves one call at a time; a concurrent caller runs alone.
class Pool {
  public:
    Pool(int threads, int spin_us) : threads(threads), spin(std::chrono::microseconds(spin_us)), shares(threads) {}
    Pool(const Pool&) = delete;
    ~Pool() { end_helpers(); }

    // Change the number of threads, after the current call.
    void resize(int count, int spin_us) {
        while (busy.exchange(true, std::memory_order_acquire))
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        end_helpers();
        threads = count, spin = std::chrono::microseconds(spin_us), short_of_threads = false;
        std::vector<Share>(count).swap(shares);
        busy.store(false, std::memory_order_release);
    }

    template <class Body>
    void run(int max_threads, const Body& body) {
        if (max_threads <= 1 || busy.exchange(true, std::memory_order_acquire)) return run_alone(body);
        start_helpers();
        if (helpers.empty()) {
            busy.store(false, std::memory_order_release);
            return run_alone(body);
        }
        team = std::min({max_threads, threads, int(helpers.size()) + 1});
        job = &body;
        call = [](const void* job, Team& team) { (*static_cast<const Body*>(job))(team); };
        failed.store(false, std::memory_order_relaxed);
        first = phase.value.load(std::memory_order_relaxed);
        open_phase(first);
        gate.value.store(((gate.value.load(std::memory_order_relaxed) & ~(CALL_UNIT - 1)) + CALL_UNIT) | OPEN_BIT);
        gate.wake(Futex::HELPER);
        take_part(0);
        gate.value.fetch_and(~OPEN_BIT);
        // helpers still use the caller's memory
        gate.wait(Futex::CALLER, spin, [](uint32_t now) { return !(now & INSIDE_MASK); });
        std::exception_ptr thrown;
        std::swap(thrown, error);
        busy.store(false, std::memory_order_release);
        if (thrown) std::rethrow_exception(thrown);
    }

    // One thread's part of parallel_for(): a phase of n indexes.
    template <class Work>
    void run_phase(int thread, uint32_t number, int n, const Work& work) {
        if (phase.value.load(std::memory_order_acquire) != number) return;
        int done = 0;
        for (int k = 0; k < team; k++) {
            const int owner = thread + k < team ? thread + k : thread + k - team;
            const int from = share_begin(owner, n), size = share_begin(owner + 1, n) - from;
            for (int i; (i = claim(owner, number, size)) >= 0; done++) {
                if (failed.load(std::memory_order_relaxed)) continue;
                try {
                    work(from + i);
                } catch (...) {
                    fail();
                }
            }
        }
        if (done && finished.fetch_add(done, std::memory_order_acq_rel) + done == n) {
            finished.store(0, std::memory_order_relaxed);
            open_phase(number + 1);
            phase.value.store(number + 1);
            phase.wake(Futex::HELPER);
        } else {
            phase.wait(Futex::HELPER, spin, [=](uint32_t now) { return now != number; });
        }
    }

  private:
    // Layout of `gate`: the call's number, whether helpers may enter, how many are inside.
    static constexpr uint32_t INSIDE_MASK = 0x7ff, OPEN_BIT = 0x800, CALL_UNIT = 0x1000;
    static_assert(MAX_THREADS <= int(INSIDE_MASK));

    struct alignas(128) Share { std::atomic<uint64_t> next{0}; };  // phase << 32 | indexes of the share that are taken

    // Owned by the thread that has set `busy`.
    int threads;
    Futex::Clock::duration spin;
    std::vector<Share> shares;
    std::vector<std::thread> helpers;
    bool short_of_threads = false;  // the system gave fewer threads than requested
    std::atomic<bool> busy{false}, ending{false}, failed{false};
    std::exception_ptr error;
    // State of the current call.
    int team = 1;
    const void* job = nullptr;
    void (*call)(const void*, Team&) = nullptr;
    uint32_t first = 0;
    alignas(128) Futex gate;
    alignas(128) Futex phase;
    alignas(128) std::atomic<int> finished{0};

    template <class Body>
    static void run_alone(const Body& body) {
        Team team;
        body(team);
    }

    int share_begin(int thread, int n) const { return int((int64_t(n) * thread + team - 1) / team); }

    void open_phase(uint32_t number) {
        for (int i = 0; i < team; i++) shares[i].next.store(uint64_t(number) << 32, std::memory_order_relaxed);
    }

    // Claim the next index of a share; -1 if none is left or the phase is over.
    int claim(int owner, uint32_t number, int size) {
        std::atomic<uint64_t>& next = shares[owner].next;
        uint64_t seen = next.load(std::memory_order_relaxed);
        do {
            if (uint32_t(seen >> 32) != number || int64_t(uint32_t(seen)) >= size) return -1;
        } while (!next.compare_exchange_weak(seen, seen + 1, std::memory_order_relaxed));
        return int(uint32_t(seen));
    }

    void fail() {
        if (!failed.exchange(true)) error = std::current_exception();
    }

    void take_part(int thread) {
        Team part{thread, team, this, first};
        try {
            call(job, part);
        } catch (...) {
            fail();
        }
    }

    // Start as many helpers as the system allows; with fewer the result is slower, not wrong. Helpers block all
    // signals.
    void start_helpers() {
        if (int(helpers.size()) >= threads - 1 || short_of_threads) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            while (int(helpers.size()) < threads - 1)
                helpers.emplace_back([this, thread = int(helpers.size()) + 1] { help(thread); });
        } catch (const std::system_error&) {
            short_of_threads = true;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void end_helpers() {
        ending.store(true);
        gate.value.fetch_add(CALL_UNIT);
        gate.wake(Futex::HELPER);
        for (std::thread& helper : helpers) helper.join();
        helpers.clear();
        ending.store(false);
    }

    void help(int thread) {
        for (uint32_t seen = 0;;) {
            uint32_t now;
            gate.wait(Futex::HELPER, std::chrono::microseconds(idle_spin_us()), [&](uint32_t value) {
                now = value;
                return ending.load() || ((value & OPEN_BIT) && value / CALL_UNIT != seen);
            });
            if (ending.load()) return;
            while ((now & OPEN_BIT) && !gate.value.compare_exchange_weak(now, now + 1)) {}
            if (!(now & OPEN_BIT)) continue;  // the call ended before this thread arrived
            seen = now / CALL_UNIT;
            if (thread < team) take_part(thread);
            const uint32_t left = gate.value.fetch_sub(1) - 1;
            if (!(left & (INSIDE_MASK | OPEN_BIT))) gate.wake(Futex::CALLER);
        }
    }
};

template <class Work>
inline void Team::parallel_for(int n, const Work& work) {
    if (n <= 0) return;
    if (pool) return pool->run_phase(thread, phase++, n, work);
    for (int i = 0; i < n; i++) work(i);
}

// The process-wide pool. After fork() the child has none of its threads and creates a pool of its own on first use.
class ProcessPool {
  public:
    template <class Body>
    static void run(int max_threads, const Body& body) {
        Pool* pool = current().load(std::memory_order_acquire);
        if (!pool) pool = make();
        pool->run(max_threads, body);
    }

    // Set the number of threads of the next calls, and how long a waiting thread spins.
    static void configure(int threads, int spin_us) {
        configuration().store(int64_t(std::max(1, std::min(threads, MAX_THREADS))) << 32 | std::max(0, spin_us));
        if (Pool* pool = current().load(std::memory_order_acquire))
            pool->resize(configured_threads(), configured_spin_us());
    }

    static int configured_threads() { return int(configuration().load() >> 32); }

  private:
    static std::atomic<Pool*>& current() {
        static std::atomic<Pool*> pool{nullptr};  // never destroyed: threads may be running when the process exits
        return pool;
    }
    static std::atomic<int64_t>& configuration() {
        static std::atomic<int64_t> value{int64_t(1) << 32};
        return value;
    }
    static int configured_spin_us() { return int(configuration().load() & INT_MAX); }

    static Pool* make() {
        static const int registered = pthread_atfork(nullptr, nullptr, [] { current().store(nullptr); });
        (void)registered;
        Pool *mine = new Pool(configured_threads(), configured_spin_us()), *existing = nullptr;
        if (current().compare_exchange_strong(existing, mine)) return mine;
        delete mine;
        return existing;
    }
};

// Run `body` on at most `max_threads` threads.
template <class Body>
inline void parallel(int max_threads, const Body& body) {
    ProcessPool::run(max_threads, body);
}

template <class Work>
inline void parallel_for(int n, const Work& work) {
    parallel(n, [&](Team& team) { team.parallel_for(n, work); });
}

}  // namespace mlflow_llm
