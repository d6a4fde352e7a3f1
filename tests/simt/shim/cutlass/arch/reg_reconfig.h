#pragma once
#include <cutlass/cutlass.h>
namespace cutlass::arch {
template <uint32_t> void warpgroup_reg_alloc() {}
template <uint32_t> void warpgroup_reg_dealloc() {}
}  // namespace cutlass::arch
