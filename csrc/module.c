// deep_gemm._C: fills kernel arguments from the structs in include/deep_gemm/layout, makes tensor maps, launches, and shows the host
// side of layout/ and schedule/ to Python, so that no offset, size or order is written a second time.
#include "extension.h"

static int add_tables(PyObject* module) {
  PyMethodDef* const tables[] = {dg_pack_methods, dg_tensor_map_methods, dg_launch_methods, dg_views_schedule_methods,
                                 dg_views_mega_moe_methods};
  for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++)
    if (PyModule_AddFunctions(module, tables[i]) < 0) return -1;
  return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_tables}, {0, NULL}};
static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "deep_gemm._C",
    .m_doc = "Launch path and host views of the shared headers (plain C, stable ABI).",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&module_def); }
