// How a struct, or a table of memory regions, is written once and read by the device (C++, NVRTC), by the host extension (plain C)
// and, through it, by Python. A struct is a list of fields:
//
//   #define DG_EXAMPLE_PARAMS(F) F(tensor_map, a) F(pointer, d) F(i32, num_rows) F(peers, symm)
//   DG_DEFINE_STRUCT(ExampleParams, DG_EXAMPLE_PARAMS)
//
// and one line in layout/all_structs.h, which gives it to _C.pack, _C.struct_fields and _C.struct_size.
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

#ifndef __CUDACC_RTC__
#include <stddef.h>

// The same list read as a table: what the host needs to fill a struct by field name.
typedef enum {
  DG_KIND_tensor_map, DG_KIND_pointer, DG_KIND_i32, DG_KIND_i64, DG_KIND_u32, DG_KIND_u64, DG_KIND_f32, DG_KIND_peers
} dg_kind;
typedef struct { const char* name; dg_kind kind; size_t offset, size; } dg_field;
typedef struct { const char* name; size_t size, num_fields; const dg_field* (*fields)(void); } dg_struct;

// DG_STRUCT_TABLE(type, fields) defines `dg_fields_<type>()`; DG_STRUCT_ROW(type, fields) is the struct's entry in a list of all.
// offsetof needs the type where the list only names kind and field: a typedef of fixed name carries it in.
#define DG_FIELD_ROW(kind, name) {#name, DG_KIND_##kind, offsetof(dg_this_struct, name), sizeof(dg_field_##kind)},
#define DG_FIELD_COUNT(kind, name) +1
#define DG_STRUCT_TABLE(type, list)                              \
  static inline const dg_field* dg_fields_##type(void) {         \
    typedef type dg_this_struct;                                 \
    static const dg_field rows[] = {list(DG_FIELD_ROW)};         \
    return rows;                                                 \
  }
#define DG_STRUCT_ROW(type, list) {#type, sizeof(type), 0 list(DG_FIELD_COUNT), dg_fields_##type},
#endif

DG_SHARED dg_i64 dg_ceil_div(dg_i64 a, dg_i64 b) { return (a + b - 1) / b; }
DG_SHARED dg_i64 dg_align(dg_i64 a, dg_i64 b) { return dg_ceil_div(a, b) * b; }
// For numbers >= 0 that fit: on the device a 64-bit division takes a microsecond, which a schedule thread does not have.
DG_SHARED int dg_ceil_div_int(int a, int b) { return (int)(((unsigned)a + (unsigned)b - 1u) / (unsigned)b); }
DG_SHARED int dg_align_int(int a, int b) { return dg_ceil_div_int(a, b) * b; }

#endif
