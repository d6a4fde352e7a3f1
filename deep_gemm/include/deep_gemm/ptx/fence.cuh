// Memory fences, one PTX instruction each.
#pragma once

namespace deep_gemm::ptx {

// PTX ISA, "membar / fence": orders this thread's generic accesses to shared memory before later accesses by the async proxy (TMA, WGMMA).
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for all state spaces: between an acquire of what others wrote to global memory and TMA loads of it, and the other way round.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace deep_gemm::ptx
