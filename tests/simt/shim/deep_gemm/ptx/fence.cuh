// ptx/fence.cuh on the CPU.
#pragma once

namespace deep_gemm::ptx {
inline void fence_proxy_async_shared() {}
inline void fence_proxy_async() {}
}  // namespace deep_gemm::ptx
