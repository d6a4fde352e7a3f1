// The activation between the GEMMs, forward and backward, on the rows of one window. A warp per row, 8 neighbouring columns per lane.
//
//   swiglu   a = act(z + b13)  [ * p if weighted: what the gradient of w2 multiplies ]
//   dswiglu  dZ = p * act'(z + b13) * dA',  A' = p * a,  dp = sum_i dA'_i a_i [ + <dy, b2> ]
//
// Padding rows are left as they are. In dswiglu act and z may be overwritten in place: a lane reads its columns before it writes them.
#pragma once
#include <deep_gemm/comm/rows.cuh>
#include <deep_gemm/epilogue/swiglu.cuh>

namespace deep_gemm::kernels {

struct GateUp { F32x8 gate, up; };

// Columns [column, column + 8) of gate and up of one row, biases added. Works on both params structs.
template <class Params>
__device__ __forceinline__ GateUp load_gate_up(const Params& params, dg_i64 row, int expert, int column) {
  const __nv_bfloat16* z = pointer<const __nv_bfloat16>(params.z) + row * 2 * params.intermediate_hidden + column;
  GateUp v{load8(z), load8(z + params.intermediate_hidden)};
  if (params.gate_bias) {
    const dg_i64 at = expert * params.bias_stride + column;
    add8(v.gate, load8(pointer<const __nv_bfloat16>(params.gate_bias) + at));
    add8(v.up, load8(pointer<const __nv_bfloat16>(params.up_bias) + at));
  }
  return v;
}

template <class Config>
__device__ __forceinline__ void mega_moe_swiglu(const MegaMoeSwigluParams& params) {
  const int rows = rows_in_window(params.group_ends, params.num_local_experts, params.window_begin, params.window_rows);
  const SwigluConstants constants{params.alpha, params.up_offset, params.clamp};
  for (dg_i64 row = warp_of_grid(); row < rows; row += warps_of_grid()) {
    const MegaMoeRowMeta meta = load_row_meta(params.row_meta, row);
    if (meta.source < 0) continue;
    const float scale = params.weighted ? meta.weight : 1.f;
    for (int column = 8 * lane_index(); column < params.intermediate_hidden; column += 256) {
      const GateUp v = load_gate_up(params, row, meta.expert, column);
      F32x8 a;
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i] = scale * swiglu(v.gate[i], v.up[i], constants);
      store8(pointer<__nv_bfloat16>(params.a) + row * params.intermediate_hidden + column, a);
    }
  }
}

// The same bits in every lane, by a fixed tree.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// This lane's part of dp; writes dZ and A' of the row.
__device__ __forceinline__ float dswiglu_row(const MegaMoeDswigluParams& params, const SwigluConstants& constants, const MegaMoeRowMeta& meta,
                                             dg_i64 row) {
  const int width = params.intermediate_hidden;
  float dp = 0.f;
  for (int column = 8 * lane_index(); column < width; column += 256) {
    const GateUp v = load_gate_up(params, row, meta.expert, column);
    __nv_bfloat16* act = pointer<__nv_bfloat16>(params.act) + row * width + column;
    const F32x8 da = load8(act);
    F32x8 a, dgate, dup;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SwigluGradient g = dswiglu(v.gate[i], v.up[i], meta.weight * da[i], constants);
      dp += da[i] * g.a;
      a[i] = meta.weight * g.a, dgate[i] = g.dgate, dup[i] = g.dup;
    }
    __nv_bfloat16* dz = pointer<__nv_bfloat16>(params.dz) + row * 2 * width + column;
    store8(act, a), store8(dz, dgate), store8(dz + width, dup);
  }
  return dp;
}

// This lane's part of <dy, b2[expert]>.
__device__ __forceinline__ float bias_dot(const MegaMoeDswigluParams& params, int expert, dg_i64 row) {
  float dot = 0.f;
  for (int column = 8 * lane_index(); column < params.hidden; column += 256) {
    const F32x8 dy = load8(pointer<const __nv_bfloat16>(params.dy) + row * params.hidden + column);
    const F32x8 b2 = load8(pointer<const __nv_bfloat16>(params.b2) + static_cast<dg_i64>(expert) * params.hidden + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) dot += dy[i] * b2[i];
  }
  return dot;
}

template <class Config>
__device__ __forceinline__ void mega_moe_dswiglu(const MegaMoeDswigluParams& params) {
  const int rows = rows_in_window(params.group_ends, params.num_local_experts, params.window_begin, params.window_rows);
  const SwigluConstants constants{params.alpha, params.up_offset, params.clamp};
  for (dg_i64 row = warp_of_grid(); row < rows; row += warps_of_grid()) {
    const MegaMoeRowMeta meta = load_row_meta(params.row_meta, row);
    if (meta.source < 0) continue;
    float dp = dswiglu_row(params, constants, meta, row);
    if (params.b2) dp += bias_dot(params, meta.expert, row);
    dp = warp_sum(dp);
    if (lane_index() == 0) pointer<float>(params.row_dp)[row] = dp;
  }
}

}  // namespace deep_gemm::kernels
