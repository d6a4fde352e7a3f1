// What a rank shows its peers before the publish barrier: rows of x and dy, and its routing as a list of entries sorted by expert.
//
// The sort is a stable counting sort in three kernels, so that the order never depends on timing:
//   count    per block of DG_MEGA_MOE_ROUTE_BLOCK entries: checked ids, weights, entries per expert
//   offsets  one CTA: exclusive sums over blocks (in place) and over experts
//   scatter  per block: an entry goes to offsets[expert] + entries of the expert in earlier blocks, warps, and lanes
// After a failed barrier nothing is published any more: a late peer may still be reading.
#pragma once
#include <deep_gemm/comm/block_scan.cuh>
#include <deep_gemm/comm/routing.cuh>
#include <deep_gemm/comm/rows.cuh>

namespace deep_gemm::kernels {

__device__ __forceinline__ bool is_aborted(dg_field_pointer control) { return pointer<const MegaMoeControl>(control)->aborted; }

template <class Config>
__device__ __forceinline__ void mega_moe_copy(const MegaMoeCopyParams& params) {
  if (is_aborted(params.control)) return;
  const dg_i64 stride = static_cast<dg_i64>(gridDim.x) * blockDim.x;
  for (dg_i64 i = static_cast<dg_i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < params.num_vectors; i += stride) {
    const uint4 first = ptx::ld_global_nc_v4(pointer<const uint4>(params.first) + i);
    if (params.second) ptx::st_global_na_v4(pointer<uint4>(params.second_out) + i, ptx::ld_global_nc_v4(pointer<const uint4>(params.second) + i));
    ptx::st_global_na_v4(pointer<uint4>(params.first_out) + i, first);
  }
}

template <class Config>
__device__ __forceinline__ void mega_moe_route_count(const MegaMoeRouteParams& params) {
  if (is_aborted(params.control)) return;
  extern __shared__ int count[];  // [E]
  for (int e = threadIdx.x; e < params.num_experts; e += Config::kThreads) count[e] = 0;
  __syncthreads();
  const int begin = blockIdx.x * DG_MEGA_MOE_ROUTE_BLOCK, end = min(begin + DG_MEGA_MOE_ROUTE_BLOCK, params.num_entries);
  for (int entry = begin + threadIdx.x; entry < end; entry += Config::kThreads) {
    const int expert = check_entry(params, entry);
    if (expert >= 0) atomicAdd(&count[expert], 1);  // a count does not depend on the order
    pointer<float>(params.weights)[entry] = pointer<const float>(params.topk_weights)[entry];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < params.num_experts; e += Config::kThreads)
    pointer<int>(params.block_counts)[static_cast<dg_i64>(blockIdx.x) * params.num_experts + e] = count[e];
}

// block_counts[b][e] becomes the entries of e before block b; returns how many there are in all.
__device__ __forceinline__ int exclusive_over_blocks(const MegaMoeRouteParams& params, int expert) {
  constexpr int kInFlight = 8;
  int* count = pointer<int>(params.block_counts) + expert;
  int sum = 0;
  for (int first = 0; first < params.num_blocks; first += kInFlight) {
    int here[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) here[i] = first + i < params.num_blocks ? count[static_cast<dg_i64>(first + i) * params.num_experts] : 0;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i < params.num_blocks) count[static_cast<dg_i64>(first + i) * params.num_experts] = sum;
      sum += here[i];
    }
  }
  return sum;
}

template <class Config>
__device__ __forceinline__ void mega_moe_route_offsets(const MegaMoeRouteParams& params) {
  if (is_aborted(params.control)) return;
  using Scan = BlockScan<Config::kThreads>;
  __shared__ typename Scan::Storage scan;
  int* offsets = pointer<int>(params.expert_offsets);
  int base = 0;
  for (int first = 0; first < params.num_experts; first += Config::kThreads) {
    const int expert = first + threadIdx.x, count = expert < params.num_experts ? exclusive_over_blocks(params, expert) : 0;
    int total;
    const int before = Scan::exclusive(scan, count, total);
    if (expert < params.num_experts) offsets[expert] = base + before;
    base += total;
  }
  if (threadIdx.x > 0) return;
  offsets[params.num_experts] = base;
  publish_id_fault(params, pointer<MegaMoeIdFault>(params.id_fault));
}

// This warp's entries in its block.
template <class Visit>
__device__ __forceinline__ void for_entries_of_warp(const MegaMoeRouteParams& params, const Visit& visit) {
  constexpr int kPerWarp = DG_MEGA_MOE_ROUTE_BLOCK / DG_MEGA_MOE_ROUTE_WARPS;
  const int begin = blockIdx.x * DG_MEGA_MOE_ROUTE_BLOCK + threadIdx.x / 32 * kPerWarp;
  for_entries(pointer<const int>(params.slot_expert), begin, min(begin + kPerWarp, params.num_entries), visit);
}

template <class Config>
__device__ __forceinline__ void mega_moe_route_scatter(const MegaMoeRouteParams& params) {
  if (is_aborted(params.control)) return;
  static_assert(Config::kThreads == 32 * DG_MEGA_MOE_ROUTE_WARPS);
  extern __shared__ int next[];  // [warps][E]: first counts, then where the warp's next entry of the expert goes
  const int num_experts = params.num_experts;
  int* mine = next + threadIdx.x / 32 * num_experts;
  for (int i = threadIdx.x; i < DG_MEGA_MOE_ROUTE_WARPS * num_experts; i += Config::kThreads) next[i] = 0;
  __syncthreads();
  for_entries_of_warp(params, [&](int, int expert, int, int number, bool leader) {
    if (leader) mine[expert] += number;
  });
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += Config::kThreads) {
    int at = pointer<const int>(params.expert_offsets)[e] +
             pointer<const int>(params.block_counts)[static_cast<dg_i64>(blockIdx.x) * num_experts + e];
#pragma unroll
    for (int w = 0; w < DG_MEGA_MOE_ROUTE_WARPS; ++w) {
      const int count = next[w * num_experts + e];
      next[w * num_experts + e] = at;
      at += count;
    }
  }
  __syncthreads();
  for_entries_of_warp(params, [&](int entry, int expert, int rank, int number, bool leader) {
    const int at = take_places(mine, expert, number, leader);
    if (expert >= 0) pointer<int>(params.src_list)[at + rank] = entry;
  });
}

}  // namespace deep_gemm::kernels
