// One thread of a CTA walks the tile order and hands the tiles to the CTA's other roles through shared memory, so that math warps, whose
// registers hold accumulators, keep nothing of the schedule.
//
// Barriers (kSlots of each):
//   full   count 1: the schedule thread, once the slot's tile is written. Waited on by every reader.
//   empty  count kReaders: each reading warp, once it has no more use for the tile. Waited on by the schedule thread.
#pragma once
#include <cutlass/arch/barrier.h>
#include <deep_gemm/ptx/registers.cuh>
#include <deep_gemm/schedule/gemm_tiles.h>

namespace deep_gemm {

template <class Tile, int kReaders>
struct TileRing {
  static constexpr int kSlots = DG_GEMM_TILE_SLOTS;
  using Barrier = cutlass::arch::ClusterBarrier;

  Tile tile[kSlots];
  int exists[kSlots];  // 0: the sequence has ended
  Barrier full[kSlots], empty[kSlots];

  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < kSlots; ++i) {
      full[i].init(1);
      empty[i].init(kReaders);
    }
  }

  // Tile number `number` of this CTA lies in slot number % kSlots, in that slot's phase number / kSlots.
  __device__ __forceinline__ static int slot_of(int number) { return number % kSlots; }
  __device__ __forceinline__ static uint32_t phase_of(int number) { return number / kSlots % 2; }

  // The schedule thread. walk(tile) gives the next tile; false: there is none.
  template <class Walk>
  __device__ __forceinline__ void run(Walk&& walk) {
    for (int number = 0, more = 1; more; ++number) {
      const int slot = slot_of(number);
      empty[slot].wait(phase_of(number) ^ 1);
      exists[slot] = more = walk(tile[slot]);
      full[slot].arrive();
    }
  }

  // A reading warp. `next`: whether there is another tile, which is `tile()` until `release`; lanes call together.
  struct Reader {
    TileRing& ring;
    int number = 0;

    __device__ __forceinline__ bool next() {
      ring.full[slot_of(number)].wait(phase_of(number));
      return ring.exists[slot_of(number)];
    }
    __device__ __forceinline__ const Tile& tile() const { return ring.tile[slot_of(number)]; }
    __device__ __forceinline__ void release() {
      ptx::forget(number);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ring.empty[slot_of(number)].arrive();
      ++number;
    }
  };
};

}  // namespace deep_gemm
