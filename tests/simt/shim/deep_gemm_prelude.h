// jit/headers.py, "deep_gemm_prelude.h", on the CPU.
#pragma once
#include "simt.h"
