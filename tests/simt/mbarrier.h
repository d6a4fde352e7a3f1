// mbarriers of the SIMT machine. The state lies beside the shared memory; the eight bytes there hold a mark, so that use before init and
// overwriting show.
#pragma once
#include <unordered_map>

#include "simt.h"

namespace simt {

struct Mbarrier {
  static constexpr uint64_t kMark = 0x6d62617272696572;  // as NaN bytes and zeros are not
  unsigned count = 0, pending = 0;
  int64_t bytes = 0;   // expected and not yet here
  uint64_t phase = 0;  // phases that are done

  void settle() {
    if (pending == 0 && bytes == 0) pending = count, ++phase;
  }
};
struct Mbarriers {
  std::unordered_map<const void*, std::unique_ptr<Mbarrier>> at;
};
inline Mbarriers& mbarriers(Cta& c);  // hopper.h

// The same place in the shared memory of another CTA of the cluster.
inline const void* in_cta(Cta& other, const void* p) { return other.smem + (static_cast<const uint8_t*>(p) - cta->smem); }

inline void mbarrier_init(void* p, unsigned count) {
  if (reinterpret_cast<uintptr_t>(p) % 8 || count == 0) fail(text("mbarrier at %s: count %u", smem_name(p).c_str(), count));
  auto& barrier = mbarriers(*cta).at[p];
  if (!barrier) barrier = std::make_unique<Mbarrier>();
  *barrier = {count, count, 0, 0};
  *static_cast<uint64_t*>(p) = Mbarrier::kMark;
}
inline Mbarrier& mbarrier(Cta& owner, const void* p) {
  auto found = mbarriers(owner).at.find(p);
  static Mbarrier none{1, 1, 0, 0};
  if (found == mbarriers(owner).at.end()) return fail(text("mbarrier at %s was not initialised", smem_name(p).c_str())), none;
  if (*static_cast<const uint64_t*>(p) != Mbarrier::kMark) return fail(text("mbarrier at %s was overwritten", smem_name(p).c_str())), none;
  return *found->second;
}

inline void mbarrier_arrive(Cta& owner, const void* p, int64_t expect_bytes = 0) {
  Mbarrier& barrier = mbarrier(owner, p);
  if (barrier.pending == 0)
    return fail(text("mbarrier at %s: more than %u arrivals in phase %lu", smem_name(p).c_str(), barrier.count, barrier.phase));
  barrier.bytes += expect_bytes;
  --barrier.pending;
  barrier.settle();
}
inline void mbarrier_expect(Cta& owner, const void* p, int64_t bytes) { mbarrier(owner, p).bytes += bytes; }
// Bytes may come before they are expected, but not end a phase.
inline void mbarrier_complete(Cta& owner, const void* p, int64_t bytes) {
  Mbarrier& barrier = mbarrier(owner, p);
  barrier.bytes -= bytes;
  if (barrier.bytes < 0 && barrier.pending == 0)
    return fail(text("mbarrier at %s: %lld bytes more than expected", smem_name(p).c_str(), (long long)-barrier.bytes));
  barrier.settle();
}

inline bool mbarrier_test(const void* p, unsigned parity) { return (mbarrier(*cta, p).phase & 1) != (parity & 1); }
inline void mbarrier_wait(const void* p, unsigned parity) {
  if (parity > 1) fail(text("mbarrier at %s: parity %u", smem_name(p).c_str(), parity));
  Mbarrier& barrier = mbarrier(*cta, p);
  wait_for({Wait::kDiffers, &barrier.phase, parity, 1, [&barrier, p, parity] {
              return text("mbarrier %s, parity %u (%lu phases done, %u of %u arrivals and %ld bytes missing)", smem_name(p).c_str(), parity,
                          barrier.phase, barrier.pending, barrier.count, barrier.bytes);
            }});
}

}  // namespace simt
