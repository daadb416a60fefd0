// The threads that share the work of a call, made for cores that others use too.
//
//   parallel(most, [&](Team& team) {           run by every thread that comes, the caller among them
//       team.each(n, [&](int i) { .. });       a phase: each index once, by some thread
//       team.ranges(n, least, [&](int a, int b) { .. });
//   });
//
// A phase ends when its indexes are done, not when all threads have come: none waits for a thread that the system has
// taken off its core, unless it holds an index. A thread that comes late runs through the phases that are over without
// doing anything, so outside a phase a body only computes values of its own, the same in every thread. An index is
// always computed by the same instructions, on any thread: results do not depend on the number of threads.
//
// A thread begins with its own share of the indexes, so that alone on its cores it reads the same weights step after
// step, and then takes what others have not begun. Who waits, within a call or for the next one, spins for microseconds
// and then sleeps in the kernel; how long for the next one depends on whether others want the processors.
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

namespace mlt {

// Tells the core that a loop only waits.
inline void pause() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    asm volatile("yield");
#endif
}

constexpr int MOST_THREADS = 1024;
constexpr int CLAIMS = 4;  // ranges of a thread's share: what others can take of it

// For how long helpers spin between calls, in microseconds. Waking one costs a virtual machine as much as a good part of
// a step, so where the processors are ours they spin for as long as a step's other work takes.
inline std::atomic<int>& idle_spin_us() {
    static std::atomic<int> us{0};
    return us;
}

// A word that threads wait on: spinning at first, then asleep. Its waiters are of two kinds, woken apart.
class Word {
  public:
    using Clock = std::chrono::steady_clock;
    enum Waiter : uint32_t { HELPER = 1, CALLER = 2 };

    std::atomic<uint32_t> value{0};

    // Returns when done(value); `value` must be stored, or changed, before wake() is called.
    template <class Done>
    void wait(Waiter who, Clock::duration spin, const Done& done) {
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
        sleepers.fetch_add(1);  // before the value is read again: who changes it reads `sleepers` after
        for (uint32_t seen; !done(seen = value.load());)
            syscall(SYS_futex, &value, FUTEX_WAIT_BITSET_PRIVATE, seen, nullptr, nullptr, who);
        sleepers.fetch_sub(1);
    }

    void wake(Waiter who) {
        if (sleepers.load()) syscall(SYS_futex, &value, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, nullptr, nullptr, who);
    }

  private:
    std::atomic<int> sleepers{0};
};

class Pool;

// One thread's part in a call. Without a pool it is the only one.
struct Team {
    int thread = 0, threads = 1;
    Pool* pool = nullptr;
    uint32_t phase = 0;

    // Calls work(i) for each i below n; all are done on return.
    template <class Work>
    void each(int n, const Work& work);

    // Calls work(first, last) for ranges that make up [0, n), of `least` or more where there are as many. Every thread has
    // as many of them as the others.
    template <class Work>
    void ranges(int n, int least, const Work& work) {
        if (n <= 0) return;
        if (!pool) return work(0, n);
        const int most = std::min(threads * CLAIMS, n / std::max(least, 1));
        const int count = most > threads ? most / threads * threads : std::min(n, threads);
        each(count, [&](int i) { work(int(int64_t(n) * i / count), int(int64_t(n) * (i + 1) / count)); });
    }
};

// Helpers that wait for calls. One call at a time has them; a caller that comes meanwhile works alone.
class Pool {
  public:
    Pool(int threads, int spin_us) : threads(threads), spin(std::chrono::microseconds(spin_us)), shares(threads) {}
    Pool(const Pool&) = delete;
    ~Pool() { end_helpers(); }

    // Waits for the call under way.
    void resize(int count, int spin_us) {
        while (busy.exchange(true, std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::microseconds(50));
        end_helpers();
        threads = count, spin = std::chrono::microseconds(spin_us), refused = false;
        std::vector<Share>(count).swap(shares);
        busy.store(false, std::memory_order_release);
    }

    template <class Body>
    void run(int most, const Body& body) {
        if (most <= 1 || busy.exchange(true, std::memory_order_acquire)) return alone(body);
        start_helpers();
        if (helpers.empty()) {
            busy.store(false, std::memory_order_release);
            return alone(body);
        }
        team = std::min({most, threads, int(helpers.size()) + 1});
        job = &body;
        call = [](const void* job, Team& team) { (*static_cast<const Body*>(job))(team); };
        failed.store(false, std::memory_order_relaxed);
        first = phase.value.load(std::memory_order_relaxed);
        open_phase(first);
        gate.value.store(((gate.value.load(std::memory_order_relaxed) & ~(EPOCH - 1)) + EPOCH) | OPEN);
        gate.wake(Word::HELPER);
        take_part(0);
        gate.value.fetch_and(~OPEN);
        gate.wait(Word::CALLER, spin, [](uint32_t now) { return !(now & INSIDE); });  // they use what is the caller's
        std::exception_ptr thrown;
        std::swap(thrown, error);
        busy.store(false, std::memory_order_release);
        if (thrown) std::rethrow_exception(thrown);
    }

    // What each() is made of: the part of a thread in a phase of n indexes.
    template <class Work>
    void share(int thread, uint32_t number, int n, const Work& work) {
        if (phase.value.load(std::memory_order_acquire) != number) return;
        int done = 0;
        for (int k = 0; k < team; k++) {
            const int owner = thread + k < team ? thread + k : thread + k - team;
            const int from = share_of(owner, n), size = share_of(owner + 1, n) - from;
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
            phase.wake(Word::HELPER);
        } else {
            phase.wait(Word::HELPER, spin, [=](uint32_t now) { return now != number; });
        }
    }

  private:
    // `gate`: the number of the call, whether helpers may come in, how many are in.
    static constexpr uint32_t INSIDE = 0x7ff, OPEN = 0x800, EPOCH = 0x1000;
    static_assert(MOST_THREADS <= int(INSIDE));

    struct alignas(128) Share { std::atomic<uint64_t> next{0}; };  // phase << 32 | indexes taken of the share

    // of who has set `busy`
    int threads;
    Word::Clock::duration spin;
    std::vector<Share> shares;
    std::vector<std::thread> helpers;
    bool refused = false;  // the system gave fewer threads than asked for
    std::atomic<bool> busy{false}, ending{false}, failed{false};
    std::exception_ptr error;
    // of the call under way
    int team = 1;
    const void* job = nullptr;
    void (*call)(const void*, Team&) = nullptr;
    uint32_t first = 0;
    alignas(128) Word gate;
    alignas(128) Word phase;
    alignas(128) std::atomic<int> finished{0};

    template <class Body>
    static void alone(const Body& body) {
        Team team;
        body(team);
    }

    int share_of(int thread, int n) const { return int((int64_t(n) * thread + team - 1) / team); }

    void open_phase(uint32_t number) {
        for (int i = 0; i < team; i++) shares[i].next.store(uint64_t(number) << 32, std::memory_order_relaxed);
    }

    // The next index of a share, or -1: none is left, or the phase is over.
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

    // As many as the system gives: fewer threads are slower, not wrong. Signals stay with the threads that had them.
    void start_helpers() {
        if (int(helpers.size()) >= threads - 1 || refused) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            while (int(helpers.size()) < threads - 1)
                helpers.emplace_back([this, thread = int(helpers.size()) + 1] { help(thread); });
        } catch (const std::system_error&) {
            refused = true;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void end_helpers() {
        ending.store(true);
        gate.value.fetch_add(EPOCH);
        gate.wake(Word::HELPER);
        for (std::thread& helper : helpers) helper.join();
        helpers.clear();
        ending.store(false);
    }

    void help(int thread) {
        for (uint32_t seen = 0;;) {
            uint32_t now;
            gate.wait(Word::HELPER, std::chrono::microseconds(idle_spin_us()), [&](uint32_t value) {
                now = value;
                return ending.load() || ((value & OPEN) && value / EPOCH != seen);
            });
            if (ending.load()) return;
            while ((now & OPEN) && !gate.value.compare_exchange_weak(now, now + 1)) {}
            if (!(now & OPEN)) continue;  // over before we came
            seen = now / EPOCH;
            if (thread < team) take_part(thread);
            const uint32_t left = gate.value.fetch_sub(1) - 1;
            if (!(left & (INSIDE | OPEN))) gate.wake(Word::CALLER);
        }
    }
};

template <class Work>
inline void Team::each(int n, const Work& work) {
    if (n <= 0) return;
    if (pool) return pool->share(thread, phase++, n, work);
    for (int i = 0; i < n; i++) work(i);
}

// The process's pool. A child of fork() has none of its threads and makes one of its own when it first needs it.
class Pools {
  public:
    template <class Body>
    static void run(int most, const Body& body) {
        Pool* pool = current().load(std::memory_order_acquire);
        if (!pool) pool = make();
        pool->run(most, body);
    }

    // How many threads the next calls have, and for how long they spin.
    static void use(int threads, int spin_us) {
        size().store(int64_t(std::max(1, std::min(threads, MOST_THREADS))) << 32 | std::max(0, spin_us));
        if (Pool* pool = current().load(std::memory_order_acquire)) pool->resize(threads_wanted(), spin_wanted());
    }

    static int threads_wanted() { return int(size().load() >> 32); }

  private:
    static std::atomic<Pool*>& current() {
        static std::atomic<Pool*> pool{nullptr};  // never ended: the end of the process may find it at work
        return pool;
    }
    static std::atomic<int64_t>& size() {
        static std::atomic<int64_t> size{int64_t(1) << 32};
        return size;
    }
    static int spin_wanted() { return int(size().load() & INT_MAX); }

    static Pool* make() {
        static const int forgets = pthread_atfork(nullptr, nullptr, [] { current().store(nullptr); });
        (void)forgets;
        Pool *mine = new Pool(threads_wanted(), spin_wanted()), *there = nullptr;
        if (current().compare_exchange_strong(there, mine)) return mine;
        delete mine;
        return there;
    }
};

// A call: `body` by every thread that comes, of `most` at most.
template <class Body>
inline void parallel(int most, const Body& body) {
    Pools::run(most, body);
}

template <class Work>
inline void parallel_for(int n, const Work& work) {
    parallel(n, [&](Team& team) { team.each(n, work); });
}

}  // namespace mlt
