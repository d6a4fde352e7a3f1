#pragma once
#include <cute/arch/copy_sm90_desc.hpp>
namespace cute {

// Coordinates are the last arguments.
struct TmaLoad {
  struct PREFETCH {
    template <class... At>
    static void copy(const void* map, At... at) { simt::box_of(simt::tensor_map(map), {int(at)...}); }
  };
  template <class... At>
  static void copy(const void* map, uint64_t* barrier, uint64_t, void* smem, At... at) {
    simt::load_box(simt::box_of(simt::tensor_map(map), {int(at)...}), smem, barrier, simt::only_this_cta());
  }
};
struct TmaLoadMulticast {
  template <class... At>
  static void copy(const void* map, uint64_t* barrier, uint16_t ctas, uint64_t, void* smem, At... at) {
    simt::load_box(simt::box_of(simt::tensor_map(map), {int(at)...}), smem, barrier, ctas);
  }
};
template <simt::Store::Action kAction>
struct TmaStore {
  template <class... At>
  static void copy(const void* map, const void* smem, At... at) {
    const simt::TensorMap tensor = simt::tensor_map(map);
    simt::store_box(simt::box_of(tensor, {int(at)...}), smem, kAction, tensor.dtype);
  }
};
using SM90_TMA_LOAD_1D = TmaLoad;
using SM90_TMA_LOAD_2D = TmaLoad;
using SM90_TMA_LOAD_3D = TmaLoad;
using SM90_TMA_LOAD_MULTICAST_2D = TmaLoadMulticast;
using SM90_TMA_LOAD_MULTICAST_3D = TmaLoadMulticast;
using SM90_TMA_STORE_2D = TmaStore<simt::Store::kWrite>;
using SM90_TMA_STORE_3D = TmaStore<simt::Store::kWrite>;
using SM90_TMA_REDUCE_ADD_2D = TmaStore<simt::Store::kAdd>;
using SM90_TMA_REDUCE_ADD_3D = TmaStore<simt::Store::kAdd>;
inline void tma_store_fence() {}
inline void tma_store_arrive() { simt::commit_stores(); }
template <int kLeft> void tma_store_wait() { simt::wait_for_stores(kLeft, false); }

}  // namespace cute
