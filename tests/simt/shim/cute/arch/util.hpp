#pragma once
#include "hopper.h"
namespace cute {
inline uint32_t cast_smem_ptr_to_uint(const void* p) { return simt::smem_address(p); }
}  // namespace cute
