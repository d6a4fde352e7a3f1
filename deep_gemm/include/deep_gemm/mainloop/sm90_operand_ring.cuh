// The operand ring of a GEMM: TMA fills stages, WGMMA empties them.
//
// Barriers (kStages of each):
//   full   count 1: the load thread's arrive with expected bytes; completes when both operand tiles have landed. Waited on by all math threads.
//   empty  count kMathWarpgroups: one elected thread per math warpgroup, once its WGMMAs have read the stage. Waited on by the load thread.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <deep_gemm/mma/sm90.cuh>

namespace deep_gemm {

template <class TileA, class TileB, int kStages, int kMathWarpgroups>
struct OperandRing {
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  static constexpr uint32_t kStageBytes = TileA::kBytes + TileB::kBytes;

  struct Storage {
    alignas(1024) uint8_t a[kStages][TileA::kBytes];
    alignas(1024) uint8_t b[kStages][TileB::kBytes];
    Barrier full[kStages], empty[kStages];

    __device__ __forceinline__ void init_barriers() {
      for (int i = 0; i < kStages; ++i) {
        full[i].init(1);
        empty[i].init(kMathWarpgroups);
      }
      cutlass::arch::fence_barrier_init();
    }
  };

  // Where a role stands in the ring. The producer's first pass over the ring does not wait.
  struct Position {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  };
};

// TMA loads of one operand tile whose first element is (mn, k) of group `group`.
template <Major kMajor, int kBlockMN, int kBlockK>
__device__ __forceinline__ void load_operand(const void* map, void* barrier, uint8_t* tile, int mn, int k, int group) {
  using Tile = OperandTile<kMajor, kBlockMN, kBlockK>;
  auto* bar = static_cast<uint64_t*>(barrier);
  const uint64_t hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  if constexpr (kMajor == Major::kK) {
    cute::SM90_TMA_LOAD_3D::copy(map, bar, hint, tile, k, mn, group);
  } else {
#pragma unroll
    for (int i = 0; i < kBlockMN / kSwizzleElements; ++i)
      cute::SM90_TMA_LOAD_3D::copy(map, bar, hint, tile + i * Tile::kBoxBytes, mn + i * kSwizzleElements, k, group);
  }
}

}  // namespace deep_gemm
