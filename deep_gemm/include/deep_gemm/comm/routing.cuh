// What both ways of publishing a routing share: ids checked, and the stable places of entries among those of their expert.
#pragma once
#include <deep_gemm/comm/fault.cuh>

namespace deep_gemm {

constexpr int kMaxKey = 0x7fffffff;  // less the entry: the smallest bad entry has the largest key

// Params: topk_idx, idx_bytes, num_experts, slot_expert, control.
template <class Params>
__device__ __forceinline__ dg_i64 load_id(const Params& params, int entry) {
  return params.idx_bytes == 8 ? pointer<const dg_i64>(params.topk_idx)[entry] : pointer<const int>(params.topk_idx)[entry];
}

// The entry's expert, or DG_SLOT_*, which slot_expert then says too.
template <class Params>
__device__ __forceinline__ int check_entry(const Params& params, int entry) {
  const dg_i64 id = load_id(params, entry);
  const bool exists = id >= 0 && id < params.num_experts;
  const int expert = exists ? static_cast<int>(id) : id == DG_SLOT_NONE ? DG_SLOT_NONE : DG_SLOT_INVALID;
  pointer<int>(params.slot_expert)[entry] = expert;
  if (expert == DG_SLOT_INVALID) atomicMax(&pointer<MegaMoeControl>(params.control)->bad_entry_key, kMaxKey - entry);
  return expert;
}

// One thread, when all entries have been checked.
template <class Params>
__device__ __forceinline__ void publish_id_fault(const Params& params, MegaMoeIdFault* fault) {
  int& key = pointer<MegaMoeControl>(params.control)->bad_entry_key;
  const int entry = key == 0 ? -1 : kMaxKey - key;
  *fault = {entry, entry < 0 ? 0 : load_id(params, entry)};
  key = 0;
}

// Entries [begin, end), 32 at a time, all lanes of a warp together: visit(entry, expert or < 0, rank among the lanes with this expert, their number,
// leader: the first of them).
template <class Visit>
__device__ __forceinline__ void for_entries(const int* slot_expert, int begin, int end, const Visit& visit) {
  const int lane = threadIdx.x % 32;
  for (int tile = begin; tile < end; tile += 32) {
    const int entry = tile + lane, expert = entry < end ? slot_expert[entry] : DG_SLOT_NONE;
    const unsigned same = __match_any_sync(~0u, expert), before = same & ((1u << lane) - 1);
    visit(entry, expert, __popc(before), __popc(same), expert >= 0 && before == 0);
    __syncwarp();  // the leaders' updates are seen by the next 32
  }
}

// Inside a visit: the first of the places that `next` has for the lanes with this expert, which take them.
__device__ __forceinline__ int take_places(int* next, int expert, int number, bool leader) {
  const int at = expert < 0 ? 0 : next[expert];
  __syncwarp();  // every lane has read before a leader writes
  if (leader) next[expert] = at + number;
  return at;
}

}  // namespace deep_gemm
