// Memory fences, one PTX instruction each.
#pragma once

namespace deep_gemm::ptx {

// PTX ISA, "membar / fence": orders this thread's generic accesses to shared memory before later accesses by the async proxy (TMA, WGMMA).
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace deep_gemm::ptx
