// Kernel launch: one parameter struct, cluster, cooperative and programmatic-dependent-launch attributes.
#include <stdalign.h>
#include <string.h>

#include "driver.h"
#include "extension.h"

static dg_driver driver;  // one driver per process; written under the GIL

static int ask_python(const char* function) {
  PyObject* module = PyImport_ImportModule("deep_gemm.jit.driver");
  PyObject* result = module ? PyObject_CallMethod(module, function, NULL) : NULL;
  Py_XDECREF(module);
  Py_XDECREF(result);
  return result ? 0 : -1;
}

const dg_driver* dg_get_driver(void) {
  if (!driver.launch_kernel_ex) {
    if (ask_python("connect") < 0) return NULL;
    if (!driver.launch_kernel_ex) {
      PyErr_SetString(PyExc_RuntimeError, "deep_gemm.jit.driver.connect() did not call _C.set_driver");
      return NULL;
    }
  }
  // Autograd's threads have no context until torch itself launches something in them; launches and tensor maps need one.
  void* context = NULL;
  if (driver.ctx_get_current(&context) == 0 && !context && ask_python("bind_thread") < 0) return NULL;
  return &driver;
}

static PyObject* set_driver(PyObject* module, PyObject* args, PyObject* kwargs) {
  (void)module;
  static char* names[] = {"cuCtxGetCurrent", "cuLaunchKernelEx", "cuTensorMapEncodeTiled", NULL};
  unsigned long long context_address, launch_address, encode_address;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$KKK:set_driver", names, &context_address, &launch_address, &encode_address)) return NULL;
  if (!launch_address != !encode_address || !launch_address != !context_address)
    return PyErr_Format(PyExc_ValueError,
                        "set_driver: cuCtxGetCurrent = %llu, cuLaunchKernelEx = %llu, cuTensorMapEncodeTiled = %llu, expected three addresses, "
                        "or three zeros to forget them", context_address, launch_address, encode_address);
  driver.ctx_get_current = (dg_ctx_get_current)(uintptr_t)context_address;
  driver.tensor_map_encode_tiled = (dg_tensor_map_encode_tiled)(uintptr_t)encode_address;
  driver.launch_kernel_ex = (dg_launch_kernel_ex)(uintptr_t)launch_address;
  Py_RETURN_NONE;
}

static int read_grid(PyObject* value, uint32_t grid[3]) {
  const dg_int_arg expected[] = {{"grid", 1, INT32_MAX}, {"grid[1]", 1, 65535}, {"grid[2]", 1, 65535}};
  int64_t extent[3] = {1, 1, 1};
  if (PyLong_Check(value)) {
    if (dg_read_int("launch", expected[0], value, &extent[0]) < 0) return -1;
  } else {
    const Py_ssize_t length = dg_read_int_sequence("launch", expected[0], value, 3, extent);
    if (length < 0) return -1;
    for (Py_ssize_t i = 1; i < length; i++)
      if (extent[i] > expected[i].high) {
        PyErr_Format(PyExc_ValueError, "launch: %s = %lld, expected 1..65535", expected[i].name, (long long)extent[i]);
        return -1;
      }
  }
  for (int i = 0; i < 3; i++) grid[i] = (uint32_t)extent[i];
  return 0;
}

static uint32_t make_attributes(dg_launch_attribute attributes[3], uint32_t cluster, int cooperative, int pdl) {
  uint32_t count = 0;
  memset(attributes, 0, 3 * sizeof(attributes[0]));
  if (cluster > 1) {
    attributes[count].id = kAttributeClusterDimension;
    attributes[count].value.cluster[0] = cluster;
    attributes[count].value.cluster[1] = attributes[count].value.cluster[2] = 1;
    count++;
  }
  if (cooperative) attributes[count].id = kAttributeCooperative, attributes[count++].value.flag = 1;
  if (pdl) attributes[count].id = kAttributeProgrammaticStreamSerialization, attributes[count++].value.flag = 1;
  return count;
}

enum { kFunction, kParams, kGrid, kBlock, kSmem, kStream, kCluster, kCooperative, kPdl, kNumArguments };

static int read_config(PyObject* const* args, Py_ssize_t nargs, dg_launch_config* config, uint32_t* cluster) {
  int64_t block, smem, cluster_size = 1;
  uint64_t stream;
  if (read_grid(args[kGrid], config->grid) < 0 || dg_read_int("launch", (dg_int_arg){"block", 1, 1024}, args[kBlock], &block) < 0 ||
      dg_read_int("launch", (dg_int_arg){"smem", 0, INT32_MAX}, args[kSmem], &smem) < 0 ||
      dg_read_u64("launch", "stream", args[kStream], &stream) < 0)
    return -1;
  if (nargs > kCluster && dg_read_int("launch", (dg_int_arg){"cluster", 1, 16}, args[kCluster], &cluster_size) < 0) return -1;
  if (config->grid[0] % cluster_size) {
    PyErr_Format(PyExc_ValueError, "launch: grid = %u, expected a multiple of cluster = %lld", config->grid[0], (long long)cluster_size);
    return -1;
  }
  config->block[0] = (uint32_t)block;
  config->block[1] = config->block[2] = 1;
  config->shared_bytes = (uint32_t)smem;
  config->stream = (void*)(uintptr_t)stream;
  *cluster = (uint32_t)cluster_size;
  return 0;
}

static PyObject* launch_error(int code, const dg_launch_config* config, uint32_t cluster) {
  return PyErr_Format(PyExc_RuntimeError,
                      "cuLaunchKernelEx failed with CUresult %d (grid %u x %u x %u, block %u, %u bytes of dynamic shared memory, cluster %u)",
                      code, config->grid[0], config->grid[1], config->grid[2], config->block[0], config->shared_bytes, cluster);
}

static PyObject* launch(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  (void)module;
  if (nargs < kCluster || nargs > kNumArguments)
    return PyErr_Format(PyExc_TypeError, "launch takes 6 to 9 positional arguments, got %zd", nargs);
  const dg_driver* cu = dg_get_driver();
  if (!cu) return NULL;
  // The struct may hold tensor maps, which want 64 bytes of alignment; a Python bytes object has 16 or less.
  alignas(64) unsigned char params[32768];
  void* param_list[1] = {params};
  char* bytes;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(args[kParams], &bytes, &size) < 0) return NULL;
  if (size > (Py_ssize_t)sizeof(params))
    return PyErr_Format(PyExc_ValueError, "launch: params has %zd bytes, expected at most %zu", size, sizeof(params));
  memcpy(params, bytes, (size_t)size);

  uint64_t function;
  uint32_t cluster;
  dg_launch_config config;
  memset(&config, 0, sizeof(config));
  dg_launch_attribute attributes[3];
  if (dg_read_u64("launch", "function", args[kFunction], &function) < 0 || read_config(args, nargs, &config, &cluster) < 0) return NULL;
  const int cooperative = nargs > kCooperative ? PyObject_IsTrue(args[kCooperative]) : 0;
  const int pdl = nargs > kPdl ? PyObject_IsTrue(args[kPdl]) : 0;
  if (cooperative < 0 || pdl < 0) return NULL;
  config.attributes = attributes;
  config.num_attributes = make_attributes(attributes, cluster, cooperative, pdl);
  const int code = cu->launch_kernel_ex(&config, (void*)(uintptr_t)function, param_list, NULL);
  if (code) return launch_error(code, &config, cluster);
  Py_RETURN_NONE;
}

PyMethodDef dg_launch_methods[] = {
    DG_METHOD("set_driver", set_driver, METH_VARARGS | METH_KEYWORDS,
              "set_driver(*, cuCtxGetCurrent, cuLaunchKernelEx, cuTensorMapEncodeTiled)\n\nAddresses of driver functions; zeros forget them. Called by\n"
              "deep_gemm.jit.driver.connect(), which launch and tensor_map call by themselves when there are none."),
    DG_METHOD("launch", launch, METH_FASTCALL,
              "launch(function, params, grid, block, smem, stream, cluster=1, cooperative=False, pdl=False)\n\n"
              "function, stream: driver handles (int); params: bytes of one struct, copied to 64-byte alignment; grid: int or tuple of up to\n"
              "three, in CTAs, a multiple of cluster; block: threads; smem: dynamic shared memory in bytes; pdl: the kernel may begin before the\n"
              "previous one on the stream has ended (griddepcontrol). Raises RuntimeError with the CUresult."),
    {0}};
