// Host views of include/deep_gemm/layout/mega_moe_*.h: regions, offsets, sizes and enumerators, for Python (pattern: views_schedule.c).
#include <deep_gemm/layout/mega_moe_params.h>

#include "extension.h"

#define REGION_NAME(name, bytes) #name,
#define ENUM_NAME(name) #name,
static const char* const symm_names[] = {DG_MEGA_MOE_SYMM_REGIONS(REGION_NAME)};
static const char* const scratch_names[] = {DG_MEGA_MOE_SCRATCH_REGIONS(REGION_NAME)};
static const char* const phase_names[] = {DG_MEGA_MOE_PHASES(ENUM_NAME)};
static const char* const fault_names[] = {DG_MEGA_MOE_FAULTS(ENUM_NAME)};

typedef dg_i64 (*offset_function)(const dg_mega_moe*, int);

// ((name, offset, bytes), ...) of consecutive regions; bytes include the padding up to the next one.
static PyObject* region_rows(const dg_mega_moe* s, offset_function offset, const char* const* names, int count) {
  PyObject* rows = PyTuple_New(count);
  for (int i = 0; rows && i < count; i++) {
    const long long begin = offset(s, i), end = offset(s, i + 1);
    PyObject* row = Py_BuildValue("(sLL)", names[i], begin, end - begin);
    if (!row || PyTuple_SetItem(rows, i, row) < 0) Py_CLEAR(rows);
  }
  return rows;
}

static PyObject* mega_moe_layout(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  (void)module;
  const int64_t many = INT64_C(1) << 40;
  const dg_int_arg expected[] = {{"num_experts", 1, DG_MEGA_MOE_MAX_EXPERTS}, {"num_ranks", 1, DG_MAX_RANKS}, {"num_topk", 1, DG_MEGA_MOE_MAX_TOPK},
                                 {"hidden", 1, 1 << 20}, {"intermediate_hidden", 1, 1 << 20}, {"max_tokens", 1, INT32_MAX}, {"expected_rows", 1, many}};
  int64_t v[7];
  if (dg_read_ints("mega_moe_layout", expected, 7, args, nargs, v) < 0) return NULL;
  const dg_mega_moe s = {v[0], v[1], v[2], v[3], v[4], v[5], v[6]};
  PyObject* symm = region_rows(&s, dg_mega_moe_symm_offset, symm_names, DG_NUM_SYMM_REGIONS);
  PyObject* scratch = symm ? region_rows(&s, dg_mega_moe_scratch_offset, scratch_names, DG_NUM_SCRATCH_REGIONS) : NULL;
  if (!scratch) {
    Py_XDECREF(symm);
    return NULL;
  }
  return Py_BuildValue("{sN sN sL sL sL sL sL sL}", "symm", symm, "scratch", scratch, "symm_bytes",
                       (long long)dg_mega_moe_symm_offset(&s, DG_NUM_SYMM_REGIONS), "scratch_bytes",
                       (long long)dg_mega_moe_scratch_offset(&s, DG_NUM_SCRATCH_REGIONS), "capacity_rows",
                       (long long)dg_mega_moe_capacity_rows(&s), "worst_rows", (long long)dg_mega_moe_worst_rows(&s), "rounds",
                       (long long)dg_mega_moe_rounds(&s), "route_smem_bytes", (long long)dg_mega_moe_route_smem_bytes(s.num_experts));
}

static PyObject* names_tuple(const char* const* names, int count) {
  PyObject* tuple = PyTuple_New(count);
  for (int i = 0; tuple && i < count; i++) {
    PyObject* name = PyUnicode_FromString(names[i]);
    if (!name || PyTuple_SetItem(tuple, i, name) < 0) Py_CLEAR(tuple);
  }
  return tuple;
}

static PyObject* mega_moe_constants(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  PyObject* phases = names_tuple(phase_names, DG_NUM_PHASES);
  PyObject* faults = phases ? names_tuple(fault_names, DG_NUM_FAULTS) : NULL;
  if (!faults) {
    Py_XDECREF(phases);
    return NULL;
  }
  return Py_BuildValue("{sN sN si si si si si si si si si si}", "phases", phases, "faults", faults, "fault_records", DG_NUM_FAULT_RECORDS, "row_align",
                       DG_MEGA_MOE_ROW_ALIGN, "route_block", DG_MEGA_MOE_ROUTE_BLOCK, "route_warps", DG_MEGA_MOE_ROUTE_WARPS, "max_experts",
                       DG_MEGA_MOE_MAX_EXPERTS, "max_topk", DG_MEGA_MOE_MAX_TOPK, "max_ranks", DG_MAX_RANKS, "tag_detail_shift",
                       DG_TAG_DETAIL_SHIFT, "max_ctas", DG_MEGA_MOE_MAX_CTAS, "block_n", DG_MEGA_MOE_BLOCK_N);
}

static PyObject* mega_moe_smem_bytes(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  (void)module;
  static const dg_int_arg expected[] = {{"backward", 0, 1}, {"block_n", 64, 256}, {"num_stages", 1, 64}};
  int64_t v[3];
  if (dg_read_ints("mega_moe_smem_bytes", expected, 3, args, nargs, v) < 0) return NULL;
  return PyLong_FromLongLong((v[0] ? dg_mega_moe_backward_smem_bytes : dg_mega_moe_forward_smem_bytes)((int)v[1], (int)v[2]));
}

PyMethodDef dg_views_mega_moe_methods[] = {
    DG_METHOD("mega_moe_layout", mega_moe_layout, METH_FASTCALL,
              "mega_moe_layout(num_experts, num_ranks, num_topk, hidden, intermediate_hidden, max_tokens, expected_rows) -> dict\n\n"
              "symm, scratch: ((region, offset, bytes), ...); symm_bytes, scratch_bytes; capacity_rows: pool rows of a round; worst_rows: virtual\n"
              "rows if every entry came here; rounds; route_smem_bytes."),
    DG_METHOD("mega_moe_constants", mega_moe_constants, METH_NOARGS, "mega_moe_constants() -> dict of the enumerators and limits of the layout"),
    DG_METHOD("mega_moe_smem_bytes", mega_moe_smem_bytes, METH_FASTCALL,
              "mega_moe_smem_bytes(backward, block_n, num_stages) -> dynamic shared memory of a fused launch in bytes"),
    {0}};
