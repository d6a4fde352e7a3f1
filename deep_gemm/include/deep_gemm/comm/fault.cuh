// Faults seen on the device: one record per family in pinned host memory, which the host reads without a synchronisation.
#pragma once
#include <deep_gemm/layout/mega_moe_params.h>
#include <deep_gemm/ptx/memory.cuh>

namespace deep_gemm {

template <class T>
__device__ __forceinline__ T* pointer(dg_field_pointer address) { return reinterpret_cast<T*>(address); }

// Region of rank `rank`'s slab.
template <class T>
__device__ __forceinline__ T* peer_pointer(const dg_field_peers& symm, int rank, dg_i64 offset) {
  return reinterpret_cast<T*>(symm.address[rank] + offset);
}

// Keeps the first fault until the host has read it and set kind back to none. One thread of one kernel at a time.
__device__ __forceinline__ void record_fault(MegaMoeFault* record, MegaMoeFault fault) {
  if (*const_cast<volatile dg_u32*>(&record->kind) != DG_FAULT_none) return;
  const dg_u32 kind = fault.kind;
  fault.kind = DG_FAULT_none;
  *record = fault;
  // Pairs with the host's read of kind (mega/staged/faults.py): the host sees a kind only with the rest of its record.
  ptx::st_release_sys_u32(&record->kind, kind);
}

}  // namespace deep_gemm
