// CUtensorMap for tiled TMA. The limits are those of cuTensorMapEncodeTiled in the driver API's documentation, checked here because the
// driver answers every one of them with the same "invalid value".
#include <string.h>

#include "driver.h"
#include "extension.h"

enum { kMaxRank = 5 };
typedef struct { const char* name; int code, bytes; } data_type;
static const data_type data_types[] = {{"u8", 0, 1},  {"u16", 1, 2}, {"u32", 2, 4}, {"i32", 3, 4},  {"u64", 4, 8},
                                       {"i64", 5, 8}, {"f16", 6, 2}, {"f32", 7, 4}, {"f64", 8, 8}, {"bf16", 9, 2}};

typedef struct {
  uint64_t address, dims[kMaxRank], strides[kMaxRank];
  uint32_t box[kMaxRank], rank;
  const data_type* dtype;
  int swizzle, l2_promotion, oob_fill;
} map_request;

static const data_type* find_data_type(PyObject* name) {
  for (size_t i = 0; PyUnicode_Check(name) && i < sizeof(data_types) / sizeof(data_types[0]); i++)
    if (!PyUnicode_CompareWithASCIIString(name, data_types[i].name)) return &data_types[i];
  PyErr_Format(PyExc_ValueError, "tensor_map: dtype = %R, expected one of u8 u16 u32 i32 u64 i64 f16 f32 f64 bf16", name);
  return NULL;
}

// The position of `value` in `choices`, which is the driver's enumerator for swizzle and L2 promotion.
static int read_choice(const char* name, PyObject* value, const int choices[4]) {
  int64_t number;
  if (dg_read_int("tensor_map", (dg_int_arg){name, 0, 256}, value, &number) < 0) return -1;
  for (int i = 0; i < 4; i++)
    if (choices[i] == number) return i;
  PyErr_Format(PyExc_ValueError, "tensor_map: %s = %lld, expected %d, %d, %d or %d", name, (long long)number, choices[0], choices[1],
               choices[2], choices[3]);
  return -1;
}

static int read_shape(PyObject* dims_arg, PyObject* strides_arg, PyObject* box_arg, map_request* r) {
  int64_t dims[kMaxRank], strides[kMaxRank], box[kMaxRank];
  const Py_ssize_t rank = dg_read_int_sequence("tensor_map", (dg_int_arg){"dims", 1, INT64_C(1) << 32}, dims_arg, kMaxRank, dims);
  if (rank < 0) return -1;
  const Py_ssize_t num_strides =
      dg_read_int_sequence("tensor_map", (dg_int_arg){"strides_bytes", 16, (INT64_C(1) << 40) - 1}, strides_arg, kMaxRank, strides);
  const Py_ssize_t num_box = num_strides < 0 ? -1 : dg_read_int_sequence("tensor_map", (dg_int_arg){"box", 1, 256}, box_arg, kMaxRank, box);
  if (num_box < 0) return -1;
  if (rank < 1 || num_strides != rank - 1 || num_box != rank) {
    PyErr_Format(PyExc_ValueError,
                 "tensor_map: dims, strides_bytes, box have %zd, %zd, %zd elements, expected rank, rank - 1, rank (the innermost dimension is "
                 "contiguous)", rank, num_strides, num_box);
    return -1;
  }
  r->rank = (uint32_t)rank;
  for (Py_ssize_t i = 0; i < rank; i++) {
    r->dims[i] = (uint64_t)dims[i];
    r->box[i] = (uint32_t)box[i];
    if (i + 1 == rank) break;
    if (strides[i] % 16) {
      PyErr_Format(PyExc_ValueError, "tensor_map: strides_bytes[%zd] = %lld, expected a multiple of 16", i, (long long)strides[i]);
      return -1;
    }
    r->strides[i] = (uint64_t)strides[i];
  }
  return 0;
}

static int check_request(const map_request* r, int swizzle_bytes) {
  const int inner = (int)r->box[0] * r->dtype->bytes;
  if (r->address == 0 || r->address % 16)
    PyErr_Format(PyExc_ValueError, "tensor_map: address = %llu, expected a non-zero multiple of 16", (unsigned long long)r->address);
  else if (inner % 16)
    PyErr_Format(PyExc_ValueError, "tensor_map: box[0] = %u elements of %s = %d bytes, expected a multiple of 16", r->box[0], r->dtype->name, inner);
  else if (swizzle_bytes && inner > swizzle_bytes)
    PyErr_Format(PyExc_ValueError, "tensor_map: box[0] = %u elements of %s = %d bytes, expected at most swizzle_bytes = %d", r->box[0],
                 r->dtype->name, inner, swizzle_bytes);
  else if (r->oob_fill && r->dtype->code < 6)
    PyErr_Format(PyExc_ValueError, "tensor_map: oob = 'nan' with dtype %s, expected a floating-point dtype", r->dtype->name);
  else
    return 0;
  return -1;
}

static int read_request(PyObject* args, PyObject* kwargs, map_request* r) {
  static char* names[] = {"address", "dtype", "dims", "strides_bytes", "box", "swizzle_bytes", "l2_promotion", "oob", NULL};
  static const int swizzles[4] = {0, 32, 64, 128}, promotions[4] = {0, 64, 128, 256};
  PyObject *address, *dtype, *dims, *strides, *box, *swizzle, *promotion = NULL;
  const char* oob = "zero";
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO|Os:tensor_map", names, &address, &dtype, &dims, &strides, &box, &swizzle,
                                   &promotion, &oob))
    return -1;
  if (dg_read_u64("tensor_map", "address", address, &r->address) < 0) return -1;
  r->dtype = find_data_type(dtype);
  if (!r->dtype || read_shape(dims, strides, box, r) < 0) return -1;
  r->swizzle = read_choice("swizzle_bytes", swizzle, swizzles);
  r->l2_promotion = promotion ? read_choice("l2_promotion", promotion, promotions) : 3;
  if (r->swizzle < 0 || r->l2_promotion < 0) return -1;
  r->oob_fill = !strcmp(oob, "nan");
  if (!r->oob_fill && strcmp(oob, "zero")) {
    PyErr_Format(PyExc_ValueError, "tensor_map: oob = '%s', expected 'zero' or 'nan'", oob);
    return -1;
  }
  return check_request(r, swizzles[r->swizzle]);
}

static PyObject* tensor_map(PyObject* module, PyObject* args, PyObject* kwargs) {
  (void)module;
  map_request r = {0};
  if (read_request(args, kwargs, &r) < 0) return NULL;
  const dg_driver* cu = dg_get_driver();
  if (!cu) return NULL;
  const uint32_t element_strides[kMaxRank] = {1, 1, 1, 1, 1};
  _Alignas(64) unsigned char map[128];
  const int code = cu->tensor_map_encode_tiled(map, r.dtype->code, r.rank, (void*)(uintptr_t)r.address, r.dims, r.strides, r.box,
                                               element_strides, 0, r.swizzle, r.l2_promotion, r.oob_fill);
  if (code)
    return PyErr_Format(PyExc_RuntimeError, "cuTensorMapEncodeTiled failed with CUresult %d (address %llu, dtype %s, rank %u, args %R %R)", code,
                        (unsigned long long)r.address, r.dtype->name, r.rank, args, kwargs ? kwargs : Py_None);
  return PyBytes_FromStringAndSize((const char*)map, sizeof(map));
}

PyMethodDef dg_tensor_map_methods[] = {
    DG_METHOD("tensor_map", tensor_map, METH_VARARGS | METH_KEYWORDS,
              "tensor_map(address, dtype, dims, strides_bytes, box, swizzle_bytes, l2_promotion=256, oob='zero') -> 128 bytes\n\n"
              "address: device address, multiple of 16; dtype: u8 u16 u32 i32 u64 i64 f16 f32 f64 bf16; dims: elements, innermost first,\n"
              "1 to 5 of them; strides_bytes: of dims[1:], multiples of 16 below 2^40; box: elements, each <= 256, the innermost a multiple of\n"
              "16 bytes and at most swizzle_bytes; swizzle_bytes: 0, 32, 64 or 128; l2_promotion: 0, 64, 128 or 256 bytes; oob: what a load\n"
              "outside dims gives, 'zero' or 'nan'. Raises ValueError before the driver is asked."),
    {0}};
