#pragma once
#include "hopper.h"
namespace cute {
inline uint32_t elect_one_sync() { return simt::exchange(0), threadIdx.x % 32 == 0; }
inline void cluster_sync() { simt::sync_cluster(); }
inline uint32_t block_rank_in_cluster() { return simt::cta->rank; }
}  // namespace cute
