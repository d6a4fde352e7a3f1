// ptx/memory.cuh on the CPU.
#pragma once
#include <time.h>

#include "simt.h"

namespace deep_gemm::ptx {
using u64 = unsigned long long;
inline u64 ld_acquire_sys_u64(const u64* p) {
  const u64 v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  simt::poll(p, v);
  return v;
}
inline void st_release_sys_u64(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void st_release_sys_u32(unsigned* p, unsigned v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline unsigned ld_acquire_gpu_u32(const unsigned* p) {
  const unsigned v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  simt::poll(p, v);  // it may be the kernel's loop that waits
  return v;
}
inline void red_release_gpu_add_u32(unsigned* p, unsigned v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
inline unsigned atom_acq_rel_gpu_add_u32(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
inline uint4 ld_global_cg_v4(const void* p) { return *static_cast<const uint4*>(p); }
inline float ld_global_cg_f32(const float* p) { return *p; }
inline uint4 ld_global_nc_v4(const void* p) { return *static_cast<const uint4*>(p); }
inline void st_global_na_v4(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
inline void st_global_na_v2(void* p, uint2 v) { *static_cast<uint2*>(p) = v; }
inline u64 globaltimer_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
}  // namespace deep_gemm::ptx
