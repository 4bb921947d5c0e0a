/* Threads that work on one thing together, and how they wait for each other.
 *
 * A layer has a dozen points at which all must have come; on a quiet machine the others are there
 * within microseconds, so a thread looks again and again. Where another process has a core, the one
 * that is missing may not be running at all: then the core is given back soon, and with each wait
 * that was in vain, sooner. OpenMP's own barriers know one bound for all machines and times.
 */
#ifndef TEAM_H
#define TEAM_H
#include <stdint.h>
#include <stdlib.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define MOST_LOOKS 4096 /* about 100 us */
#define LEAST_LOOKS 64

typedef struct {
  int size;
  int arrived, generation, sleeping;
  int looks; /* before a thread sleeps: what proved right lately */
  void *scratch;
  size_t scratch_bytes;
} Team;

/* One thread's place in it. */
typedef struct {
  Team *team;
  int me;
} Member;

static inline void look_again(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Returns when all of the team have called it. */
static inline void meet(Member m) {
  Team *team = m.team;
  if (team->size == 1) return;
  int generation = __atomic_load_n(&team->generation, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->size) {
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->generation, generation + 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(&team->sleeping, __ATOMIC_SEQ_CST))
      syscall(SYS_futex, &team->generation, FUTEX_WAKE_PRIVATE, team->size, 0, 0, 0);
#endif
    return;
  }
  int looks = __atomic_load_n(&team->looks, __ATOMIC_RELAXED);
  for (int i = 0; i < looks; i++) {
    if (__atomic_load_n(&team->generation, __ATOMIC_ACQUIRE) != generation) {
      if (looks < MOST_LOOKS)
        __atomic_store_n(&team->looks, looks + looks / 64 + 1, __ATOMIC_RELAXED);
      return;
    }
    look_again();
  }
  __atomic_store_n(&team->looks, looks / 2 > LEAST_LOOKS ? looks / 2 : LEAST_LOOKS,
                   __ATOMIC_RELAXED);
  __atomic_add_fetch(&team->sleeping, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&team->generation, __ATOMIC_ACQUIRE) == generation)
#ifdef __linux__
    syscall(SYS_futex, &team->generation, FUTEX_WAIT_PRIVATE, generation, 0, 0, 0);
#else
    sched_yield();
#endif
  __atomic_sub_fetch(&team->sleeping, 1, __ATOMIC_SEQ_CST);
}

/* Memory for all of the team, the same until the next call; NULL for all when there is none. All
 * call it together, with the same size. */
static inline void *shared_scratch(Member m, size_t bytes) {
  Team *team = m.team;
  meet(m); /* nobody uses what it was */
  if (m.me == 0 && team->scratch_bytes < bytes) {
    free(team->scratch);
    team->scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    team->scratch_bytes = team->scratch ? bytes : 0;
  }
  meet(m);
  return team->scratch;
}
#endif
