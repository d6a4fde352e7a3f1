// Peers' counts -> where the rows of each (local expert, source rank) lie in the virtual pool. One CTA; the same result on every run.
//
// After a failed publish barrier the peers' counts mean nothing: the plan is then empty, and everything behind it has no rows.
#pragma once
#include <deep_gemm/comm/block_scan.cuh>
#include <deep_gemm/comm/fault.cuh>

namespace deep_gemm::kernels {

// Params: symm, expert_offsets_offset, id_fault_offset, group_ends, segment_begin, segment_source, control, faults, rank, num_ranks, num_local_experts.

// Entries of source rank `source` for one of our experts: [begin, begin + count) in its src_list.
struct Segment { int begin, count; };

template <class Params>
__device__ __forceinline__ Segment load_segment(const Params& params, int source, int local_expert) {
  const int* offsets = peer_pointer<const int>(params.symm, source, params.expert_offsets_offset) +
                       params.rank * params.num_local_experts + local_expert;
  return {offsets[0], offsets[1] - offsets[0]};
}

// Writes the segments of one expert, which begins at virtual row `begin`.
template <class Params>
__device__ __forceinline__ void write_segments(const Params& params, int local_expert, int begin) {
  for (int source = 0; source < params.num_ranks; ++source) {
    const Segment segment = load_segment(params, source, local_expert);
    const int i = local_expert * params.num_ranks + source;
    pointer<int>(params.segment_begin)[i] = begin;
    pointer<int>(params.segment_source)[i] = segment.begin;
    begin += segment.count;
  }
  pointer<int>(params.group_ends)[local_expert] = begin;
}

template <class Params>
__device__ __forceinline__ void write_empty_plan(const Params& params, int num_threads) {
  for (int i = threadIdx.x; i < params.num_local_experts * params.num_ranks; i += num_threads) {
    pointer<int>(params.segment_begin)[i] = 0;
    pointer<int>(params.segment_source)[i] = 0;
  }
  for (int e = threadIdx.x; e < params.num_local_experts; e += num_threads) pointer<int>(params.group_ends)[e] = 0;
}

// A bad id on any rank is recorded on every rank, so that all raise.
template <class Params>
__device__ __forceinline__ void record_id_faults(const Params& params) {
  for (int source = 0; source < params.num_ranks; ++source) {
    const MegaMoeIdFault fault = *peer_pointer<const MegaMoeIdFault>(params.symm, source, params.id_fault_offset);
    if (fault.entry < 0) continue;
    record_fault(pointer<MegaMoeFault>(params.faults) + DG_FAULT_RECORD_ID,
                 {0, fault.value, fault.entry, params.rank, source, 0, 0, DG_FAULT_expert_id});
    return;
  }
}

// All threads of one CTA.
template <int kThreads, class Params>
__device__ __forceinline__ void make_plan(const Params& params, typename BlockScan<kThreads>::Storage& scan) {
  using Scan = BlockScan<kThreads>;
  if (pointer<const MegaMoeControl>(params.control)->aborted) return write_empty_plan(params, kThreads);
  int base = 0;
  for (int first = 0; first < params.num_local_experts; first += kThreads) {
    const int expert = first + threadIdx.x;
    int rows = 0, total;
    if (expert < params.num_local_experts)
      for (int source = 0; source < params.num_ranks; ++source) rows += load_segment(params, source, expert).count;
    const int before = Scan::exclusive(scan, static_cast<int>(dg_align(rows, DG_MEGA_MOE_ROW_ALIGN)), total);
    if (expert < params.num_local_experts) write_segments(params, expert, base + before);
    base += total;
  }
  if (threadIdx.x == 0) record_id_faults(params);
}

template <class Config>
__device__ __forceinline__ void mega_moe_plan(const MegaMoePlanParams& params) {
  __shared__ typename BlockScan<Config::kThreads>::Storage scan;
  make_plan<Config::kThreads>(params, scan);
}

}  // namespace deep_gemm::kernels
