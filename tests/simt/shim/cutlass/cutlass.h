#pragma once
#include "hopper.h"
namespace cutlass {
inline int canonical_warp_idx_sync() { return __shfl_sync(~0u, int(threadIdx.x / 32), 0); }
inline int canonical_warp_idx() { return threadIdx.x / 32; }
inline int canonical_warp_group_idx() { return __shfl_sync(~0u, int(threadIdx.x / 128), 0); }
}  // namespace cutlass
