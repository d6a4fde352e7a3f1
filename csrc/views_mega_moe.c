// Host views of include/deep_gemm/layout/mega_moe_*.h: regions, offsets and sizes, for Python (pattern: views_schedule.c).
#include "extension.h"

PyMethodDef dg_views_mega_moe_methods[] = {{0}};
