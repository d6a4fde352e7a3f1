// Host views of include/deep_gemm/schedule/: the functions of those headers, for Python.
//
// A view reads its ints with dg_read_ints, calls the header's function and returns ints:
//
//   static PyObject* tiles(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
//     static const dg_int_arg expected[] = {{"m", 0, INT32_MAX}, {"block_m", 1, 1024}};
//     int64_t v[2];
//     if (dg_read_ints("tiles", expected, 2, args, nargs, v) < 0) return NULL;
//     return PyLong_FromLongLong(dg_ceil_div(v[0], v[1]));
//   }
//   ... DG_METHOD("tiles", tiles, METH_FASTCALL, "tiles(m, block_m) -> number of row blocks"),
#include "extension.h"

PyMethodDef dg_views_schedule_methods[] = {{0}};
