// A small SIMT machine: runs CUDA kernels that use no tensor cores and no asynchronous copies on the CPU, one CTA after another, every
// thread a fiber. Threads run until they meet a warp or CTA barrier, in an order that the caller picks, so that a missing barrier shows.
// For tests of indexing, sorting and exchange where there is no GPU; it says nothing about memory order.
#pragma once
#include <sched.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace simt {

struct Index { unsigned x, y, z; };
struct Warp {
  uint64_t given[32], taken[32];
  unsigned arrived = 0, mask = 0, phase = 0;
};
struct Fiber {
  ucontext_t context;
  Index thread;
  bool done = false;
};

struct Machine {
  static constexpr size_t kStack = 64 * 1024;
  Index block{}, grid{}, block_dim{};
  std::vector<Fiber> fibers;
  std::vector<char> stacks, dynamic;
  std::vector<Warp> warps;
  unsigned current = 0, live = 0, waiting = 0, phase = 0;
  ucontext_t scheduler;
  const std::function<void()>* body = nullptr;

  void yield() { swapcontext(&fibers[current].context, &scheduler); }
  void sync_threads() {
    const unsigned mine = phase;
    if (++waiting == live) return release();
    while (phase == mine) yield();
  }
  void release() { waiting = 0, ++phase; }
  // Every lane gives a value and sees those of all lanes.
  const uint64_t* exchange(uint64_t value) {
    Warp& warp = warps[current / 32];
    const unsigned mine = warp.phase;
    warp.given[current % 32] = value;
    if (++warp.arrived == 32) {
      std::copy(warp.given, warp.given + 32, warp.taken);
      warp.arrived = 0, ++warp.phase;
    }
    while (warp.phase == mine) yield();
    return warp.taken;
  }
  void finish() {
    fibers[current].done = true;
    --live;
    if (live > 0 && waiting == live) release();
  }
  void run_block(unsigned threads, bool reversed);
};
inline thread_local Machine machine;

inline void fiber_main() {
  (*machine.body)();
  machine.finish();
  machine.yield();
}

inline void Machine::run_block(unsigned threads, bool reversed) {
  fibers.assign(threads, Fiber{});
  warps.assign((threads + 31) / 32, Warp{});
  stacks.resize(kStack * threads);
  live = threads, waiting = 0;
  for (unsigned i = 0; i < threads; ++i) {
    fibers[i].thread = {i, 0, 0};
    getcontext(&fibers[i].context);
    fibers[i].context.uc_stack = {.ss_sp = &stacks[kStack * i], .ss_flags = 0, .ss_size = kStack};
    fibers[i].context.uc_link = &scheduler;
    makecontext(&fibers[i].context, fiber_main, 0);
  }
  while (live > 0)
    for (unsigned i = 0; i < threads; ++i) {
      current = reversed ? threads - 1 - i : i;
      if (!fibers[current].done) swapcontext(&scheduler, &fibers[current].context);
    }
}

inline void launch(const std::function<void()>& body, Index grid, unsigned threads, size_t dynamic_bytes, bool reversed) {
  machine.grid = grid, machine.block_dim = {threads, 1, 1};
  machine.dynamic.assign(dynamic_bytes + 16, static_cast<char>(0xAB));
  machine.body = &body;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      machine.block = {reversed ? grid.x - 1 - x : x, y, 0};
      machine.run_block(threads, reversed);
    }
}

template <class T>
T* dynamic_smem() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(machine.dynamic.data()) + 15) & ~uintptr_t(15)); }

}  // namespace simt

// ---- the CUDA names that the kernels use --------------------------------------------------------------------------------------------
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define threadIdx (simt::machine.fibers[simt::machine.current].thread)
#define blockIdx (simt::machine.block)
#define gridDim (simt::machine.grid)
#define blockDim (simt::machine.block_dim)

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
To bits_as(From v) { static_assert(sizeof(To) == sizeof(From)); To out; std::memcpy(&out, &v, sizeof(out)); return out; }
inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
using std::max, std::min;

inline void __syncthreads() { simt::machine.sync_threads(); }
inline void __syncwarp() { simt::machine.exchange(0); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) { sched_yield(), simt::machine.yield(); }
inline unsigned lane_of_fiber() { return simt::machine.current % 32; }
template <class T>
T shuffle(T v, unsigned from) {
  uint64_t raw = 0;
  std::memcpy(&raw, &v, sizeof(v));
  const uint64_t got = simt::machine.exchange(raw)[from];
  std::memcpy(&v, &got, sizeof(v));
  return v;
}
template <class T> T __shfl_sync(unsigned, T v, int from) { return shuffle(v, from % 32); }
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) { return shuffle(v, lane_of_fiber() ^ mask); }
template <class T> T __shfl_up_sync(unsigned, T v, int by) { const unsigned lane = lane_of_fiber(); return shuffle(v, lane < unsigned(by) ? lane : lane - by); }
inline unsigned __match_any_sync(unsigned, int v) {
  const uint64_t* all = simt::machine.exchange(static_cast<unsigned>(v));
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) same |= unsigned(all[i] == static_cast<unsigned>(v)) << i;
  return same;
}
inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline int atomicMax(int* p, int v) { const int old = *p; *p = max(old, v); return old; }
inline int atomicMin(int* p, int v) { const int old = *p; *p = min(old, v); return old; }
