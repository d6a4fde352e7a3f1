// Pulls rows of x, and backward of dy, into the pool while tiles are multiplied.
//
// A warp takes 8 virtual rows at a time, four lanes a row. A row of this rank's own token is copied as it is. Of a peer's token one row, the first in
// the pool, pulls the token once and stores every copy that this rank needs in the present round. Whoever stores a row writes its meta data and
// counts it on its block.
#pragma once
#include <deep_gemm/comm/grid_barrier.cuh>
#include <deep_gemm/kernels/mega_moe_dispatch.cuh>
#include <deep_gemm/kernels/sm90_mega_moe_traits.cuh>
#include <deep_gemm/ptx/fence.cuh>

namespace deep_gemm::kernels {

template <class Traits>
struct DispatchRole {
  static constexpr int kRows = 8, kLanes = 32 / kRows, kCopies = DG_MEGA_MOE_MAX_TOPK / kLanes;  // copies that a lane may have to store
  static constexpr int kSlots = DG_DISPATCH_SLOTS, kChunk = DG_DISPATCH_CHUNK, kNobody = -1, kFar = 0x7fffffff;
  // What is copied: of this rank `own`, of a peer what it has published at `offset`; `rows` of the pool. Counted on `counter` (DG_READY_*).
  struct Payload {
    dg_field_pointer own;
    dg_i64 offset;
    dg_field_pointer rows;
    int counter;
  };

  const typename Traits::Params& params;
  DispatchStorage& storage;
  DispatchBarriers& barriers;
  const int warp, num_warps;  // of all dispatch warps of the grid
  unsigned loaded = 0, stored = 0;  // chunks so far; chunk i lies in slot i % kSlots

 protected:
  // visit(round, first virtual row) of every round, with the pool free for it; after all of them but the last, the round counts as left.
  template <class Visit>
  __device__ __forceinline__ void for_rounds(const Visit& visit) {
    const int end = virtual_rows();
    for (int round = 0, window = 0; window < end; ++round, window += params.capacity_rows) {
      if (round > 0) wait_for_pool(round - 1);
      visit(round, window);
      __syncwarp();
      if (lane() == 0) Traits::leave_round(params, round);
    }
  }
  __device__ __forceinline__ int virtual_rows() const { return pointer<const int>(params.group_ends)[params.num_local_experts - 1]; }
  __device__ __forceinline__ int rows_of_round(int window) const { return min(virtual_rows() - window, params.capacity_rows); }

  // All rows of the round, of one or two payloads. meta: whether they write the rows' meta data, too.
  template <class... Payloads>
  __device__ __forceinline__ void copy_round(int window, bool meta, const Payloads&... payloads) {
    for (int first = warp * kRows; first < rows_of_round(window); first += num_warps * kRows) {
      const Item item = take_rows(window, first, meta);
      (copy(item, window, payloads), ...);
    }
  }

  // A token of rank `source` (kNobody: nothing to do), the rows of the pool that this lane stores it to.
  struct Item {
    int source, token, row[kCopies];
  };

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // Until everybody has left `round`.
  __device__ __forceinline__ void wait_for_pool(int round) const {
    const unsigned expected = Traits::round_leavers();
    if (lane() == 0)
      wait_for_counter(Traits::ready(params, DG_READY_round_left, round), params.timeout_ns, [=](unsigned v) { return v >= expected; });
    __syncwarp();
    ptx::fence_proxy_async();
  }

  __device__ __forceinline__ Item locate(int window, int row, bool meta) const {
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
      if (lane() % kLanes == 0) {
        item.row[0] = row;
        if (meta) store_meta(item.source, row, entry);
      }
    } else {
      fan_out(item, segment_begin, window);
    }
    return item;
  }

  // Backward needs the routing weight.
  __device__ __forceinline__ void store_meta(int source, int row, int entry) const {
    float weight = 0.f;
    if constexpr (requires { params.weights_offset; })
      weight = (source == params.rank ? pointer<const float>(params.weights) : peer_pointer<const float>(params.symm, source, params.weights_offset))[entry];
    store_row_meta(params.row_meta, row, {source, entry, 0, weight});
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
  __device__ __forceinline__ void leave_to_first(Item& item, int row, bool meta) const {
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
      if (meta && item.row[i] != kNobody) store_meta(item.source, item.row[i], item.token * params.num_topk + i * kLanes + lane() % kLanes);
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

  __device__ __forceinline__ Item take_rows(int window, int first, bool meta) const {
    const int row = first + lane() / kLanes;
    Item item = locate(window, row, meta);
    leave_to_first(item, row, meta);
    return item;
  }

  __device__ __forceinline__ void copy(const Item& item, int window, const Payload& payload) {
    unsigned rows = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows |= (__shfl_sync(~0u, item.source, r * kLanes) != kNobody) << r;
    Cursor ahead{rows}, here{rows};
    while (here.rows) {
      while (ahead.rows && loaded - stored < kSlots - 1) load(item, payload, ahead);
      store(item, payload, here);
      if (ahead.rows) {
        ptx::bulk_wait_read<1>();  // the slot before this one is free
        __syncwarp();
      }
    }
    ptx::bulk_wait<0>();
    ptx::fence_proxy_async();
    unsigned count = 0;
#pragma unroll
    for (int to : item.row) {
      if (to == kNobody) continue;
      ptx::red_release_gpu_add_u32(Traits::ready(params, payload.counter, (window + to) / DG_MEGA_MOE_ROW_ALIGN), 1);
      ++count;
    }
    if constexpr (requires { params.dy_rows; })  // weight gradients wait for all rows of x
      if (payload.counter == DG_READY_x && count) ptx::red_release_gpu_add_u32(&pointer<MegaMoeGrid>(params.grid)->x_rows, count);
  }

  __device__ __forceinline__ void load(const Item& item, const Payload& payload, Cursor& at) {
    const int first_lane = at.row() * kLanes, source = __shfl_sync(~0u, item.source, first_lane), token = __shfl_sync(~0u, item.token, first_lane);
    if (lane() == 0) {
      const char* from = source == params.rank ? pointer<const char>(payload.own) : peer_pointer<const char>(params.symm, source, payload.offset);
      const int slot = loaded % kSlots, bytes = min(kChunk, row_bytes() - at.byte);
      barriers.full[slot].arrive_and_expect_tx(bytes);
      ptx::bulk_load(storage.slot[slot], from + static_cast<dg_i64>(token) * row_bytes() + at.byte, bytes, &barriers.full[slot]);
    }
    ++loaded;
    at.advance(row_bytes());
  }

  __device__ __forceinline__ void store(const Item& item, const Payload& payload, Cursor& at) {
    const int slot = stored % kSlots;
    barriers.full[slot].wait(stored / kSlots % 2);
    if (lane() / kLanes == at.row()) {
#pragma unroll
      for (int to : item.row)
        if (to != kNobody)
          ptx::bulk_store(pointer<char>(payload.rows) + static_cast<dg_i64>(to) * row_bytes() + at.byte, storage.slot[slot],
                          min(kChunk, row_bytes() - at.byte));
    }
    ptx::bulk_commit();
    ++stored;
    at.advance(row_bytes());
  }
};

template <class Traits>
struct ForwardDispatch : DispatchRole<Traits> {
  using Base = DispatchRole<Traits>;

  __device__ __forceinline__ void run() {
    const auto& params = this->params;
    const typename Base::Payload x{params.x, params.x_offset, params.x_rows, DG_READY_x};
    this->for_rounds([&](int, int window) { this->copy_round(window, true, x); });
  }
};

// A round that recomputes z needs x with dy; else x comes after all of dy, as only the weight gradients read it. Last, dp of the round goes out.
template <class Traits>
struct BackwardDispatch : DispatchRole<Traits> {
  using Base = DispatchRole<Traits>;

  __device__ __forceinline__ void run() {
    const auto& params = this->params;
    const typename Base::Payload x{params.x, params.x_offset, params.x_rows, DG_READY_x}, dy{params.dy, params.dy_offset, params.dy_rows, DG_READY_dy};
    this->for_rounds([&](int round, int window) {
      if (round >= params.saved_rounds) {
        this->copy_round(window, true, x, dy);
      } else {
        this->copy_round(window, true, dy);
        if (params.wants_dw13) this->copy_round(window, false, x);
      }
      if (params.wants_dp) push_dp(window);
    });
  }

 private:
  // The partial sums of each row, in the order of the column tiles, to the owner of its token.
  __device__ __forceinline__ void push_dp(int window) const {
    const auto& params = this->params;
    for (int first = this->warp * DG_MEGA_MOE_ROW_ALIGN; first < this->rows_of_round(window); first += this->num_warps * DG_MEGA_MOE_ROW_ALIGN) {
      const unsigned expected = Traits::dp_tiles(params);
      if (Base::lane() == 0)
        wait_for_counter(Traits::ready(params, DG_READY_dgrad2, (window + first) / DG_MEGA_MOE_ROW_ALIGN), params.timeout_ns,
                         [=](unsigned v) { return v >= expected; });
      __syncwarp();
      const int segments = params.num_local_experts * params.num_ranks;
      const int expert = find_segment(pointer<const int>(params.segment_begin), segments, window + first) / params.num_ranks;
      const int end = min(DG_MEGA_MOE_ROW_ALIGN, pointer<const int>(params.group_ends)[expert] - window - first);
#pragma unroll 1
      for (int i = Base::lane(); i < end; i += 32) push_dp_of(first + i);
    }
  }

  __device__ __forceinline__ void push_dp_of(int row) const {
    const auto& params = this->params;
    const uint4 meta = ptx::ld_global_cg_v4(pointer<const uint4>(params.row_meta) + row);  // source, entry
    const float* partial = pointer<const float>(params.row_dp) + row;
    float sum = 0.f;
    for (unsigned i = 0; i < Traits::dp_tiles(params); ++i) sum += ptx::ld_global_cg_f32(partial + i * params.row_dp_stride);
    peer_pointer<float>(params.symm, static_cast<int>(meta.x), params.dp_offset)[meta.y] = sum;
  }
};

}  // namespace deep_gemm::kernels
