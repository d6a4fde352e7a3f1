// The operand ring of a GEMM: TMA fills stages, WGMMA empties them.
//
// Barriers (kStages of each):
//   full   count 1 + kGatherThreads: the load warp's arrive with expected bytes, and each gathering thread's once its copies have landed; completes
//          when both operand tiles have landed. Waited on by the math threads that read the stage.
//   empty  count kReaders * kCluster: one thread of each math warpgroup that reads the stage, in every CTA of the cluster, once its WGMMAs have
//          read it, as the load threads write into each other's stages. Waited on by the load warp.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <deep_gemm/mma/sm90.cuh>

namespace deep_gemm {

template <class TileA, class TileB, int kStages, int kReaders, int kCluster, int kGatherThreads>
struct OperandRing {
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

  struct Tiles {
    alignas(1024) uint8_t a[kStages][TileA::kBytes];
    alignas(1024) uint8_t b[kStages][TileB::kBytes];
  };
  struct Barriers {
    Barrier full[kStages], empty[kStages];

    __device__ __forceinline__ void init_barriers() {
      for (int i = 0; i < kStages; ++i) {
        full[i].init(1 + kGatherThreads);
        empty[i].init(kReaders * kCluster);
      }
    }
  };

  // Where a role stands in the ring. The producer's first pass over the ring does not wait.
  struct Position {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
    __device__ __forceinline__ void advance(int blocks) {
      phase ^= (stage + blocks) / kStages & 1;
      stage = (stage + blocks) % kStages;
    }
    __device__ __forceinline__ static Position after(unsigned blocks) { return {static_cast<int>(blocks % kStages), blocks / kStages % 2}; }
  };
};

// TMA loads of one operand tile whose first element is (mn, k) of group `group`. A tile that both CTAs of a cluster need (`shared`) is loaded in
// parts by each, into the shared memory of both: the same offsets, and the full barrier of the same stage. K-major, a part is one of kCluster
// boxes; MN-major, every kCluster-th box of 64 columns.
template <Major kMajor, int kBlockMN, int kBlockK, int kCluster>
__device__ __forceinline__ void load_operand(const void* map, void* barrier, uint8_t* tile, int mn, int k, int group, bool shared, int cta) {
  using Tile = OperandTile<kMajor, kBlockMN, kBlockK>;
  constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int kBoxMN = kMajor == Major::kK ? kBlockMN / kCluster : kSwizzleElements, kBoxes = kBlockMN / kBoxMN;
  auto* bar = static_cast<uint64_t*>(barrier);
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    uint8_t* box = tile + i * (Tile::kBytes / kBoxes);
    const int first = mn + i * kBoxMN, inner = kMajor == Major::kK ? k : first, row = kMajor == Major::kK ? first : k;
    if (kCluster == 1 || !shared) {
      cute::SM90_TMA_LOAD_3D::copy(map, bar, kHint, box, inner, row, group);
    } else if (i % kCluster == cta) {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map, bar, (1 << kCluster) - 1, kHint, box, inner, row, group);
    }
  }
}

// The same for a tile whose first half comes from the gate weight and whose second half from the up weight, at the same rows; K-major.
template <Major kMajor, int kBlockMN, int kBlockK, int kCluster>
__device__ __forceinline__ void load_gate_up(const void* gate_map, const void* up_map, void* barrier, uint8_t* tile, int mn, int k, int group,
                                             bool shared, int cta) {
  static_assert(kMajor == Major::kK);
  constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int kHalfBytes = OperandTile<kMajor, kBlockMN, kBlockK>::kBytes / 2;
  auto* bar = static_cast<uint64_t*>(barrier);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const void* map = i == 0 ? gate_map : up_map;
    if (kCluster == 1 || !shared) cute::SM90_TMA_LOAD_3D::copy(map, bar, kHint, tile + i * kHalfBytes, k, mn, group);
    else if (i == cta) cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map, bar, (1 << kCluster) - 1, kHint, tile + i * kHalfBytes, k, mn, group);
  }
}

}  // namespace deep_gemm
