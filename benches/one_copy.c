// Compares two ways to pass bytes between two processes of a host: through a ring in shared memory (two copies), and with
// process_vm_readv (one copy, made by the reader). Figures are in benches/record/one-copy.md.
//
//   cc -O2 -march=native benches/one_copy.c -o one_copy && ./one_copy [two|one] [4k|2m] [fifo]
//
// two, one: processors. 4k, 2m: pages of the private buffers. fifo: the real-time policy, to measure beside other programs
// (needs root, and stops these programs for about 15 seconds in all).
#define _GNU_SOURCE
#include <immintrin.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KIB 1024ul
#define MIB (KIB * KIB)
#define LAP (1536 * KIB)
#define BUFFER (64 * MIB)
#define ROUNDS 5
#define MOST_TIMES 100000

enum way { ORDINARY, PAST_CACHE, PIECES, WHOLE, WAYS };
// The state of a source: unchanged since the last call; one of many, so that no cache holds it; just written by its owner.
enum source { WARM, COLD, NEW, SOURCES };

// From one process to the other: a ring, or an address that the reader may read.
typedef struct {
  _Alignas(128) atomic_ulong written;
  _Alignas(128) atomic_ulong read;
  _Alignas(128) atomic_ulong address, lent, taken;
  _Alignas(128) char bytes[LAP];
} path;

typedef struct {
  _Alignas(128) atomic_ulong met[2];
  _Alignas(128) atomic_int is_over;
  pid_t pid[2];
  path to[2];
} shared;

static shared *common;
static int me, shares_processor;
static char *sources, *targets;

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static double microseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e6 + now.tv_nsec * 1e-3;
}

static void look_again(unsigned *looks) {
  if (shares_processor || ++*looks > 20000) {
    sched_yield();
    *looks = 0;
  } else {
    _mm_pause();
  }
}

static void meet(void) {
  static unsigned long number;
  unsigned looks = 0;
  atomic_store(&common->met[me], ++number);
  while (atomic_load(&common->met[1 - me]) < number) look_again(&looks);
}

static void copy(char *to, const char *from, size_t bytes) {
  size_t at = 0;
  for (; at + 128 <= bytes; at += 128)
    for (int k = 0; k < 128; k += 32) _mm256_storeu_si256((void *)(to + at + k), _mm256_loadu_si256((void *)(from + at + k)));
  memcpy(to + at, from + at, bytes - at);
}

static void copy_past_cache(char *to, const char *from, size_t bytes) {
  for (size_t at = 0; at + 16 <= bytes; at += 16) _mm_stream_si128((void *)(to + at), _mm_loadu_si128((void *)(from + at)));
  _mm_sfence();
}

// Sends and receives, as far as `from` and `to` are given, in turns of a chunk: chunks and laps as in src/host/shm.
static void by_ring(enum way way, const char *from, char *to, size_t bytes) {
  size_t most = bytes < 128 * KIB ? 8 * KIB : 32 * KIB, sent = from ? 0 : bytes, got = to ? 0 : bytes;
  path *out = &common->to[1 - me], *in = &common->to[me];
  for (unsigned looks = 0; sent < bytes || got < bytes;) {
    int has_moved = 0;
    unsigned long written = atomic_load_explicit(&out->written, memory_order_relaxed);
    size_t chunk = least(least(most, bytes - sent), LAP - written % LAP);
    if (chunk && written + chunk - atomic_load_explicit(&out->read, memory_order_acquire) <= LAP) {
      (way == PAST_CACHE ? copy_past_cache : copy)(out->bytes + written % LAP, from + sent, chunk);
      atomic_store_explicit(&out->written, written + chunk, memory_order_release);
      sent += chunk, has_moved = 1;
    }
    unsigned long read = atomic_load_explicit(&in->read, memory_order_relaxed);
    size_t there = atomic_load_explicit(&in->written, memory_order_acquire) - read;
    chunk = least(least(most, there), LAP - read % LAP);
    if (chunk && got < bytes) {
      (bytes >= 4 * MIB ? copy_past_cache : copy)(to + got, in->bytes + read % LAP, chunk);
      atomic_store_explicit(&in->read, read + chunk, memory_order_release);
      got += chunk, has_moved = 1;
    }
    if (!has_moved) look_again(&looks);
  }
}

// The same, with one copy. A sender waits until its bytes have been read.
static void by_reading(enum way way, const char *from, char *to, size_t bytes) {
  path *out = &common->to[1 - me], *in = &common->to[me];
  size_t most = way == PIECES ? 256 * KIB : bytes;
  unsigned looks = 0;
  unsigned long number = atomic_load(&out->lent) + 1;
  if (from) {
    atomic_store(&out->address, (unsigned long)from);
    atomic_store(&out->lent, number);
  }
  if (to) {
    unsigned long taken = atomic_load(&in->taken);
    while (atomic_load(&in->lent) <= taken) look_again(&looks);
    for (size_t at = 0; at < bytes;) {
      struct iovec local = {to + at, least(most, bytes - at)}, remote = {(char *)atomic_load(&in->address) + at, local.iov_len};
      ssize_t read = process_vm_readv(common->pid[1 - me], &local, 1, &remote, 1, 0);
      if (read <= 0) {
        perror("process_vm_readv");
        exit(1);
      }
      at += read;
    }
    atomic_store(&in->taken, taken + 1);
  }
  if (from)
    while (atomic_load(&out->taken) < number) look_again(&looks);
}

static int by_size(const void *a, const void *b) {
  double first = *(const double *)a, second = *(const double *)b;
  return (first > second) - (first < second);
}

// Returns the median time of a transfer within a few milliseconds of them: both processes send at once, or in turns.
static double measure(enum way way, int both, enum source source, size_t bytes) {
  static double times[MOST_TIMES];
  size_t places = source == COLD ? BUFFER / bytes : 1, count = 0;
  void (*pass)(enum way, const char *, char *, size_t) = way < PIECES ? by_ring : by_reading;
  double end = microseconds() + 4000;
  do {
    char *from = sources + count % places * bytes, *to = targets + count % places * bytes;
    if (source == NEW)
      for (size_t at = 0; at < bytes; at += 64) *(volatile long *)(from + at) = (long)count;
    meet();
    double began = microseconds();
    if (both) {
      pass(way, from, to, bytes);
    } else {
      pass(way, me ? 0 : from, me ? to : 0, bytes);
      pass(way, me ? from : 0, me ? 0 : to, bytes);
    }
    times[count++] = (microseconds() - began) / (both ? 1 : 2);
    meet();
    if (!me) common->is_over = (microseconds() > end && count >= 3) || count == MOST_TIMES;
    meet();
  } while (!common->is_over);
  for (size_t at = 63; at < bytes; at += 64)
    if (targets[at] != 1 - me) {
      fprintf(stderr, "byte %zu did not arrive\n", at);
      exit(1);
    }
  memset(targets, 2, bytes);
  qsort(times, count, sizeof *times, by_size);
  return times[count / 2];
}

static void report(int both, enum source source, size_t bytes) {
  double times[WAYS][ROUNDS];
  for (int round = 0; round < ROUNDS; round++)
    for (int turn = 0; turn < WAYS; turn++) {
      int way = round % 2 ? WAYS - 1 - turn : turn;
      times[way][round] = measure(way, both, source, bytes);
    }
  if (me) return;
  printf("%s, %s, %6zu KiB:", both ? "both ways" : "one way  ", (char *[]){"warm", "cold", "new "}[source], bytes / KIB);
  double best[2] = {1e18, 1e18};
  for (int way = 0; way < WAYS; way++) {
    qsort(times[way], ROUNDS, sizeof(double), by_size);
    double median = times[way][ROUNDS / 2], *of = &best[way >= PIECES];
    *of = median < *of ? median : *of;
    printf(" %9.1f", median);
  }
  printf("  %.2f\n", best[1] / best[0]);
  fflush(stdout);
}

static void flag(void) {
  double began = microseconds();
  for (int k = 0; k < 2000; k++) meet();
  if (!me) printf("a flag takes %.0f ns\n", (microseconds() - began) / 2);
}

static char *buffer(int huge, int value) {
  char *at = mmap(0, BUFFER + 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  at = (char *)(((uintptr_t)at + 2 * MIB - 1) & -(2 * MIB));
  madvise(at, BUFFER, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return memset(at, value, BUFFER);
}

int main(int count, char **words) {
  int huge = 0;
  for (int k = 1; k < count; k++) {
    shares_processor |= !strcmp(words[k], "one");
    huge |= !strcmp(words[k], "2m");
    struct sched_param first = {1};
    if (!strcmp(words[k], "fifo") && sched_setscheduler(0, SCHED_FIFO, &first)) perror("sched_setscheduler");
  }
  common = mmap(0, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  memset(common, 0, sizeof *common);
  me = fork() == 0;
  common->pid[me] = getpid();
  cpu_set_t processors;
  CPU_ZERO(&processors);
  CPU_SET(shares_processor ? 0 : me, &processors);
  sched_setaffinity(0, sizeof processors, &processors);
  sources = buffer(huge, me);
  targets = buffer(huge, 2);
  meet();
  flag();
  if (!me) puts("µs, medians: ring with ordinary stores, past the cache; read by 256 KiB, whole; ratio of the best read to the best ring");
  for (int both = 0; both < 2; both++)
    for (int source = WARM; source < SOURCES; source++)
      for (size_t bytes = 64 * KIB; bytes <= (source == COLD ? 4 * MIB : 64 * MIB); bytes *= 4) report(both, source, bytes);
  flag();
  if (!me) wait(0);
  return 0;
}
