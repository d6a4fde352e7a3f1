#pragma once
#include <cutlass/cutlass.h>
namespace cutlass::arch {

struct ClusterBarrier {
  uint64_t barrier_;
  void init(uint32_t count) const { simt::mbarrier_init(const_cast<uint64_t*>(&barrier_), count); }
  bool test_wait(uint32_t phase) const { return simt::mbarrier_test(&barrier_, phase); }
  bool try_wait(uint32_t phase) const { return test_wait(phase) || (simt::poll(&barrier_, phase), test_wait(phase)); }
  void wait(uint32_t phase) const { simt::mbarrier_wait(&barrier_, phase); }
  void arrive() const { simt::mbarrier_arrive(*simt::cta, &barrier_); }
  void arrive(uint32_t cta, uint32_t pred = true) const {
    if (pred) simt::mbarrier_arrive(simt::peer(cta), simt::in_cta(simt::peer(cta), &barrier_));
  }
};
struct ClusterTransactionBarrier : ClusterBarrier {
  void arrive_and_expect_tx(uint32_t bytes) const { simt::mbarrier_arrive(*simt::cta, &barrier_, bytes); }
  void expect_transaction(uint32_t bytes) const { simt::mbarrier_expect(*simt::cta, &barrier_, bytes); }
  void complete_transaction(uint32_t bytes) const { simt::mbarrier_complete(*simt::cta, &barrier_, bytes); }
};
// CUTLASS keeps the first eight for itself.
struct NamedBarrier {
  static constexpr uint32_t kReserved = 8;
  static void sync(uint32_t threads, uint32_t id) { simt::sync_named(id + kReserved, threads); }
  static void arrive_and_wait(uint32_t threads, uint32_t id) { sync(threads, id); }
  static void arrive(uint32_t threads, uint32_t id) { simt::arrive_named(id + kReserved, threads); }
};
inline void fence_barrier_init() {}
inline void fence_view_async_shared() {}

}  // namespace cutlass::arch
