// Kernel arguments by field name. The tables come from the same lists as the structs (layout/struct_fields.h).
#include <deep_gemm/layout/all_structs.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "extension.h"

DG_ALL_STRUCTS(DG_STRUCT_TABLE)
static const dg_struct structs[] = {DG_ALL_STRUCTS(DG_STRUCT_ROW)};
static const char* const kind_names[] = {"tensor_map", "pointer", "i32", "i64", "u32", "u64", "f32", "peers"};

// Parameters of a kernel are at most 32764 bytes (CUDA 12.1, sm_70 and later).
enum { kMaxFields = 128, kMaxStructBytes = 32764 };

static const dg_struct* find_struct(const char* function, PyObject* name) {
  if (!PyUnicode_Check(name)) {
    PyErr_Format(PyExc_TypeError, "%s: struct is %R, expected its name", function, name);
    return NULL;
  }
  for (size_t i = 0; i < sizeof(structs) / sizeof(structs[0]); i++)
    if (!PyUnicode_CompareWithASCIIString(name, structs[i].name)) return &structs[i];
  PyErr_Format(PyExc_ValueError, "%s: struct = %R is not in layout/all_structs.h", function, name);
  return NULL;
}

// Callers mostly write the fields in the struct's order, so the search begins at the field after the last one found.
static size_t find_field(const dg_struct* s, PyObject* name, size_t first) {
  const dg_field* fields = s->fields();
  for (size_t i = 0; i < s->num_fields; i++) {
    const size_t at = (first + i) % s->num_fields;
    if (!PyUnicode_CompareWithASCIIString(name, fields[at].name)) return at;
  }
  return s->num_fields;
}

static int store_tensor_map(const char* where, const char* name, PyObject* value, unsigned char* out) {
  char* bytes;
  Py_ssize_t size;
  if (!PyBytes_Check(value)) {
    PyErr_Format(PyExc_TypeError, "%s: %s is %R, expected bytes from _C.tensor_map", where, name, value);
    return -1;
  }
  if (PyBytes_AsStringAndSize(value, &bytes, &size) < 0) return -1;
  if (size != (Py_ssize_t)sizeof(dg_field_tensor_map)) {
    PyErr_Format(PyExc_ValueError, "%s: %s has %zd bytes, expected a tensor map of 128", where, name, size);
    return -1;
  }
  memcpy(out, bytes, (size_t)size);
  return 0;
}

static int store_float(const char* where, const char* name, PyObject* value, unsigned char* out) {
  const double number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s: %s is %R, expected a float", where, name, value);
    return -1;
  }
  if (isfinite(number) && fabs(number) > FLT_MAX) {  // inf is a value ("no clamp"); a finite number that becomes inf is a mistake
    PyErr_Format(PyExc_ValueError, "%s: %s = %S does not fit in f32", where, name, value);
    return -1;
  }
  const float stored = (float)number;
  memcpy(out, &stored, sizeof(stored));
  return 0;
}

static int store_peers(const char* where, const char* name, PyObject* value, unsigned char* out) {
  const int is_tuple = PyTuple_Check(value);
  if (!is_tuple && !PyList_Check(value)) {
    PyErr_Format(PyExc_TypeError, "%s: %s is %R, expected a tuple or list of addresses", where, name, value);
    return -1;
  }
  const Py_ssize_t length = is_tuple ? PyTuple_Size(value) : PyList_Size(value);
  if (length > DG_MAX_RANKS) {
    PyErr_Format(PyExc_ValueError, "%s: %s has %zd addresses, expected at most %d (DG_MAX_RANKS)", where, name, length, DG_MAX_RANKS);
    return -1;
  }
  dg_field_peers peers = {{0}};
  for (Py_ssize_t i = 0; i < length; i++) {
    char item_name[96];
    PyOS_snprintf(item_name, sizeof(item_name), "%s[%d]", name, (int)i);
    if (dg_read_u64(where, item_name, is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i), &peers.address[i]) < 0) return -1;
  }
  memcpy(out, &peers, sizeof(peers));
  return 0;
}

static int store_integer(const char* where, const dg_field* field, PyObject* value, unsigned char* out) {
  if (field->kind == DG_KIND_pointer || field->kind == DG_KIND_u64) {
    uint64_t number;
    if (dg_read_u64(where, field->name, value, &number) < 0) return -1;
    memcpy(out, &number, sizeof(number));
    return 0;
  }
  dg_int_arg range = {field->name, INT64_MIN, INT64_MAX};
  if (field->kind == DG_KIND_i32) range.low = INT32_MIN, range.high = INT32_MAX;
  if (field->kind == DG_KIND_u32) range.low = 0, range.high = UINT32_MAX;
  int64_t number;
  if (dg_read_int(where, range, value, &number) < 0) return -1;
  if (field->size == 8) {
    memcpy(out, &number, 8);
  } else {
    const uint32_t low = (uint32_t)number;  // two's complement: also right for i32
    memcpy(out, &low, 4);
  }
  return 0;
}

static int store_field(const dg_struct* s, const dg_field* field, PyObject* value, unsigned char* base) {
  unsigned char* out = base + field->offset;
  switch (field->kind) {
    case DG_KIND_tensor_map: return store_tensor_map(s->name, field->name, value, out);
    case DG_KIND_f32: return store_float(s->name, field->name, value, out);
    case DG_KIND_peers: return store_peers(s->name, field->name, value, out);
    default: return store_integer(s->name, field, value, out);
  }
}

static PyObject* pack(PyObject* module, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  (void)module;
  if (nargs != 1) {
    PyErr_Format(PyExc_TypeError, "pack takes the struct's name and its fields by keyword, got %zd positional arguments", nargs);
    return NULL;
  }
  const dg_struct* s = find_struct("pack", args[0]);
  if (!s) return NULL;
  const dg_field* fields = s->fields();
  unsigned char bytes[kMaxStructBytes], seen[kMaxFields] = {0};
  memset(bytes, 0, s->size);  // padding too: equal fields give equal bytes
  const Py_ssize_t given = names ? PyTuple_Size(names) : 0;
  size_t at = 0;
  for (Py_ssize_t i = 0; i < given; i++) {
    PyObject* name = PyTuple_GetItem(names, i);
    const size_t found = find_field(s, name, at);
    if (found == s->num_fields) {
      PyErr_Format(PyExc_TypeError, "%s has no field %R; its fields are in _C.struct_fields(%R)", s->name, name, args[0]);
      return NULL;
    }
    if (store_field(s, &fields[found], args[nargs + i], bytes) < 0) return NULL;
    seen[found] = 1;
    at = found + 1;
  }
  if ((size_t)given < s->num_fields)  // Python refuses a repeated keyword, so fewer names means a missing field
    for (size_t i = 0; i < s->num_fields; i++)
      if (!seen[i])
        return PyErr_Format(PyExc_TypeError, "%s: field %s (%s) is missing", s->name, fields[i].name, kind_names[fields[i].kind]);
  return PyBytes_FromStringAndSize((const char*)bytes, (Py_ssize_t)s->size);
}

static PyObject* struct_fields(PyObject* module, PyObject* name) {
  (void)module;
  const dg_struct* s = find_struct("struct_fields", name);
  if (!s) return NULL;
  const dg_field* fields = s->fields();
  PyObject* list = PyTuple_New((Py_ssize_t)s->num_fields);
  for (size_t i = 0; list && i < s->num_fields; i++) {
    PyObject* row =
        Py_BuildValue("(ssnn)", fields[i].name, kind_names[fields[i].kind], (Py_ssize_t)fields[i].offset, (Py_ssize_t)fields[i].size);
    if (!row || PyTuple_SetItem(list, (Py_ssize_t)i, row) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject* struct_size(PyObject* module, PyObject* name) {
  (void)module;
  const dg_struct* s = find_struct("struct_size", name);
  return s ? PyLong_FromSize_t(s->size) : NULL;
}

static PyObject* struct_names(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  const Py_ssize_t count = sizeof(structs) / sizeof(structs[0]);
  PyObject* list = PyTuple_New(count);
  for (Py_ssize_t i = 0; list && i < count; i++) {
    PyObject* name = PyUnicode_FromString(structs[i].name);
    if (!name || PyTuple_SetItem(list, i, name) < 0) Py_CLEAR(list);
  }
  return list;
}

#define CHECK_LIMITS(type, list)                                                            \
  _Static_assert(sizeof(type) <= kMaxStructBytes, #type " is over the kernel parameter limit"); \
  _Static_assert(0 list(DG_FIELD_COUNT) <= kMaxFields, #type " has too many fields");
DG_ALL_STRUCTS(CHECK_LIMITS)

PyMethodDef dg_pack_methods[] = {
    DG_METHOD("pack", pack, METH_FASTCALL | METH_KEYWORDS,
              "pack(struct, **fields) -> bytes\n\nThe struct `struct` of layout/, every field by keyword. tensor_map: 128 bytes; pointer, u64, i64,\n"
              "u32, i32: int in range; f32: float; peers: tuple or list of at most DG_MAX_RANKS addresses (the rest is 0). A field that is\n"
              "unknown or missing raises TypeError, a value out of range ValueError."),
    DG_METHOD("struct_fields", struct_fields, METH_O, "struct_fields(struct) -> ((name, kind, offset, size), ...), bytes"),
    DG_METHOD("struct_size", struct_size, METH_O, "struct_size(struct) -> sizeof, bytes"),
    DG_METHOD("struct_names", struct_names, METH_NOARGS, "struct_names() -> names of all structs"),
    {0}};
