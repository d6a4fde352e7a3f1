// Host views of include/deep_gemm/schedule/ and of the GEMM's shared-memory size.
#include <deep_gemm/layout/gemm_params.h>
#include <deep_gemm/schedule/gemm_tiles.h>
#include <deep_gemm/schedule/mega_moe_tiles.h>
#include <stdlib.h>
#include <string.h>

#include "extension.h"

static PyObject* gemm_kinds(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i}", "dense", DG_GEMM_DENSE, "m_index", DG_GEMM_M_INDEX, "m_ends", DG_GEMM_M_ENDS, "m_masked",
                       DG_GEMM_M_MASKED, "k_ends", DG_GEMM_K_ENDS);
}

static PyObject* gemm_epilogues(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  return Py_BuildValue("{s:i,s:i,s:i}", "store", DG_EPILOGUE_STORE, "swiglu", DG_EPILOGUE_SWIGLU, "dswiglu", DG_EPILOGUE_DSWIGLU);
}

static PyObject* gemm_gathers(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  return Py_BuildValue("{s:i,s:i,s:i}", "none", DG_GATHER_NONE, "a", DG_GATHER_A, "b", DG_GATHER_B);
}

static PyObject* gemm_smem_bytes(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  (void)module;
  static const dg_int_arg expected[] = {{"block_m", 1, 1024}, {"block_n", 1, 1024}, {"block_k", 1, 1024}, {"num_stages", 1, 64},
                                        {"staging_boxes", 0, 64}};
  int64_t v[5];
  if (dg_read_ints("gemm_smem_bytes", expected, 5, args, nargs, v) < 0) return NULL;
  return PyLong_FromLongLong(dg_gemm_smem_bytes((int)v[0], (int)v[1], (int)v[2], (int)v[3], (int)v[4]));
}

// Appends the tiles of one CTA, each as a tuple of the fields of dg_gemm_tile in their order.
static int append_tiles(PyObject* list, const dg_gemm_problem* problem, const int* layout, int cta, int num_ctas) {
  dg_gemm_cursor cursor = dg_gemm_cursor_begin(cta, num_ctas, problem->cluster);
  dg_gemm_tile t;
  while (dg_gemm_next_tile(&cursor, problem, layout, &t)) {
    PyObject* tuple = Py_BuildValue("(iiiiiiiii)", t.group, t.m_begin, t.num_rows, t.n_begin, t.k_begin, t.k_end, t.carry_in, t.carry_out,
                                    t.share);
    const int failed = !tuple || PyList_Append(list, tuple) < 0;
    Py_XDECREF(tuple);
    if (failed) return -1;
  }
  return 0;
}

static PyObject* gemm_tiles(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  (void)module;
  static const dg_int_arg expected[] = {
      {"kind", 0, 4},      {"block_m", 1, 1024},     {"block_n", 1, 1024},           {"cluster", 1, 2},            {"band", 1, 1024},
      {"m", 0, INT32_MAX}, {"n", 0, INT32_MAX},      {"k", 0, INT32_MAX},            {"num_groups", 0, 1 << 20},   {"window_begin", 0, INT32_MAX},
      {"window_end", 0, INT32_MAX}, {"alignment", 1, 1024}, {"store_empty", 0, 1},    {"cta", 0, 1 << 20},          {"num_ctas", 1, 1 << 20}};
  enum { kInts = sizeof(expected) / sizeof(expected[0]) };
  int64_t v[kInts];
  if (nargs != kInts + 1) return PyErr_Format(PyExc_TypeError, "gemm_tiles takes %d arguments, got %zd", kInts + 1, nargs);
  if (dg_read_ints("gemm_tiles", expected, kInts, args, kInts, v) < 0) return NULL;
  const Py_ssize_t capacity = PyTuple_Check(args[kInts]) ? PyTuple_Size(args[kInts]) : PyList_Check(args[kInts]) ? PyList_Size(args[kInts]) : 0;
  int64_t* wide = malloc(sizeof(int64_t) * (size_t)(capacity + 1));
  int* layout = malloc(sizeof(int) * (size_t)(capacity + 1));
  PyObject* list = NULL;
  const dg_int_arg entry = {"layout", -1, INT32_MAX};
  Py_ssize_t count = wide && layout ? dg_read_int_sequence("gemm_tiles", entry, args[kInts], capacity, wide) : -1;
  const Py_ssize_t needed = v[0] == DG_GEMM_DENSE ? 0 : v[0] == DG_GEMM_M_INDEX ? v[5] : v[8];
  if (count >= 0 && count < needed) {
    PyErr_Format(PyExc_ValueError, "gemm_tiles: layout has %zd entries, expected %zd", count, needed);
    count = -1;
  }
  if (count >= 0 && (list = PyList_New(0))) {
    for (Py_ssize_t i = 0; i < count; i++) layout[i] = (int)wide[i];
    const dg_gemm_problem problem = {(int)v[0], (int)v[1], (int)v[2], (int)v[3], (int)v[4], (int)v[5],
                                     (int)v[6], (int)v[7], (int)v[8], (int)v[9], (int)v[10], (int)v[11], (int)v[12]};
    if (append_tiles(list, &problem, layout, (int)v[13], (int)v[14]) < 0) Py_CLEAR(list);
  }
  free(wide);
  free(layout);
  return list ? list : PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

// Appends the steps of one CTA of a one-launch direction: dg_mega_moe_tile's own fields, then what a tile is.
static int append_mega_moe_tiles(PyObject* list, const dg_mega_moe_schedule* s, const int* ends, int cta, int num_ctas) {
  dg_mega_moe_cursor cursor;
  dg_mega_moe_begin(s, ends, cta, num_ctas, &cursor);
  dg_mega_moe_tile t;
  for (;;) {
    memset(&t, 0, sizeof t);  // a ROUND_END leaves most of it
    if (!dg_mega_moe_next_tile(s, ends, &cursor, &t)) return 0;
    PyObject* tuple = Py_BuildValue("(iiiiiiiiiiiiI)", t.step, t.round, t.block, t.block_rows, t.gemm.group, t.gemm.m_begin, t.gemm.num_rows,
                                    t.gemm.n_begin, t.gemm.k_begin, t.gemm.k_end, t.gemm.carry_in | t.gemm.carry_out << 1, t.gemm.share, t.k_before);
    const int failed = !tuple || PyList_Append(list, tuple) < 0;
    Py_XDECREF(tuple);
    if (failed) return -1;
  }
}

static PyObject* mega_moe_tiles(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  (void)module;
  static const dg_int_arg expected[] = {
      {"backward", 0, 1}, {"wanted", 0, 7}, {"saved_rounds", 0, 1}, {"accumulate", 0, 1}, {"block_n", 64, 1024}, {"cluster", 1, 2}, {"band", 1, 1024},
      {"intermediate_hidden", 1, 1 << 20}, {"hidden", 1, 1 << 20}, {"capacity_rows", 1, INT32_MAX}, {"unit_rows", 1, INT32_MAX},
      {"lag_tiles", 0, INT32_MAX}, {"cta", 0, 1 << 20}, {"num_ctas", 1, 1 << 20}};
  enum { kInts = sizeof(expected) / sizeof(expected[0]) };
  int64_t v[kInts], wide[DG_MEGA_MOE_MAX_EXPERTS];
  int ends[DG_MEGA_MOE_MAX_EXPERTS];
  if (nargs != kInts + 1) return PyErr_Format(PyExc_TypeError, "mega_moe_tiles takes %d arguments, got %zd", kInts + 1, nargs);
  if (dg_read_ints("mega_moe_tiles", expected, kInts, args, kInts, v) < 0) return NULL;
  const dg_int_arg entry = {"group_ends", 0, INT32_MAX};
  const Py_ssize_t groups = dg_read_int_sequence("mega_moe_tiles", entry, args[kInts], DG_MEGA_MOE_MAX_EXPERTS, wide);
  if (groups < 0) return NULL;
  for (Py_ssize_t i = 0; i < groups; i++) ends[i] = (int)wide[i];
  dg_mega_moe_schedule s = {.cluster = (int)v[5], .band = (int)v[6], .num_groups = (int)groups,
                            .capacity_rows = (int)v[9], .unit_rows = (int)v[10], .lag_tiles = (int)v[11]};
  const dg_mega_moe_wanted wanted = {.x = v[1] & 1, .w2 = v[1] >> 1 & 1, .w13 = v[1] >> 2 & 1};
  if (v[0]) dg_mega_moe_backward_steps(&s, (int)v[7], (int)v[8], (int)v[4], wanted, (int)v[2], (int)v[3]);
  else dg_mega_moe_forward_steps(&s, (int)v[7], (int)v[8], (int)v[4]);
  PyObject* list = PyList_New(0);
  if (list && append_mega_moe_tiles(list, &s, ends, (int)v[12], (int)v[13]) < 0) Py_CLEAR(list);
  return list;
}

static PyObject* mega_moe_steps(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  return Py_BuildValue("(ssssssss)", "gemm1", "gemm2", "dgrad2", "dgrad1", "wgrad2", "wgrad_gate", "wgrad_up", "round_end");
}

PyMethodDef dg_views_schedule_methods[] = {
    DG_METHOD("gemm_kinds", gemm_kinds, METH_NOARGS, "gemm_kinds() -> {name: value of DG_GEMM_*}"),
    DG_METHOD("gemm_epilogues", gemm_epilogues, METH_NOARGS, "gemm_epilogues() -> {name: value of DG_EPILOGUE_*}"),
    DG_METHOD("gemm_gathers", gemm_gathers, METH_NOARGS, "gemm_gathers() -> {name: value of DG_GATHER_*}"),
    DG_METHOD("gemm_smem_bytes", gemm_smem_bytes, METH_FASTCALL,
              "gemm_smem_bytes(block_m, block_n, block_k, num_stages, staging_boxes) -> dynamic shared memory in bytes"),
    DG_METHOD("gemm_tiles", gemm_tiles, METH_FASTCALL,
              "gemm_tiles(kind, block_m, block_n, cluster, band, m, n, k, num_groups, window_begin, window_end, alignment, store_empty, cta, num_ctas, layout)\n"
              "-> the tiles of one CTA in order: (group, m_begin, num_rows, n_begin, k_begin, k_end, carry_in, carry_out, share)"),
    DG_METHOD("mega_moe_tiles", mega_moe_tiles, METH_FASTCALL,
              "mega_moe_tiles(backward, wanted, saved_rounds, accumulate, block_n, cluster, band, intermediate_hidden, hidden, capacity_rows, unit_rows,\n"
              "lag_tiles, cta, num_ctas, group_ends) -> the tiles of one CTA in order: (step, round, block, block_rows, group, m_begin, num_rows,\n"
              "n_begin, k_begin, k_end, carry in | carry out << 1, share, k_before). wanted: dx | dw2 << 1 | dw13 << 2; step: a value of DG_STEP_*."),
    DG_METHOD("mega_moe_steps", mega_moe_steps, METH_NOARGS, "mega_moe_steps() -> names of DG_STEP_* in order"),
    {0}};
