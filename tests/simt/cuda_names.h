// The CUDA names that the kernels use, on the machine of simt.h.
#pragma once
#include "simt.h"

#define __device__
#define __host__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __shared__ static thread_local
#define threadIdx (simt::fiber->thread)
#define blockIdx (simt::cta->block)
#define gridDim (simt::cta->cluster->launch.grid)
#define blockDim (simt::Index{simt::cta->cluster->launch.threads, 1, 1})

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

template <class To, class From>
To bits_as(From v) { static_assert(sizeof(To) == sizeof(From)); To out; std::memcpy(&out, &v, sizeof(out)); return out; }
inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
using std::max, std::min;

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcg(T* p, T v) { *p = v; }
template <class T> void __stcs(T* p, T v) { *p = v; }

inline void __syncthreads() { simt::sync_threads(); }
inline void __syncwarp(unsigned mask = ~0u) { simt::exchange(0, mask); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) { simt::poll(nullptr, 0); }
[[noreturn]] inline void __trap() {
  simt::fail("__trap");
  __builtin_unreachable();
}

inline unsigned lane_of_fiber() { return threadIdx.x % 32; }
template <class T>
T shuffle(unsigned mask, T v, unsigned from) {
  uint64_t raw = 0;
  std::memcpy(&raw, &v, sizeof(v));
  const uint64_t got = simt::exchange(raw, mask)[from];
  std::memcpy(&v, &got, sizeof(v));
  return v;
}
template <class T> T __shfl_sync(unsigned mask, T v, int from) { return shuffle(mask, v, from % 32); }
template <class T> T __shfl_xor_sync(unsigned mask, T v, int by) { return shuffle(mask, v, lane_of_fiber() ^ by); }
template <class T> T __shfl_up_sync(unsigned mask, T v, int by) {
  const unsigned lane = lane_of_fiber();
  return shuffle(mask, v, lane < unsigned(by) ? lane : lane - by);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, int by) {
  const unsigned lane = lane_of_fiber();
  return shuffle(mask, v, lane + by > 31 ? lane : lane + by);
}
// Lanes whose value passes `test`.
template <class Test>
unsigned lanes_where(unsigned mask, uint64_t value, Test test) {
  const uint64_t* all = simt::exchange(value, mask);
  unsigned lanes = 0;
  for (int i = 0; i < 32; ++i) lanes |= unsigned((mask >> i & 1) && test(all[i])) << i;
  return lanes;
}
inline unsigned __ballot_sync(unsigned mask, int v) { return lanes_where(mask, v != 0, [](uint64_t other) { return other != 0; }); }
inline int __any_sync(unsigned mask, int v) { return __ballot_sync(mask, v) != 0; }
inline int __all_sync(unsigned mask, int v) { return __ballot_sync(mask, !v) == 0; }
inline unsigned __match_any_sync(unsigned mask, int v) {
  return lanes_where(mask, unsigned(v), [=](uint64_t other) { return other == unsigned(v); });
}
inline unsigned __activemask() { return 1u << lane_of_fiber(); }
template <class T>
T reduce(unsigned mask, T v, T (*combine)(T, T)) {
  const uint64_t* all = simt::exchange(uint64_t(int64_t(v)), mask);
  T sum = v;
  for (unsigned i = 0; i < 32; ++i)
    if (i != lane_of_fiber() && (mask >> i & 1)) sum = combine(sum, T(all[i]));
  return sum;
}
template <class T> T __reduce_add_sync(unsigned mask, T v) { return reduce<T>(mask, v, [](T a, T b) { return T(a + b); }); }
template <class T> T __reduce_max_sync(unsigned mask, T v) { return reduce<T>(mask, v, [](T a, T b) { return max(a, b); }); }
template <class T> T __reduce_min_sync(unsigned mask, T v) { return reduce<T>(mask, v, [](T a, T b) { return min(a, b); }); }

inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicOr(unsigned* p, unsigned v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicExch(unsigned* p, unsigned v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicCAS(unsigned* p, unsigned expected, unsigned v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <class T, class Choose>
T atomic_choose(T* p, T v, Choose choose) {
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, choose(old, v), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return old;
}
inline int atomicMax(int* p, int v) { return atomic_choose(p, v, [](int a, int b) { return max(a, b); }); }
inline int atomicMin(int* p, int v) { return atomic_choose(p, v, [](int a, int b) { return min(a, b); }); }
inline unsigned atomicMax(unsigned* p, unsigned v) { return atomic_choose(p, v, [](unsigned a, unsigned b) { return max(a, b); }); }
inline unsigned atomicMin(unsigned* p, unsigned v) { return atomic_choose(p, v, [](unsigned a, unsigned b) { return min(a, b); }); }
