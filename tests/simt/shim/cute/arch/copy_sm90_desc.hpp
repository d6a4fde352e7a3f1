#pragma once
#include "hopper.h"
namespace cute {
struct TmaDescriptor { alignas(64) uint64_t opaque[16]; };
inline void prefetch_tma_descriptor(const void* map) { simt::tensor_map(map); }
namespace TMA {
enum class CacheHintSm90 : uint64_t { EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12F0000000000000, EVICT_LAST = 0x14F0000000000000 };
}  // namespace TMA
}  // namespace cute
