// What Hopper adds to the SIMT machine: mbarriers, asynchronous copies, WGMMA.
#pragma once
#include "copies.h"
#include "mbarrier.h"
#include "simt.h"
#include "wgmma.h"

namespace simt {

struct Hopper {
  Mbarriers mbarriers;
  std::vector<ThreadCopies> copies;
  std::vector<Warpgroup> warpgroups;
};
inline void check_end(Cta& c) {
  for (unsigned t = 0; t < c.fibers.size(); ++t) end_of_stores(c.hopper->copies[t], t);
  for (auto& group : c.hopper->warpgroups)
    if (!group.operations.empty()) fail("the CTA ends before its WGMMAs were waited for");
  if (!c.pending.empty()) fail("the CTA ends before its loads were waited for");
}
inline Hopper& hopper(Cta& c) {
  if (!c.hopper) {
    c.hopper = std::make_shared<Hopper>();
    c.hopper->copies.resize(c.fibers.size());
    c.hopper->warpgroups.resize((c.fibers.size() + 127) / 128);
    c.at_end.push_back([&c] { check_end(c); });
  }
  return *c.hopper;
}
inline Mbarriers& mbarriers(Cta& c) { return hopper(c).mbarriers; }
inline ThreadCopies& thread_copies(Cta& c, unsigned thread) { return hopper(c).copies[thread]; }
inline Warpgroup& warpgroup_of(Cta& c, unsigned thread) { return hopper(c).warpgroups[thread / 128]; }

inline Cta& peer(unsigned rank) {
  if (rank >= cta->cluster->ctas.size()) fail(text("CTA %u of a cluster of %zu", rank, cta->cluster->ctas.size()));
  return *cta->cluster->ctas[rank];
}

}  // namespace simt
