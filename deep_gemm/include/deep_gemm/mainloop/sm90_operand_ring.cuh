// The operand ring of a GEMM: TMA fills stages, WGMMA empties them.
//
// Barriers (kStages of each):
//   full   count 1: the load thread's arrive with expected bytes; completes when both operand tiles have landed. Waited on by all math threads.
//   empty  count kMathWarpgroups * kCluster: one thread per math warpgroup of every CTA of the cluster, once its WGMMAs have read the stage, as
//          the load threads write into each other's stages. Waited on by the load thread.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <deep_gemm/mma/sm90.cuh>

namespace deep_gemm {

template <class TileA, class TileB, int kStages, int kMathWarpgroups, int kCluster>
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
        empty[i].init(kMathWarpgroups * kCluster);
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

// TMA loads of one operand tile whose first element is (mn, k) of group `group`, in two halves along mn. A tile that both CTAs of a cluster need
// (`shared`) is loaded half by each, into the shared memory of both: the same offsets, and the full barrier of the same stage.
template <Major kMajor, int kBlockMN, int kBlockK>
__device__ __forceinline__ void load_operand(const void* map, void* barrier, uint8_t* tile, int mn, int k, int group, bool shared, int cta_in_cluster) {
  using Tile = OperandTile<kMajor, kBlockMN, kBlockK>;
  constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int kBoxMN = kMajor == Major::kK ? kBlockMN / 2 : kSwizzleElements, kBoxes = kBlockMN / kBoxMN;
  static_assert(kBoxes % 2 == 0, "an operand tile is loaded in halves");
  auto* bar = static_cast<uint64_t*>(barrier);
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    uint8_t* box = tile + i * (Tile::kBytes / kBoxes);
    const int first = mn + i * kBoxMN, inner = kMajor == Major::kK ? k : first, row = kMajor == Major::kK ? first : k;
    if (!shared) {
      cute::SM90_TMA_LOAD_3D::copy(map, bar, kHint, box, inner, row, group);
    } else if (i / (kBoxes / 2) == cta_in_cluster) {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map, bar, /*both CTAs*/ 3, kHint, box, inner, row, group);
    }
  }
}

}  // namespace deep_gemm
