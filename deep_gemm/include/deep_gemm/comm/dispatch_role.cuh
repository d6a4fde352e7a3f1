// Pulls rows of x into the pool while tiles are multiplied.
//
// A warp takes 8 virtual rows at a time, four lanes a row. A row of this rank's own token is copied as it is. Of a peer's token one row, the first in
// the pool, pulls the token once and stores every copy that this rank needs in the present round. Whoever stores a row writes its meta data and
// counts it on x_ready of its block.
#pragma once
#include <deep_gemm/comm/grid_barrier.cuh>
#include <deep_gemm/kernels/mega_moe_dispatch.cuh>
#include <deep_gemm/kernels/sm90_mega_moe_traits.cuh>
#include <deep_gemm/ptx/fence.cuh>

namespace deep_gemm::kernels {

template <class Config>
struct DispatchRole {
  using Traits = MegaMoeTraits<Config>;
  static constexpr int kRows = 8, kLanes = 32 / kRows, kCopies = DG_MEGA_MOE_MAX_TOPK / kLanes;  // copies that a lane may have to store
  static constexpr int kSlots = DG_DISPATCH_SLOTS, kChunk = DG_DISPATCH_CHUNK, kNobody = -1, kFar = 0x7fffffff;

  const typename Traits::Params& params;
  DispatchStorage& storage;
  DispatchBarriers& barriers;
  const int warp, num_warps;  // of all dispatch warps of the grid
  unsigned loaded = 0, stored = 0;  // chunks so far; chunk i lies in slot i % kSlots

  __device__ __forceinline__ void run() {
    const int end = pointer<const int>(params.group_ends)[params.num_local_experts - 1];
    for (int round = 0, window = 0; window < end; ++round, window += params.capacity_rows) {
      if (round > 0) wait_for_pool(round);
      for (int first = warp * kRows; first < min(end - window, params.capacity_rows); first += num_warps * kRows) copy_rows(window, first);
    }
  }

 private:
  // A token of rank `source` (kNobody: nothing to do), the rows of the pool that this lane stores it to.
  struct Item {
    int source, token, row[kCopies];
  };

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void wait_for_pool(int round) const {
    const unsigned expected = static_cast<unsigned>(round) * gridDim.x * Traits::kMathWarpgroups;
    if (lane() == 0) wait_for_counter(&pointer<MegaMoeGrid>(params.grid)->rounds_done, params.timeout_ns, [=](unsigned v) { return v >= expected; });
    __syncwarp();
    ptx::fence_proxy_async();
  }

  __device__ __forceinline__ Item locate(int window, int row) const {
    Item item{kNobody, 0};
#pragma unroll
    for (int& to : item.row) to = kNobody;
    const int* segment_begin = pointer<const int>(params.segment_begin);
    const int i = find_segment(segment_begin, params.num_local_experts * params.num_ranks, window + row);
    const int expert = i / params.num_ranks, source = i - expert * params.num_ranks, number = window + row - segment_begin[i];
    const int end = source + 1 < params.num_ranks ? segment_begin[i + 1] : pointer<const int>(params.group_ends)[expert];
    if (window + row >= end || row >= params.capacity_rows) return item;
    const int entry = peer_pointer<const int>(params.symm, source, params.src_list_offset)[pointer<const int>(params.segment_source)[i] + number];
    item.source = source;
    item.token = entry / params.num_topk;
    if (source == params.rank) {
      if (lane() % kLanes == 0) take(item, 0, row, entry);
    } else {
      fan_out(item, segment_begin, window);
    }
    return item;
  }

  __device__ __forceinline__ void take(Item& item, int i, int row, int entry) const {
    item.row[i] = row;
    store_row_meta(params.row_meta, row, {item.source, entry, 0, 0.f});
  }

  // Rows of the round that want this peer's token. Four lanes look at its entries; the first of the rows takes all.
  __device__ __forceinline__ void fan_out(Item& item, const int* segment_begin, int window) const {
    const auto* places = peer_pointer<const MegaMoePlace>(params.symm, item.source, params.places_offset) + item.token * params.num_topk;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int k = i * kLanes + lane() % kLanes;
      if (k >= params.num_topk) continue;
      const MegaMoePlace place = places[k];
      const int expert = place.expert - params.rank * params.num_local_experts;
      if (place.expert < 0 || expert < 0 || expert >= params.num_local_experts) continue;
      const int row = segment_begin[expert * params.num_ranks + item.source] + place.number - window;
      if (row >= 0 && row < params.capacity_rows) item.row[i] = row;
    }
  }

  // Leaves a peer's token to the row that comes first in the pool. All lanes together.
  __device__ __forceinline__ void leave_to_first(Item& item, int row) const {
    int first = kFar;
#pragma unroll
    for (int to : item.row) first = to == kNobody ? first : min(first, to);
    first = min(first, __shfl_xor_sync(~0u, first, 1));
    first = min(first, __shfl_xor_sync(~0u, first, 2));
    if (item.source == kNobody || item.source == params.rank) return;
    if (first != row) {
      item.source = kNobody;
#pragma unroll
      for (int& to : item.row) to = kNobody;
      return;
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      if (item.row[i] != kNobody) take(item, i, item.row[i], item.token * params.num_topk + i * kLanes + lane() % kLanes);
  }

  // Chunks of the batch in order: rows that have something to store, from first to last byte.
  struct Cursor {
    unsigned rows;  // a bit for each that is left
    int byte = 0;
    __device__ __forceinline__ int row() const { return __ffs(rows) - 1; }
    __device__ __forceinline__ void advance(int row_bytes) {
      byte += kChunk;
      if (byte >= row_bytes) byte = 0, rows &= rows - 1;
    }
  };

  __device__ __forceinline__ int row_bytes() const { return 2 * params.hidden; }

  __device__ __forceinline__ void copy_rows(int window, int first) {
    const int row = first + lane() / kLanes;
    Item item = locate(window, row);
    leave_to_first(item, row);
    unsigned rows = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows |= (__shfl_sync(~0u, item.source, r * kLanes) != kNobody) << r;
    Cursor ahead{rows}, here{rows};
    while (here.rows) {
      while (ahead.rows && loaded - stored < kSlots - 1) load(item, ahead);
      store(item, here);
      if (ahead.rows) {
        ptx::bulk_wait_read<1>();  // the slot before this one is free
        __syncwarp();
      }
    }
    ptx::bulk_wait<0>();
    ptx::fence_proxy_async();
#pragma unroll
    for (int to : item.row)
      if (to != kNobody) ptx::red_release_gpu_add_u32(Traits::x_ready(params, (window + to) / DG_MEGA_MOE_ROW_ALIGN), 1);
  }

  __device__ __forceinline__ void load(const Item& item, Cursor& at) {
    const int first_lane = at.row() * kLanes, source = __shfl_sync(~0u, item.source, first_lane), token = __shfl_sync(~0u, item.token, first_lane);
    if (lane() == 0) {
      const char* x = source == params.rank ? pointer<const char>(params.x) : peer_pointer<const char>(params.symm, source, params.x_offset);
      const int slot = loaded % kSlots, bytes = min(kChunk, row_bytes() - at.byte);
      barriers.full[slot].arrive_and_expect_tx(bytes);
      ptx::bulk_load(storage.slot[slot], x + static_cast<dg_i64>(token) * row_bytes() + at.byte, bytes, &barriers.full[slot]);
    }
    ++loaded;
    at.advance(row_bytes());
  }

  __device__ __forceinline__ void store(const Item& item, Cursor& at) {
    const int slot = stored % kSlots;
    barriers.full[slot].wait(stored / kSlots % 2);
    if (lane() / kLanes == at.row()) {
#pragma unroll
      for (int to : item.row)
        if (to != kNobody)
          ptx::bulk_store(pointer<char>(params.x_rows) + static_cast<dg_i64>(to) * row_bytes() + at.byte, storage.slot[slot],
                          min(kChunk, row_bytes() - at.byte));
    }
    ptx::bulk_commit();
    ++stored;
    at.advance(row_bytes());
  }
};

}  // namespace deep_gemm::kernels
