// Every struct that crosses from host to device, one line each: the list behind _C.pack, _C.struct_fields and _C.struct_size.
#ifndef DEEP_GEMM_LAYOUT_ALL_STRUCTS_H
#define DEEP_GEMM_LAYOUT_ALL_STRUCTS_H

#include <deep_gemm/layout/example_params.h>
#include <deep_gemm/layout/mega_moe_params.h>
#include <deep_gemm/layout/gemm_params.h>

#define DG_ALL_STRUCTS(S)                    \
  S(ExampleParams, DG_EXAMPLE_PARAMS) \
  S(GemmParams, DG_GEMM_PARAMS) \
  S(GemmGatedParams, DG_GEMM_GATED_PARAMS) \
  DG_MEGA_MOE_STRUCTS(S)

#endif
