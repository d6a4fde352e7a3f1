// Python ints and sequences -> C integers, with errors that name function, argument, value and range.
#include "extension.h"

static int wrong_type(const char* function, const char* name, PyObject* value, const char* expected) {
  PyErr_Format(PyExc_TypeError, "%s: %s is %R, expected %s", function, name, value, expected);
  return -1;
}

int dg_read_int(const char* function, dg_int_arg expected, PyObject* value, int64_t* out) {
  if (!PyLong_Check(value)) return wrong_type(function, expected.name, value, "an int");
  int overflow;
  *out = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (!overflow && *out >= expected.low && *out <= expected.high) return 0;
  PyErr_Format(PyExc_ValueError, "%s: %s = %S, expected %lld..%lld", function, expected.name, value, (long long)expected.low,
               (long long)expected.high);
  return -1;
}

int dg_read_ints(const char* function, const dg_int_arg* expected, Py_ssize_t count, PyObject* const* args, Py_ssize_t nargs, int64_t* out) {
  if (nargs != count) {
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", function, count, nargs);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++)
    if (dg_read_int(function, expected[i], args[i], &out[i]) < 0) return -1;
  return 0;
}

int dg_read_u64(const char* function, const char* name, PyObject* value, uint64_t* out) {
  if (!PyLong_Check(value)) return wrong_type(function, name, value, "an int");
  *out = PyLong_AsUnsignedLongLong(value);
  if (*out != (uint64_t)-1 || !PyErr_Occurred()) return 0;
  PyErr_Clear();
  PyErr_Format(PyExc_ValueError, "%s: %s = %S, expected 0..2^64-1", function, name, value);
  return -1;
}

Py_ssize_t dg_read_int_sequence(const char* function, dg_int_arg expected, PyObject* value, Py_ssize_t capacity, int64_t* out) {
  const int is_tuple = PyTuple_Check(value);
  if (!is_tuple && !PyList_Check(value)) return wrong_type(function, expected.name, value, "a tuple or list of ints");
  const Py_ssize_t length = is_tuple ? PyTuple_Size(value) : PyList_Size(value);
  if (length > capacity) {
    PyErr_Format(PyExc_ValueError, "%s: %s has %zd elements, expected at most %zd", function, expected.name, length, capacity);
    return -1;
  }
  for (Py_ssize_t i = 0; i < length; i++) {
    PyObject* item = is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
    int overflow = 0;
    if (item && PyLong_Check(item)) {
      out[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
      if (!overflow && out[i] >= expected.low && out[i] <= expected.high) continue;
      PyErr_Format(PyExc_ValueError, "%s: %s[%zd] = %S, expected %lld..%lld", function, expected.name, i, item, (long long)expected.low,
                   (long long)expected.high);
    } else if (item) {
      PyErr_Format(PyExc_TypeError, "%s: %s[%zd] is %R, expected an int", function, expected.name, i, item);
    }
    return -1;
  }
  return length;
}
