// ptx/bulk_copy.cuh on the CPU.
#pragma once
#include "hopper.h"

namespace deep_gemm::ptx {
inline void check_bulk(const void* global, unsigned bytes) {
  if (bytes == 0 || bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) simt::fail(simt::text("bulk copy of %u bytes at %p: multiples of 16", bytes, global));
}
inline void bulk_load(void* smem, const void* global, unsigned bytes, void* mbarrier) {
  check_bulk(global, bytes);
  simt::load_box(simt::linear_box(const_cast<void*>(global), bytes), smem, mbarrier, simt::only_this_cta());
}
inline void bulk_store(void* global, const void* smem, unsigned bytes) {
  check_bulk(global, bytes);
  simt::store_box(simt::linear_box(global, bytes), smem, simt::Store::kWrite, 0);
}
inline void bulk_commit() { simt::commit_stores(); }
template <int kLeft> void bulk_wait_read() { simt::wait_for_stores(kLeft, false); }
template <int kLeft> void bulk_wait() { simt::wait_for_stores(kLeft, true); }
}  // namespace deep_gemm::ptx
