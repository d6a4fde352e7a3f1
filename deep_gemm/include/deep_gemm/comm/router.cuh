// The first part of a fused launch, all threads: what this rank shows its peers, and the plan of where rows go.
//
// Entries are shared out in order: CTA c has those of its warps, each a run of a multiple of 32. A stable counting sort over experts: counts per warp in
// shared memory and per CTA in cta_counts, so that an entry's place depends on the routing only.
#pragma once
#include <deep_gemm/comm/barrier.cuh>
#include <deep_gemm/comm/grid_barrier.cuh>
#include <deep_gemm/comm/routing.cuh>
#include <deep_gemm/kernels/mega_moe_plan.cuh>
#include <deep_gemm/ptx/fence.cuh>

namespace deep_gemm::kernels {

template <class Params, int kThreads>
struct Router {
  static constexpr int kWarps = kThreads / 32;
  using Scan = BlockScan<kThreads>;
  struct Storage {
    typename Scan::Storage scan;
    int first_bad;
    int count[1];  // [kWarps][E], then base [E]; as many as there are
  };

  const Params& params;
  Storage& smem;
  const GridBarrier grid;

  __device__ __forceinline__ void run() {
    MegaMoeControl& control = *pointer<MegaMoeControl>(params.control);
    // Peers may still be reading what this rank published for a staged call whose second half never came.
    if (params.num_ranks > 1)
      grid.sync([&] {
        if (control.pending) pass_barrier(DG_PHASE_reuse, 0);
      });
    const bool aborted = control.aborted;  // then nothing is published, and the plan is empty
    clear_counters();
    if (!aborted) {
      if (params.num_ranks > 1) publish_rows();
      count();
    }
    grid.sync([] {});
    if (!aborted) scatter();
    grid.sync([&] { publish(); });
  }

  // All threads of CTA 0. The launches of all ranks must be fused ones, which their tags say: peers read what staged launches do not publish.
  __device__ __forceinline__ void pass_barrier(dg_u32 tag, dg_u32 pending_after) const {
    if (params.num_ranks > 1) SystemBarrier<Params>{params, *pointer<MegaMoeControl>(params.control), smem.first_bad}.run(tag, pending_after);
    __syncthreads();
  }

 private:
  __device__ __forceinline__ int num_entries() const { return params.num_tokens * params.num_topk; }
  __device__ __forceinline__ int* counts_of_warp(int warp) const { return smem.count + warp * params.num_experts; }
  // Entries of each warp of the grid but the last ones.
  __device__ __forceinline__ int entries_per_warp() const { return static_cast<int>(dg_align(dg_ceil_div(num_entries(), gridDim.x * kWarps), 32)); }
  __device__ __forceinline__ int first_entry() const {
    return min(num_entries(), static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32) * entries_per_warp());
  }
  __device__ __forceinline__ int last_entry() const { return min(num_entries(), first_entry() + entries_per_warp()); }

  __device__ __forceinline__ void clear_counters() const {
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < DG_NUM_READY * params.num_blocks; i += gridDim.x * kThreads)
      pointer<unsigned>(params.ready)[i] = 0;
    auto* grid_counters = pointer<MegaMoeGrid>(params.grid);
    if (blockIdx.x == 0 && threadIdx.x == 0) grid_counters->x_rows = grid_counters->dz_tiles = 0;
  }

  // Backward publishes dy and the routing weights, too.
  __device__ __forceinline__ void publish_rows() const {
    copy_rows(params.x, params.x_offset);
    if constexpr (requires { params.dy_offset; }) {
      copy_rows(params.dy, params.dy_offset);
      auto* weights = peer_pointer<float>(params.symm, params.rank, params.weights_offset);
      for (int i = blockIdx.x * kThreads + threadIdx.x; i < num_entries(); i += gridDim.x * kThreads) weights[i] = pointer<const float>(params.weights)[i];
    }
    ptx::fence_proxy_async();  // peers read rows by bulk copies
  }

  __device__ __forceinline__ void copy_rows(dg_field_pointer source, dg_i64 offset) const {
    constexpr int kInFlight = 4;
    const auto* from = pointer<const uint4>(source);
    auto* to = peer_pointer<uint4>(params.symm, params.rank, offset);
    const dg_i64 num_vectors = static_cast<dg_i64>(params.num_tokens) * params.hidden / 8, stride = static_cast<dg_i64>(gridDim.x) * kThreads;
    for (dg_i64 i = static_cast<dg_i64>(blockIdx.x) * kThreads + threadIdx.x; i < num_vectors; i += kInFlight * stride) {
      uint4 v[kInFlight] = {};
#pragma unroll
      for (int j = 0; j < kInFlight; ++j)
        if (i + j * stride < num_vectors) v[j] = ptx::ld_global_nc_v4(from + i + j * stride);
#pragma unroll
      for (int j = 0; j < kInFlight; ++j)
        if (i + j * stride < num_vectors) ptx::st_global_na_v4(to + i + j * stride, v[j]);
    }
  }

  __device__ __forceinline__ void count() const {
    for (int i = threadIdx.x; i < kWarps * params.num_experts; i += kThreads) smem.count[i] = 0;
    __syncthreads();
    int* mine = counts_of_warp(threadIdx.x / 32);
    for (int entry = first_entry() + threadIdx.x % 32; entry < last_entry(); entry += 32) {
      const int expert = check_entry(params, entry);
      if (expert >= 0) atomicAdd(&mine[expert], 1);  // a count does not depend on the order
    }
    __syncthreads();
    for (int e = threadIdx.x; e < params.num_experts; e += kThreads) {
      int sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += counts_of_warp(w)[e];
      pointer<int>(params.cta_counts)[blockIdx.x * params.num_experts + e] = sum;
    }
  }

  // Entries of an expert: of the CTAs before this one, and of all.
  struct Sums { int before, all; };
  __device__ __forceinline__ Sums sum_over_ctas(int expert) const {
    constexpr int kInFlight = 16;
    const int* counts = pointer<const int>(params.cta_counts) + expert;
    const int num_ctas = gridDim.x, cta = blockIdx.x;
    Sums sums{0, 0};
    for (int first = 0; first < num_ctas; first += kInFlight) {
      int here[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) here[i] = first + i < num_ctas ? counts[(first + i) * params.num_experts] : 0;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        sums.all += here[i];
        if (first + i < cta) sums.before += here[i];
      }
    }
    return sums;
  }

  // Each warp's counts become the places of its first entries in src_list; base[e] is the place of the expert's first.
  __device__ __forceinline__ void counts_to_places(int* base) const {
    const int num_experts = params.num_experts;
    int* offsets = peer_pointer<int>(params.symm, params.rank, params.expert_offsets_offset);
    int so_far = 0;
    for (int first = 0; first < num_experts; first += kThreads) {
      const int expert = first + threadIdx.x;
      const Sums sums = expert < num_experts ? sum_over_ctas(expert) : Sums{0, 0};
      int total;
      const int begin = so_far + Scan::exclusive(smem.scan, sums.all, total);
      so_far += total;
      if (expert >= num_experts) continue;
      base[expert] = begin;
      if (blockIdx.x == 0) offsets[expert] = begin;
      int at = begin + sums.before;
      for (int w = 0; w < kWarps; ++w) {
        int& count = counts_of_warp(w)[expert];
        const int number = count;
        count = at;
        at += number;
      }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) offsets[num_experts] = so_far;
  }

  __device__ __forceinline__ void scatter() const {
    int* base = smem.count + kWarps * params.num_experts;
    counts_to_places(base);
    __syncthreads();
    int* next = counts_of_warp(threadIdx.x / 32);
    int* src_list = peer_pointer<int>(params.symm, params.rank, params.src_list_offset);
    auto* places = peer_pointer<MegaMoePlace>(params.symm, params.rank, params.places_offset);
    for_entries(pointer<const int>(params.slot_expert), first_entry(), last_entry(), [&](int entry, int expert, int rank, int number, bool leader) {
      const int at = take_places(next, expert, number, leader) + rank;
      if (expert >= 0) src_list[at] = entry;
      if (params.num_ranks > 1 && entry < last_entry()) places[entry] = {expert, expert < 0 ? 0 : at - base[expert]};
    });
  }

  // CTA 0, when all CTAs of this rank are done.
  __device__ __forceinline__ void publish() const {
    const bool aborted = pointer<const MegaMoeControl>(params.control)->aborted;
    if (threadIdx.x == 0 && !aborted) publish_id_fault(params, peer_pointer<MegaMoeIdFault>(params.symm, params.rank, params.id_fault_offset));
    __syncthreads();
    pass_barrier(params.publish_tag, 1);
    make_plan<kThreads>(params, smem.scan);
  }
};

}  // namespace deep_gemm::kernels
