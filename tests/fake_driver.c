// Stands in for the three driver functions that the host extension calls, declared by the real cuda.h, and remembers what came. Built and
// read by test_ext.py: if the extension's own declarations of the driver's structs were wrong, the values read here would be.
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static struct {
  CUlaunchConfig config;
  CUlaunchAttribute attributes[8];
  uint64_t function, params_address, extra;
  unsigned char params[32768];
} launched;
static struct {
  uint64_t address, dims[5], strides[5], map_address;
  uint32_t box[5], element_strides[5], rank;
  int dtype, interleave, swizzle, l2_promotion, oob_fill;
} encoded;
static int status, num_launches, num_maps;
static size_t params_size;
static CUcontext context;

void fake_reset(int next_status, size_t size) {
  memset(&launched, 0, sizeof(launched));
  memset(&encoded, 0, sizeof(encoded));
  status = next_status, params_size = size, num_launches = num_maps = 0;
  context = (CUcontext)&status;
}

void fake_set_context(uint64_t next) { context = (CUcontext)(uintptr_t)next; }
CUresult fake_get_context(CUcontext* current) {
  *current = context;
  return CUDA_SUCCESS;
}

CUresult fake_launch(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  num_launches++;
  launched.config = *config;
  memcpy(launched.attributes, config->attrs, config->numAttrs * sizeof(CUlaunchAttribute));
  launched.function = (uint64_t)(uintptr_t)function;
  launched.params_address = (uint64_t)(uintptr_t)params[0];
  launched.extra = (uint64_t)(uintptr_t)extra;
  memcpy(launched.params, params[0], params_size);
  return (CUresult)status;
}

CUresult fake_encode(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank, void* address, const cuuint64_t* dims,
                     const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill oob_fill) {
  num_maps++;
  encoded.map_address = (uint64_t)(uintptr_t)map;
  encoded.address = (uint64_t)(uintptr_t)address;
  encoded.rank = rank, encoded.dtype = dtype, encoded.interleave = interleave, encoded.swizzle = swizzle;
  encoded.l2_promotion = l2_promotion, encoded.oob_fill = oob_fill;
  for (cuuint32_t i = 0; i < rank; i++) {
    encoded.dims[i] = dims[i], encoded.box[i] = box[i], encoded.element_strides[i] = element_strides[i];
    if (i + 1 < rank) encoded.strides[i] = strides[i];
  }
  for (int i = 0; i < 128; i++) ((unsigned char*)map)[i] = (unsigned char)(255 - i);
  return (CUresult)status;
}

// Numbers by name, so that the test needs no second declaration of the structs.
uint64_t fake_value(const char* name, int i) {
#define VALUE(key, value) if (!strcmp(name, key)) return (uint64_t)(value);
  VALUE("num_launches", num_launches) VALUE("num_maps", num_maps)
  VALUE("grid_x", launched.config.gridDimX) VALUE("grid_y", launched.config.gridDimY) VALUE("grid_z", launched.config.gridDimZ)
  VALUE("block_x", launched.config.blockDimX) VALUE("block_y", launched.config.blockDimY) VALUE("block_z", launched.config.blockDimZ)
  VALUE("smem", launched.config.sharedMemBytes) VALUE("stream", (uintptr_t)launched.config.hStream)
  VALUE("num_attributes", launched.config.numAttrs) VALUE("attribute", launched.attributes[i].id)
  VALUE("cooperative", launched.attributes[i].value.cooperative) VALUE("cluster_x", launched.attributes[i].value.clusterDim.x)
  VALUE("cluster_y", launched.attributes[i].value.clusterDim.y) VALUE("cluster_z", launched.attributes[i].value.clusterDim.z)
  VALUE("pdl", launched.attributes[i].value.programmaticStreamSerializationAllowed)
  VALUE("function", launched.function) VALUE("params_address", launched.params_address) VALUE("extra", launched.extra)
  VALUE("param", launched.params[i])
  VALUE("address", encoded.address) VALUE("map_address", encoded.map_address) VALUE("rank", encoded.rank) VALUE("dims", encoded.dims[i])
  VALUE("strides", encoded.strides[i]) VALUE("box", encoded.box[i]) VALUE("element_strides", encoded.element_strides[i])
  VALUE("dtype", encoded.dtype) VALUE("interleave", encoded.interleave) VALUE("swizzle", encoded.swizzle)
  VALUE("l2_promotion", encoded.l2_promotion) VALUE("oob_fill", encoded.oob_fill)
  VALUE("ATTRIBUTE_CLUSTER", CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) VALUE("ATTRIBUTE_COOPERATIVE", CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
  VALUE("ATTRIBUTE_PDL", CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
  VALUE("u8", CU_TENSOR_MAP_DATA_TYPE_UINT8) VALUE("u16", CU_TENSOR_MAP_DATA_TYPE_UINT16) VALUE("u32", CU_TENSOR_MAP_DATA_TYPE_UINT32)
  VALUE("i32", CU_TENSOR_MAP_DATA_TYPE_INT32) VALUE("u64", CU_TENSOR_MAP_DATA_TYPE_UINT64) VALUE("i64", CU_TENSOR_MAP_DATA_TYPE_INT64)
  VALUE("f16", CU_TENSOR_MAP_DATA_TYPE_FLOAT16) VALUE("f32", CU_TENSOR_MAP_DATA_TYPE_FLOAT32)
  VALUE("f64", CU_TENSOR_MAP_DATA_TYPE_FLOAT64) VALUE("bf16", CU_TENSOR_MAP_DATA_TYPE_BFLOAT16)
  VALUE("swizzle_0", CU_TENSOR_MAP_SWIZZLE_NONE) VALUE("swizzle_32", CU_TENSOR_MAP_SWIZZLE_32B)
  VALUE("swizzle_64", CU_TENSOR_MAP_SWIZZLE_64B) VALUE("swizzle_128", CU_TENSOR_MAP_SWIZZLE_128B)
  VALUE("promotion_0", CU_TENSOR_MAP_L2_PROMOTION_NONE) VALUE("promotion_64", CU_TENSOR_MAP_L2_PROMOTION_L2_64B)
  VALUE("promotion_128", CU_TENSOR_MAP_L2_PROMOTION_L2_128B) VALUE("promotion_256", CU_TENSOR_MAP_L2_PROMOTION_L2_256B)
  VALUE("oob_zero", CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) VALUE("oob_nan", CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA)
  return ~(uint64_t)0;
}
