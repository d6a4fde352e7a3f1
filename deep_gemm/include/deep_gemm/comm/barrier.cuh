// Barrier of all ranks by signal words in symmetric memory. Word p of a slab is written by rank p only and only grows (epoch), so that
// nothing is ever reset; the epoch lives in device memory, so that a replayed CUDA graph goes on counting.
#pragma once
#include <deep_gemm/comm/fault.cuh>

namespace deep_gemm {

struct Signal {
  dg_u32 epoch, tag;
  bool abort;

  __device__ __forceinline__ static Signal unpack(ptx::u64 word) {
    return {static_cast<dg_u32>(word), static_cast<dg_u32>(word >> DG_SIGNAL_TAG_SHIFT) & 0x7fffffffu, (word & DG_SIGNAL_ABORT) != 0};
  }
  __device__ __forceinline__ ptx::u64 pack() const {
    return epoch | static_cast<ptx::u64>(tag) << DG_SIGNAL_TAG_SHIFT | (abort ? DG_SIGNAL_ABORT : 0);
  }
};

struct Wait {
  dg_u32 fault;  // DG_FAULT_none: the peer has arrived
  Signal seen;
};

// Waits until `word` says that its writer has reached `expected.epoch`; at most timeout_ns, and no longer once the peer has given up.
__device__ __forceinline__ Wait bounded_wait(const ptx::u64* word, Signal expected, dg_u64 timeout_ns) {
  const ptx::u64 start = ptx::globaltimer_ns();
  for (;;) {
    const Signal seen = Signal::unpack(ptx::ld_acquire_sys_u64(word));  // pairs with the release in SystemBarrier::tell
    const int ahead = static_cast<int>(seen.epoch - expected.epoch);  // wraps
    // Before abort: the peer may have seen the mismatch first and given up over it.
    if (ahead == 0 && seen.tag != expected.tag) return {DG_FAULT_phase_mismatch, seen};
    if (seen.abort) return {DG_FAULT_peer_aborted, seen};
    if (ahead >= 0) return {DG_FAULT_none, seen};
    if (ptx::globaltimer_ns() - start > timeout_ns) return {DG_FAULT_late_peer, seen};
    __nanosleep(64);
  }
}

// One CTA with at least num_ranks threads; thread p speaks with rank p. Params: symm, signals_offset, control, faults, timeout_ns, rank, num_ranks.
template <class Params>
struct SystemBarrier {
  const Params& params;
  MegaMoeControl& control;
  int& first_bad;  // shared memory

  // tag: DG_PHASE_* | detail << DG_TAG_DETAIL_SHIFT; pending_after: control.pending once the barrier is passed.
  __device__ __forceinline__ void run(dg_u32 tag, dg_u32 pending_after) {
    // Every thread reads the same values: thread 0 writes them only after all have passed the first __syncthreads.
    if (control.aborted) return;
    const Signal mine{control.epoch + 1, tag, false};
    const int peer = threadIdx.x;
    const bool active = peer < params.num_ranks;
    if (threadIdx.x == 0) first_bad = params.num_ranks;
    __syncthreads();
    Wait wait{DG_FAULT_none, mine};
    if (active) {
      tell(peer, mine);
      wait = bounded_wait(peer_pointer<ptx::u64>(params.symm, params.rank, params.signals_offset) + peer, mine, params.timeout_ns);
      if (wait.fault != DG_FAULT_none) atomicMin(&first_bad, peer);
    }
    __syncthreads();
    const bool failed = first_bad < params.num_ranks;
    if (failed && active) tell(peer, {mine.epoch, mine.tag, true});
    if (peer == first_bad && active) record(wait, mine);
    if (threadIdx.x == 0) {
      control.epoch = mine.epoch;
      control.pending = pending_after;
      control.aborted = failed;
    }
  }

 private:
  // Release: all that this rank wrote earlier, here and in peers' memory, is visible to the peer once it has seen the word.
  // Stream order, or a grid barrier, makes those writes happen before this; the fence and the release carry them to the system
  // (docs/memory_order.md).
  __device__ __forceinline__ void tell(int peer, Signal signal) const {
    __threadfence_system();
    ptx::st_release_sys_u64(peer_pointer<ptx::u64>(params.symm, peer, params.signals_offset) + params.rank, signal.pack());
  }
  __device__ __forceinline__ void record(const Wait& wait, const Signal& mine) const {
    record_fault(pointer<MegaMoeFault>(params.faults) + DG_FAULT_RECORD_PEER,
                 {static_cast<dg_i64>(mine.epoch), static_cast<dg_i64>(wait.seen.epoch), -1, params.rank, static_cast<int>(threadIdx.x), mine.tag,
                  wait.seen.tag, wait.fault});
  }
};

}  // namespace deep_gemm
