// How a struct, or a table of memory regions, is written once and read by the device (C++, NVRTC), by the host extension (plain C)
// and, through it, by Python. A struct is a list of fields:
//
//   #define DG_EXAMPLE_PARAMS(F) F(tensor_map, a) F(pointer, d) F(i32, num_rows) F(peers, symm)
//   DG_DEFINE_STRUCT(ExampleParams, DG_EXAMPLE_PARAMS)
//
// Files in layout/ and schedule/ stay in the common subset of C99 and C++17, so that a machine with nothing but a C compiler builds
// the host side. Functions are marked DG_SHARED.
#ifndef DEEP_GEMM_LAYOUT_STRUCT_FIELDS_H
#define DEEP_GEMM_LAYOUT_STRUCT_FIELDS_H

#ifdef __CUDACC_RTC__
typedef signed int dg_i32;
typedef long long dg_i64;
typedef unsigned int dg_u32;
typedef unsigned long long dg_u64;
#else
#include <stdint.h>
typedef int32_t dg_i32;
typedef int64_t dg_i64;
typedef uint32_t dg_u32;
typedef uint64_t dg_u64;
#endif

#ifdef __cplusplus
#ifdef __CUDACC__
#define DG_SHARED __host__ __device__ constexpr inline
#else
#define DG_SHARED constexpr inline
#endif
#define DG_ALIGNAS(n) alignas(n)
#else
#define DG_SHARED static inline
#define DG_ALIGNAS(n) _Alignas(n)
#endif

// Ranks of one expert-parallel group that a kernel can address (one NVLink domain: NVL72).
#define DG_MAX_RANKS 72

typedef struct { DG_ALIGNAS(64) dg_u64 opaque[16]; } dg_field_tensor_map;  // CUtensorMap
typedef dg_u64 dg_field_pointer;                                           // device address
typedef dg_i32 dg_field_i32;
typedef dg_i64 dg_field_i64;
typedef dg_u32 dg_field_u32;
typedef dg_u64 dg_field_u64;
typedef float dg_field_f32;
typedef struct { dg_u64 address[DG_MAX_RANKS]; } dg_field_peers;           // one device address per rank

#define DG_STRUCT_MEMBER(kind, name) dg_field_##kind name;
#define DG_DEFINE_STRUCT(type, fields) typedef struct { fields(DG_STRUCT_MEMBER) } type;

DG_SHARED dg_i64 dg_ceil_div(dg_i64 a, dg_i64 b) { return (a + b - 1) / b; }
DG_SHARED dg_i64 dg_align(dg_i64 a, dg_i64 b) { return dg_ceil_div(a, b) * b; }

#endif
