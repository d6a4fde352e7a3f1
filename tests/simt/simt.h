// A SIMT machine: runs CUDA kernels on the CPU. Every thread is a fiber that runs until it waits, in an order that the caller picks, so
// that a missing barrier shows. For tests of indexing, exchange and pipelines where there is no GPU; it says nothing about memory order.
//
// One OS thread runs the CTAs of one cluster. CTAs run one cluster after another, or, in a resident launch, all at once.
// What the hardware does beside the threads (copies.h) waits in Cta::pending until no thread can go on: as late as the program allows.
// cuda_names.h has the names that kernels use.
#pragma once
#include <sched.h>
#include <setjmp.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace simt {

struct Index { unsigned x, y, z; };
struct Cta;
struct Hopper;  // hopper.h

inline std::string text(const char* format, ...) {
  char line[512];
  va_list list;
  va_start(list, format);
  vsnprintf(line, sizeof(line), format, list);
  va_end(list);
  return line;
}
inline double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// ---- what a thread waits for ---------------------------------------------------------------------------------------------------------

struct Wait {
  enum Until { kRunnable, kPoll, kDiffers, kReaches } until = kRunnable;  // kPoll: the kernel itself looks again
  const uint64_t* word = nullptr;
  uint64_t value = 0, mask = 0;        // kDiffers: (*word & mask) != value; kReaches: *word >= value
  std::function<std::string()> name;

  bool over() const {
    if (until == kDiffers) return (*word & mask) != value;
    return until != kReaches || *word >= value;
  }
};

struct Fiber {
  Cta* cta = nullptr;
  Index thread{};
  bool started = false, done = false;
  jmp_buf context;
  Wait wait;
};

// Threads that meet: the last one to arrive lets all go on.
struct Meeting {
  unsigned arrived = 0;
  uint64_t generation = 0;
  void open() { arrived = 0, ++generation; }
};
// Lanes of one mask that exchange values.
struct LaneMeeting : Meeting {
  unsigned mask = 0, lanes = 0;
  uint64_t given[32], taken[32];
};
struct Warp {
  unsigned live = 0;  // lanes
  std::deque<LaneMeeting> meetings;
};
struct NamedMeeting : Meeting {
  unsigned expected = 0;
};

// ---- a launch, its clusters and CTAs -------------------------------------------------------------------------------------------------

struct Order {
  enum { kForward = 0, kReversed = 1 };  // anything else: the seed of a random order in which warps now and then sleep
};

struct Launch {
  Index grid{};
  unsigned threads = 0, cluster = 1;
  size_t smem_bytes = 0;
  uint64_t order = Order::kForward;
  bool resident = false;
  double timeout_s = 20;
  std::atomic<uint64_t>* progress = nullptr;  // of all launches of the process: one of them may wait for another
  std::function<void()> body;

  std::mutex mutex;
  std::atomic<bool> failed{false};
  std::string error;
  std::vector<std::pair<unsigned, std::string>> waiting;  // by CTA
};

struct Pending {
  uint64_t since;  // turn
  std::function<void()> run;
};

struct Cluster;
struct Cta {
  static constexpr size_t kGuard = 1024;
  static constexpr unsigned kSmemBase = 1024;  // shared address of the dynamic shared memory: what lies below is the system's
  Cluster* cluster = nullptr;
  unsigned rank = 0;  // in the cluster
  Index block{};
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting block_meeting;
  NamedMeeting named[16];
  unsigned live = 0;
  std::unique_ptr<char[]> stacks;
  std::vector<uint8_t> memory;
  uint8_t* smem = nullptr;
  std::deque<Pending> pending;
  std::shared_ptr<Hopper> hopper;
  std::vector<std::function<void()>> at_end;
};

struct Cluster {
  static constexpr size_t kStack = 64 * 1024;
  static constexpr uint64_t kMaxAge = 2000;  // turns that pending work may wait while threads go on
  Launch& launch;
  std::vector<std::unique_ptr<Cta>> ctas;
  Meeting meeting;
  std::mt19937_64 random;
  uint64_t turn = 0;
  std::vector<uint64_t> asleep_until;  // by warp of the cluster
  jmp_buf scheduler;
  ucontext_t entry;

  Cluster(Launch& launch, unsigned first_x, unsigned y);
  void run();
  bool take_turn();
  bool run_warp(unsigned index);
  bool resume(Fiber& fiber);
  bool work_beside();
  void finish(Cta& cta);
  void report();
  bool is_random() const { return launch.order > Order::kReversed; }
  unsigned live() const {
    unsigned sum = 0;
    for (auto& cta : ctas) sum += cta->live;
    return sum;
  }
};

inline thread_local Cta* cta = nullptr;      // of the running fiber
inline thread_local Fiber* fiber = nullptr;  // nullptr: the scheduler runs

// ---- switching -----------------------------------------------------------------------------------------------------------------------

__attribute__((noinline)) inline void leave() {
  if (!_setjmp(fiber->context)) _longjmp(cta->cluster->scheduler, 1);
}
// Ends the launch with an error. Returns only to the scheduler.
__attribute__((noinline)) inline void fail(const std::string& what) {
  Launch& launch = cta->cluster->launch;
  {
    std::lock_guard lock(launch.mutex);
    if (launch.error.empty())
      launch.error = fiber ? text("CTA %u thread %u: ", cta->block.x, fiber->thread.x) + what : text("CTA %u: ", cta->block.x) + what;
    launch.failed = true;
  }
  if (fiber) leave();
}
inline void wait_for(Wait wait) {
  if (wait.until != Wait::kPoll && wait.over()) return;
  fiber->wait = std::move(wait);
  leave();
}
inline void poll(const void* address, uint64_t seen) {
  wait_for({Wait::kPoll, nullptr, 0, 0, [=] { return address ? text("polls %p (last value %lu)", address, seen) : "sleeps"; }});
}
inline void meet(Meeting& meeting, unsigned expected, std::function<std::string()> name) {
  if (++meeting.arrived == expected) return meeting.open();
  wait_for({Wait::kDiffers, &meeting.generation, meeting.generation, ~0ull, std::move(name)});
}

// ---- barriers ------------------------------------------------------------------------------------------------------------------------

inline void sync_threads() {
  Cta& c = *cta;
  meet(c.block_meeting, c.live, [&c] { return text("__syncthreads (%u of %u threads are there)", c.block_meeting.arrived, c.live); });
}
inline void sync_cluster() {
  Cluster& all = *cta->cluster;
  meet(all.meeting, all.live(), [&all] { return text("cluster barrier (%u of %u threads are there)", all.meeting.arrived, all.live()); });
}
inline NamedMeeting& named_barrier(unsigned id, unsigned threads) {
  if (id >= 16) fail(text("named barrier %u, expected 0..15", id));
  NamedMeeting& barrier = cta->named[id];
  if (barrier.arrived > 0 && barrier.expected != threads)
    fail(text("named barrier %u: %u threads expected, others expect %u", id, threads, barrier.expected));
  barrier.expected = threads;
  return barrier;
}
inline void sync_named(unsigned id, unsigned threads) {
  NamedMeeting& barrier = named_barrier(id, threads);
  meet(barrier, threads,
       [&barrier, id] { return text("named barrier %u (%u of %u threads are there)", id, barrier.arrived, barrier.expected); });
}
inline void arrive_named(unsigned id, unsigned threads) {
  NamedMeeting& barrier = named_barrier(id, threads);
  if (++barrier.arrived == threads) barrier.open();
}

// Every lane of the mask gives a value and sees those of all: the array is valid until the lane's next exchange.
inline void close_lanes(LaneMeeting& meeting) {
  std::copy(meeting.given, meeting.given + 32, meeting.taken);
  meeting.lanes = 0;
  meeting.open();
}
inline LaneMeeting& lane_meeting(Warp& warp, unsigned mask) {
  for (auto& meeting : warp.meetings)
    if (meeting.mask == mask) return meeting;
  warp.meetings.emplace_back().mask = mask;
  return warp.meetings.back();
}
inline const uint64_t* exchange(uint64_t value, unsigned mask = ~0u) {
  Warp& warp = cta->warps[fiber->thread.x / 32];
  const unsigned lane = fiber->thread.x % 32;
  if (!(mask >> lane & 1)) fail(text("lane %u is not in the mask %08x of its warp operation", lane, mask));
  LaneMeeting& meeting = lane_meeting(warp, mask);
  meeting.given[lane] = value, meeting.lanes |= 1u << lane;
  if (meeting.lanes == (mask & warp.live)) {
    close_lanes(meeting);
    return meeting.taken;
  }
  wait_for({Wait::kDiffers, &meeting.generation, meeting.generation, ~0ull,
            [&meeting] { return text("warp operation of mask %08x (lanes %08x are there)", meeting.mask, meeting.lanes); }});
  return meeting.taken;
}

// ---- shared memory -------------------------------------------------------------------------------------------------------------------

template <class T>
T* dynamic_smem() { return reinterpret_cast<T*>(cta->smem); }
inline unsigned smem_address(const void* p) {
  const auto offset = static_cast<const uint8_t*>(p) - cta->smem;
  if (offset < 0 || offset > static_cast<int64_t>(cta->cluster->launch.smem_bytes))
    fail(text("%p is not in the CTA's dynamic shared memory", p));
  return Cta::kSmemBase + static_cast<unsigned>(offset);
}
inline uint8_t* smem_pointer(unsigned address) {
  if (address < Cta::kSmemBase || address - Cta::kSmemBase >= cta->cluster->launch.smem_bytes)
    fail(text("shared address %#x, expected %#x..%#zx", address, Cta::kSmemBase, Cta::kSmemBase + cta->cluster->launch.smem_bytes));
  return cta->smem + (address - Cta::kSmemBase);
}
inline std::string smem_name(const void* p) {
  const auto offset = static_cast<const uint8_t*>(p) - cta->smem;
  return offset >= 0 && offset < static_cast<int64_t>(cta->cluster->launch.smem_bytes) ? text("smem+%#zx", size_t(offset)) : text("%p", p);
}

// ---- the scheduler -------------------------------------------------------------------------------------------------------------------

inline void end_of_thread() {
  Cta& c = *cta;
  fiber->done = true;
  --c.live;
  Warp& warp = c.warps[fiber->thread.x / 32];
  warp.live &= ~(1u << fiber->thread.x % 32);
  for (auto& meeting : warp.meetings)
    if (meeting.lanes && meeting.lanes == (meeting.mask & warp.live)) close_lanes(meeting);
  if (c.live && c.block_meeting.arrived == c.live) c.block_meeting.open();
  if (c.cluster->meeting.arrived && c.cluster->meeting.arrived == c.cluster->live()) c.cluster->meeting.open();
  leave();
}
inline void fiber_main() {
  cta->cluster->launch.body();
  end_of_thread();
}

inline Cluster::Cluster(Launch& l, unsigned first_x, unsigned y) : launch(l), random(l.order * 7919 + first_x) {
  for (unsigned rank = 0; rank < l.cluster; ++rank) {
    Cta& c = *ctas.emplace_back(std::make_unique<Cta>());
    c.cluster = this, c.rank = rank, c.block = {first_x + rank, y, 0}, c.live = l.threads;
    c.memory.assign(l.smem_bytes + Cta::kGuard + 1024, 0xff);  // NaN in every format
    c.smem = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(c.memory.data()) + 1023) & ~uintptr_t(1023));
    c.stacks = std::unique_ptr<char[]>(new char[kStack * l.threads]);
    c.fibers.resize(l.threads);
    c.warps.resize((l.threads + 31) / 32);
    for (unsigned i = 0; i < l.threads; ++i) {
      c.fibers[i].cta = &c, c.fibers[i].thread = {i, 0, 0};
      c.warps[i / 32].live |= 1u << i % 32;
    }
    asleep_until.resize(asleep_until.size() + c.warps.size(), 0);
  }
}

// Runs the fiber until it waits. Whether it got past a wait, or ended.
inline bool Cluster::resume(Fiber& next) {
  if (next.done || !next.wait.over()) return false;
  const bool polled = next.wait.until == Wait::kPoll;
  next.wait.until = Wait::kRunnable;
  fiber = &next, cta = next.cta;
  if (!_setjmp(scheduler)) {
    if (next.started) _longjmp(next.context, 1);
    next.started = true;
    getcontext(&entry);
    entry.uc_stack = {.ss_sp = &next.cta->stacks[kStack * next.thread.x], .ss_flags = 0, .ss_size = kStack};
    entry.uc_link = nullptr;
    makecontext(&entry, fiber_main, 0);
    setcontext(&entry);
  }
  Fiber& ran = *fiber;
  fiber = nullptr;
  return !polled || ran.done || ran.wait.until != Wait::kPoll;
}

inline bool Cluster::run_warp(unsigned index) {
  const unsigned per_cta = unsigned(ctas[0]->warps.size());
  Cta& c = *ctas[index / per_cta];
  const unsigned first = index % per_cta * 32, count = std::min<unsigned>(32, launch.threads - first);
  const bool reversed = launch.order == Order::kReversed || (is_random() && random() % 2);
  bool progress = false;
  for (unsigned i = 0; i < count && !launch.failed; ++i) progress |= resume(c.fibers[first + (reversed ? count - 1 - i : i)]);
  return progress;
}

// Every warp once.
inline bool Cluster::take_turn() {
  ++turn;
  const unsigned count = unsigned(asleep_until.size());
  if (is_random() && random() % 16 == 0) asleep_until[random() % count] = turn + random() % 64;
  const unsigned start = is_random() ? random() % count : 0;
  bool progress = false;
  for (unsigned i = 0; i < count && !launch.failed; ++i) {
    const unsigned index = launch.order == Order::kReversed ? count - 1 - i : (start + i) % count;
    if (asleep_until[index] <= turn) progress |= run_warp(index);
  }
  return progress;
}

// One piece of work beside the threads, if any: the oldest, the newest or any.
inline bool Cluster::work_beside() {
  for (auto& c : ctas) {
    if (c->pending.empty()) continue;
    const size_t count = c->pending.size(), at = is_random() ? random() % count : launch.order == Order::kReversed ? count - 1 : 0;
    Pending work = std::move(c->pending[at]);
    c->pending.erase(c->pending.begin() + at);
    cta = c.get();
    work.run();
    return true;
  }
  return false;
}

inline void Cluster::finish(Cta& c) {
  cta = &c;
  for (auto& check : c.at_end) check();
  for (size_t i = 0; i < Cta::kGuard / 2; ++i)
    if (c.smem[launch.smem_bytes + i] != 0xff) return fail(text("a write %zu bytes past the end of shared memory", i));
}

inline void Cluster::report() {
  for (auto& c : ctas) {
    cta = c.get();
    std::string lines;
    for (unsigned i = 0; i < launch.threads;) {
      auto state = [&](unsigned t) -> std::string {
        Fiber& f = c->fibers[t];
        return f.done || (f.wait.until != Wait::kPoll && f.wait.over()) ? "" : f.wait.name();
      };
      const std::string what = state(i);
      unsigned end = i + 1;
      while (end < launch.threads && end % 32 && state(end) == what) ++end;
      if (!what.empty()) lines += text("  CTA %u warp %u lanes %u-%u: ", c->block.x, i / 32, i % 32, (end - 1) % 32) + what + "\n";
      i = end;
    }
    if (!c->pending.empty()) lines += text("  CTA %u: %zu copies under way\n", c->block.x, c->pending.size());
    std::lock_guard lock(launch.mutex);
    launch.waiting.emplace_back(c->block.y * launch.grid.x + c->block.x, lines);
  }
}

inline void Cluster::run() {
  uint64_t seen = 0, idle_turns = 0;
  double since = seconds();
  while (live() > 0 && !launch.failed) {
    bool progress = take_turn();
    const bool old = !ctas[0]->pending.empty() && ctas[0]->pending.front().since + kMaxAge < turn;
    if (!progress || old || (is_random() && random() % 8 == 0)) progress |= work_beside();
    if (progress) {
      launch.progress->fetch_add(1, std::memory_order_relaxed);
      idle_turns = 0;
      continue;
    }
    if (++idle_turns % 64 == 0) usleep(50); else sched_yield();
    const uint64_t now = launch.progress->load(std::memory_order_relaxed);
    if (now != seen) seen = now, since = seconds();
    else if (seconds() - since > launch.timeout_s) {
      cta = ctas[0].get();
      fail(text("dead-lock: no thread has got past a wait for %g s", launch.timeout_s));
    }
  }
  if (!launch.failed)
    for (auto& c : ctas) finish(*c);
  if (launch.failed) report();
  cta = nullptr;
}

// Returns the error, or an empty string.
inline std::string run_launch(Launch& launch) {
  if (launch.grid.x % launch.cluster) return text("grid of %u CTAs in clusters of %u", launch.grid.x, launch.cluster);
  const unsigned columns = launch.grid.x / launch.cluster, count = columns * launch.grid.y;
  auto run = [&](unsigned i) {
    const unsigned at = launch.order == Order::kReversed ? count - 1 - i : i;
    Cluster(launch, at % columns * launch.cluster, at / columns).run();
  };
  if (launch.resident) {
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < count; ++i) threads.emplace_back(run, i);
    for (auto& thread : threads) thread.join();
  } else {
    for (unsigned i = 0; i < count && !launch.failed; ++i) run(i);
  }
  if (!launch.failed) return "";
  std::sort(launch.waiting.begin(), launch.waiting.end());
  std::string message = launch.error + "\n";
  for (auto& [number, lines] : launch.waiting) message += lines;
  return message;
}

// ---- calls from Python (machine.py) ----------------------------------------------------------------------------------------------------

struct LaunchArguments {
  unsigned x, y, cluster;
  int resident;
  uint64_t smem_bytes, order;
  double timeout_s;
  std::atomic<uint64_t>* progress;
};
// Returns the length of the error message, of which `size` bytes are copied.
inline size_t run_from_host(const LaunchArguments& arguments, unsigned threads, std::function<void()> body, char* message, size_t size) {
  Launch launch;
  launch.grid = {arguments.x, arguments.y, 1}, launch.threads = threads, launch.cluster = arguments.cluster;
  launch.smem_bytes = arguments.smem_bytes, launch.order = arguments.order, launch.resident = arguments.resident;
  launch.timeout_s = arguments.timeout_s, launch.progress = arguments.progress, launch.body = std::move(body);
  const std::string error = run_launch(launch);
  std::snprintf(message, size, "%s", error.c_str());
  return error.size();
}

}  // namespace simt

#include "cuda_names.h"
