// Writes every field of its argument, in order, as 64-bit words to params.d: the check that host and device agree on a struct's layout.
// Word 0 is Config::kMark. One thread.
#pragma once
#include <deep_gemm/layout/example_params.h>

namespace deep_gemm::kernels {

struct EchoWriter {
  dg_u64* out;
  __device__ void put(dg_u64 value) { *out++ = value; }
  __device__ void put(dg_i64 value) { *out++ = static_cast<dg_u64>(value); }
  __device__ void put(dg_i32 value) { *out++ = static_cast<dg_u64>(static_cast<dg_i64>(value)); }
  __device__ void put(dg_u32 value) { *out++ = value; }
  __device__ void put(float value) { *out++ = __float_as_uint(value); }
  __device__ void put(const dg_field_tensor_map& map) {
    for (dg_u64 word : map.opaque) put(word);
  }
  __device__ void put(const dg_field_peers& peers) {
    for (dg_u64 address : peers.address) put(address);
  }
};

template <class Config>
__device__ void echo_params(const ExampleParams& params) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  EchoWriter writer{reinterpret_cast<dg_u64*>(params.d)};
  writer.put(dg_i32{Config::kMark});
#define DG_ECHO_FIELD(kind, name) writer.put(params.name);
  DG_EXAMPLE_PARAMS(DG_ECHO_FIELD)
#undef DG_ECHO_FIELD
}

}  // namespace deep_gemm::kernels
