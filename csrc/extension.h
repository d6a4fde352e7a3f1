// What the files of the extension share. The stable ABI of Python 3.10 and nothing else: no libtorch, libcudart, libcuda or cuda.h;
// the three driver functions in use come in as addresses (launch.c).
#ifndef DEEP_GEMM_CSRC_EXTENSION_H
#define DEEP_GEMM_CSRC_EXTENSION_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

// A views_<room>.c file gives Python the host side of the headers of one room: a table of its functions, ended by {0}. To add a file:
// declare its table here and list it in module.c.
extern PyMethodDef dg_pack_methods[], dg_launch_methods[], dg_tensor_map_methods[];
extern PyMethodDef dg_views_schedule_methods[], dg_views_mega_moe_methods[];

// Stores a table function in a PyMethodDef: METH_FASTCALL functions have another type than PyCFunction.
#define DG_METHOD(name, function, flags, doc) {name, (PyCFunction)(void (*)(void))(function), flags, doc}

typedef struct { const char* name; int64_t low, high; } dg_int_arg;

// One Python int -> int64 in [low, high]; else -1 with TypeError / ValueError: "<function>: <name> = 300, expected 1..256".
int dg_read_int(const char* function, dg_int_arg expected, PyObject* value, int64_t* out);

// All arguments of a positional METH_FASTCALL function that takes only ints, in the order of `expected`.
int dg_read_ints(const char* function, const dg_int_arg* expected, Py_ssize_t count, PyObject* const* args, Py_ssize_t nargs, int64_t* out);

// One Python int -> device address or handle (0..2^64-1).
int dg_read_u64(const char* function, const char* name, PyObject* value, uint64_t* out);

// A list or tuple of at most `capacity` ints in [low, high]; returns the length, or -1 with an exception that names the index.
Py_ssize_t dg_read_int_sequence(const char* function, dg_int_arg expected, PyObject* value, Py_ssize_t capacity, int64_t* out);

#endif
