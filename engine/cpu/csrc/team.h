// Threads that compute together: each does its share of every part, and waits for the others at the part's end. OpenMP
// has such waits, too, but each costs several microseconds, and a pass over few rows has hundreds.

#pragma once

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined __x86_64__
#define SPIN() __builtin_ia32_pause()
#elif defined __aarch64__
#define SPIN() __asm__ volatile("yield")
#else
#define SPIN() ((void)0)
#endif

// Turns of waiting, some 50 microseconds, before a thread leaves its core to others: they may be those it waits for.
#define SPINS 4096

// What the threads of a team share, all of it zero at first.
typedef struct {
    _Alignas(64) atomic_int arrived; // threads that wait
    atomic_ptrdiff_t taken;          // tasks of this part that somebody has taken
    _Alignas(64) atomic_int waits;   // waits that are over
    atomic_int asleep;               // threads that wait for that to change
} Meeting;

// A thread of `count`.
typedef struct {
    Meeting *meeting;
    int index, count;
} Team;

// Until `waits` has another value.
static inline void sleep_while(Meeting *meeting, int waits) {
#ifdef __linux__
    atomic_fetch_add(&meeting->asleep, 1);
    while (atomic_load(&meeting->waits) == waits)
        syscall(SYS_futex, &meeting->waits, FUTEX_WAIT_PRIVATE, waits, NULL, NULL, 0);
    atomic_fetch_sub(&meeting->asleep, 1);
#else
    while (atomic_load(&meeting->waits) == waits) sched_yield();
#endif
}

static inline void wait_for_team(const Team *team) {
    Meeting *meeting = team->meeting;
    if (team->count == 1) {
        atomic_store_explicit(&meeting->taken, 0, memory_order_relaxed);
        return;
    }
    // Cannot change before this thread arrives.
    int waits = atomic_load_explicit(&meeting->waits, memory_order_relaxed);
    if (atomic_fetch_add(&meeting->arrived, 1) == team->count - 1) {
        atomic_store_explicit(&meeting->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&meeting->taken, 0, memory_order_relaxed);
        atomic_store(&meeting->waits, waits + 1);
#ifdef __linux__
        // Whoever is not counted yet sees the new value, for both sides write before they read.
        if (atomic_load(&meeting->asleep))
            syscall(SYS_futex, &meeting->waits, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
        return;
    }
    for (int spins = 0; atomic_load_explicit(&meeting->waits, memory_order_acquire) == waits; spins++) {
        if (spins == SPINS) {
            sleep_while(meeting, waits);
            return;
        }
        SPIN();
    }
}

// The next of a part's tasks, for tasks that differ in length.
static inline ptrdiff_t take_task(const Team *team) {
    return atomic_fetch_add_explicit(&team->meeting->taken, 1, memory_order_relaxed);
}

static inline ptrdiff_t share_of(const Team *team, ptrdiff_t size, int index) { return size * index / team->count; }

// The head of a loop over this thread's share of 0 to `size`.
#define SHARED(i, team, size)                                                                                          \
    ptrdiff_t i = share_of(team, size, (team)->index), i##_end = share_of(team, size, (team)->index + 1);              \
    i < i##_end;                                                                                                       \
    i++

// `bytes`, a multiple of 64, for each thread that a team may have; NULL where memory ran out.
static inline char *scratch_of_team(ptrdiff_t bytes) { return aligned_alloc(64, bytes * omp_get_max_threads()); }

#define PRAGMA(text) _Pragma(#text)

// Calls something with a `team` of all threads, or of this one alone.
#define WITH_TEAM(of_all, call)                                                                                        \
    do {                                                                                                               \
        Meeting meeting = {0};                                                                                         \
        PRAGMA(omp parallel if (of_all)) {                                                                             \
            const Team member = {&meeting, omp_get_thread_num(), omp_get_num_threads()}, *team = &member;              \
            call;                                                                                                      \
        }                                                                                                              \
    } while (0)
