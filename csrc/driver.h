// Our own declarations of what crosses the driver's ABI (CUDA driver API 12 and later, 64-bit): the extension is built without cuda.h.
// Enumerators keep the values of cuda.h.
#ifndef DEEP_GEMM_CSRC_DRIVER_H
#define DEEP_GEMM_CSRC_DRIVER_H

#include <stddef.h>
#include <stdint.h>

enum { kAttributeCooperative = 2, kAttributeClusterDimension = 4, kAttributeProgrammaticStreamSerialization = 6 };

typedef struct {
  int32_t id;
  char padding[4];
  union {
    char size[64];
    int32_t flag;
    uint32_t cluster[3];
  } value;
} dg_launch_attribute;  // CUlaunchAttribute

typedef struct {
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  dg_launch_attribute* attributes;
  uint32_t num_attributes;
} dg_launch_config;  // CUlaunchConfig

_Static_assert(sizeof(void*) == 8, "the CUDA driver is 64-bit");
_Static_assert(sizeof(dg_launch_attribute) == 72 && offsetof(dg_launch_attribute, value) == 8, "CUlaunchAttribute");
_Static_assert(sizeof(dg_launch_config) == 56 && offsetof(dg_launch_config, stream) == 32, "CUlaunchConfig");

typedef int (*dg_ctx_get_current)(void** context);
typedef int (*dg_launch_kernel_ex)(const dg_launch_config*, void* function, void** params, void** extra);
typedef int (*dg_tensor_map_encode_tiled)(void* map, int dtype, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides,
                                          const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle,
                                          int l2_promotion, int oob_fill);

typedef struct {
  dg_ctx_get_current ctx_get_current;
  dg_launch_kernel_ex launch_kernel_ex;
  dg_tensor_map_encode_tiled tensor_map_encode_tiled;
} dg_driver;

// The driver's functions, in a thread that has a context. What is missing comes from Python (deep_gemm.jit.driver: connect, bind_thread);
// NULL with an exception when there is no driver.
const dg_driver* dg_get_driver(void);

#endif
