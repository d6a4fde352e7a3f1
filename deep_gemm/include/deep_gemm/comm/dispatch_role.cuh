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
  static constexpr bool kHasDy = requires(typename Traits::Params p) { p.dy_rows; };
  static constexpr int kMetaCounter = kHasDy ? DG_READY_dy : DG_READY_x;  // whose rows' meta data is written
  static constexpr int kSlots = DG_DISPATCH_SLOTS, kChunk = DG_DISPATCH_CHUNK, kNobody = -1, kFar = 0x7fffffff;

  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;
  const int warp;  // of this CTA's dispatch warps
  unsigned loaded = 0, stored = 0;  // chunks so far; chunk i lies in slot i % kSlots

 protected:
  // visit() in every round, with the pool free for it; then the round counts as left.
  template <class Visit>
  __device__ __forceinline__ void for_rounds(const Visit& visit) {
    set_round(0);
    while (window() < virtual_rows()) {
      if (barriers().round > 0) wait_for_pool(barriers().round - 1);
      visit();
      __syncwarp();
      if (lane() == 0) Traits::leave_round(params, barriers().round);
      set_round(barriers().round + 1);
    }
  }
  // All lanes have read the round before it changes, and see the new one.
  __device__ __forceinline__ void set_round(int round) const {
    __syncwarp();
    if (lane() == 0) barriers().round = round;
    __syncwarp();
  }
  // First virtual row of the present round.
  __device__ __forceinline__ int window() const { return barriers().round * params.capacity_rows; }
  // Read every time: not worth a register.
  __device__ __forceinline__ int virtual_rows() const { return pointer<const volatile int>(params.group_ends)[params.num_local_experts - 1]; }
  __device__ __forceinline__ int rows_of_round() const { return min(virtual_rows() - window(), params.capacity_rows); }

  // All rows of the round that are this warp's. What is copied: kCounter, DG_READY_x or DG_READY_dy. alone: the CTA's other warp has another task.
  template <int kCounter>
  __device__ __forceinline__ void copy_round(bool alone) {
    for (int first = (alone ? static_cast<int>(blockIdx.x) : grid_warp()) * kRows; first < rows_of_round();
         first += (alone ? static_cast<int>(gridDim.x) : grid_warps()) * kRows) {
      const Item item = take_rows<kCounter == kMetaCounter>(window(), first);
      copy<kCounter>(item);
      count<kCounter>(item, window());
    }
  }
  // Of the warp's number only that number is kept in a register.
  __device__ __forceinline__ int warp_anew() const {
    int number = warp;
    ptx::forget(number);
    return number;
  }
  __device__ __forceinline__ DispatchBarriers& barriers() const { return smem.dispatch_barriers[warp_anew()]; }
  __device__ __forceinline__ uint8_t* slot(int i) const { return smem.dispatch[warp_anew()].slot[i]; }
  __device__ __forceinline__ int grid_warp() const { return static_cast<int>(blockIdx.x) * DG_DISPATCH_WARPS + warp_anew(); }
  __device__ __forceinline__ static int grid_warps() { return static_cast<int>(gridDim.x) * DG_DISPATCH_WARPS; }

  // A token of rank `source` (kNobody: nothing to do), the rows of the pool that this lane stores it to.
  struct Item {
    int source, token, row[kCopies];
  };

  __device__ __forceinline__ static int lane() { return ptx::thread_index_anew() % 32; }

  // Until everybody has left `round`.
  __device__ __forceinline__ void wait_for_pool(int round) const {
    const unsigned expected = Traits::round_leavers();
    if (lane() == 0)
      wait_for_counter(Traits::ready(params, DG_READY_round_left, round), params.timeout_ns, [=](unsigned v) { return v >= expected; });
    __syncwarp();
    ptx::fence_proxy_async();
  }

  template <bool kMeta>
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
      if (lane() % kLanes == 0) {
        item.row[0] = row;
        if constexpr (kMeta) store_meta(item.source, row, entry);
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
  template <bool kMeta>
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
      if (kMeta && item.row[i] != kNobody) store_meta(item.source, item.row[i], item.token * params.num_topk + i * kLanes + lane() % kLanes);
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

  template <bool kMeta>
  __device__ __forceinline__ Item take_rows(int window, int first) const {
    const int row = first + lane() / kLanes;
    Item item = locate<kMeta>(window, row);
    leave_to_first<kMeta>(item, row);
    return item;
  }

  template <int kCounter>
  __device__ __forceinline__ void copy(const Item& item) {
    unsigned rows = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows |= (__shfl_sync(~0u, item.source, r * kLanes) != kNobody) << r;
    Cursor ahead{rows}, here{rows};
    while (here.rows) {
      while (ahead.rows && loaded - stored < kSlots - 1) load<kCounter>(item, ahead);
      store<kCounter>(item, here);
      if (ahead.rows) {
        ptx::bulk_wait_read<1>();  // the slot before this one is free
        __syncwarp();
      }
    }
  }

  // The rows are there.
  template <int kCounter>
  __device__ __forceinline__ void count(const Item& item, int window) const {
    ptx::bulk_wait<0>();
    ptx::fence_proxy_async();
    unsigned number = 0;
#pragma unroll
    for (int to : item.row) {
      if (to == kNobody) continue;
      ptx::red_release_gpu_add_u32(Traits::ready(params, kCounter, (window + to) / DG_MEGA_MOE_ROW_ALIGN), 1);
      ++number;
    }
    if constexpr (kHasDy)  // weight gradients wait for all rows of x
      if (kCounter == DG_READY_x && number) ptx::red_release_gpu_add_u32(&pointer<MegaMoeGrid>(params.grid)->x_rows, number);
  }

  // This rank's own tokens, or what a peer has published.
  template <int kCounter>
  __device__ __forceinline__ const char* source_of(int rank) const {
    if constexpr (kCounter == DG_READY_x) return rank == params.rank ? pointer<const char>(params.x) : peer_pointer<const char>(params.symm, rank, params.x_offset);
    else return rank == params.rank ? pointer<const char>(params.dy) : peer_pointer<const char>(params.symm, rank, params.dy_offset);
  }
  template <int kCounter>
  __device__ __forceinline__ char* pool() const {
    if constexpr (kCounter == DG_READY_x) return pointer<char>(params.x_rows);
    else return pointer<char>(params.dy_rows);
  }

  template <int kCounter>
  __device__ __forceinline__ void load(const Item& item, Cursor& at) {
    const int first_lane = at.row() * kLanes, source = __shfl_sync(~0u, item.source, first_lane), token = __shfl_sync(~0u, item.token, first_lane);
    if (lane() == 0) {
      const int slot = loaded % kSlots, bytes = min(kChunk, row_bytes() - at.byte);
      barriers().full[slot].arrive_and_expect_tx(bytes);
      ptx::bulk_load(this->slot(slot), source_of<kCounter>(source) + static_cast<dg_i64>(token) * row_bytes() + at.byte, bytes, &barriers().full[slot]);
    }
    ++loaded;
    at.advance(row_bytes());
  }

  template <int kCounter>
  __device__ __forceinline__ void store(const Item& item, Cursor& at) {
    const int slot = stored % kSlots;
    barriers().full[slot].wait(stored / kSlots % 2);
    if (lane() / kLanes == at.row()) {
#pragma unroll
      for (int to : item.row)
        if (to != kNobody)
          ptx::bulk_store(pool<kCounter>() + static_cast<dg_i64>(to) * row_bytes() + at.byte, this->slot(slot),
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
    this->for_rounds([&] { this->template copy_round<DG_READY_x>(false); });
  }
};

// A round that recomputes z needs x first and dy soon after: one warp copies x, the other dy. Else x comes after all of dy, as only the weight
// gradients read it. Last, dp of the round goes out.
template <class Traits>
struct BackwardDispatch : DispatchRole<Traits> {
  using Base = DispatchRole<Traits>;

  __device__ __forceinline__ void run() {
    const auto& params = this->params;
    static_assert(DG_DISPATCH_WARPS == 2);
    this->for_rounds([&] {
      if (!recomputes() || this->warp == 1) this->template copy_round<DG_READY_dy>(recomputes());
      if (recomputes() ? this->warp == 0 : params.wants_dw13) this->template copy_round<DG_READY_x>(recomputes());
      if (params.wants_dp) push_dp(this->window());
    });
  }

 private:
  __device__ __forceinline__ bool recomputes() const { return this->barriers().round >= this->params.saved_rounds; }

  // The partial sums of each row, in the order of the column tiles, to the owner of its token.
  __device__ __forceinline__ void push_dp(int window) const {
    const auto& params = this->params;
    for (int first = this->grid_warp() * DG_MEGA_MOE_ROW_ALIGN; first < this->rows_of_round(); first += this->grid_warps() * DG_MEGA_MOE_ROW_ALIGN) {
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
