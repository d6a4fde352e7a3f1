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

// The end of the sequence is a tile that no order has.
__device__ __forceinline__ bool is_end(const dg_gemm_tile& tile) { return tile.group < 0; }
__device__ __forceinline__ void make_end(dg_gemm_tile& tile) { tile.group = -1; }

template <class Tile, int kReaders>
struct TileRing {
  static constexpr int kSlots = DG_GEMM_TILE_SLOTS;
  using Barrier = cutlass::arch::ClusterBarrier;

  Tile tile[kSlots];
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
    bool more = true;
    for (int number = 0; more; ++number) {
      const int slot = slot_of(number);
      empty[slot].wait(phase_of(number) ^ 1);
      more = walk(tile[slot]);
      if (!more) make_end(tile[slot]);
      full[slot].arrive();
    }
  }

  // A reading warp. `next` gives the tile, or nullptr after the last one; the tile stays until `release`, which lanes call together.
  struct Reader {
    TileRing& ring;
    int number = 0;  // of the tile that `next` gives

    __device__ __forceinline__ const Tile* next() {
      ring.full[slot_of(number)].wait(phase_of(number));
      const Tile* tile = &ring.tile[slot_of(number)];
      return is_end(*tile) ? nullptr : tile;
    }
    __device__ __forceinline__ void release() {
      ptx::forget(number);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ring.empty[slot_of(number)].arrive();
      ++number;
    }
  };
};

}  // namespace deep_gemm
