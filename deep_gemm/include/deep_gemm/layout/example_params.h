// A struct with one field of each kind, in an order that needs padding. The tests of the launch path pack it and read it back, in C,
// in Python and on the GPU; no kernel of the library takes it.
#ifndef DEEP_GEMM_LAYOUT_EXAMPLE_PARAMS_H
#define DEEP_GEMM_LAYOUT_EXAMPLE_PARAMS_H

#include <deep_gemm/layout/struct_fields.h>

#define DG_EXAMPLE_PARAMS(F)                                                                                    \
  F(i32, num_rows) F(tensor_map, a) F(pointer, d) F(f32, scale) F(peers, symm) F(u32, flags) F(i64, row_stride) \
  F(u64, epoch)
DG_DEFINE_STRUCT(ExampleParams, DG_EXAMPLE_PARAMS)

#endif
