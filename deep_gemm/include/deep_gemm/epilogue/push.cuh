// Epilogue of GEMM 2, and of dgrad 1: each row, forward with the expert's bias, goes to slot (t, k) of the token's owner, in BF16.
//
// 64 rows are staged, each followed by 16 bytes, so that the accumulator's 8 rows lie in different banks; then one thread per row copies it in bulk,
// to its own or a peer's memory, beside the next tile's mainloop.
#pragma once
#include <cuda_bf16.h>
#include <deep_gemm/comm/rows.cuh>
#include <deep_gemm/epilogue/staging.cuh>
#include <deep_gemm/ptx/bulk_copy.cuh>
#include <deep_gemm/schedule/gemm_tiles.h>

namespace deep_gemm {

template <class Config>
struct PushEpilogue {
  using Params = typename Config::Params;
  using Acc = Accumulator<Config::kBlockN>;
  static constexpr int kRowBytes = 2 * Config::kBlockN + 16;
  struct Storage {
    alignas(128) uint8_t row[kWgmmaM][kRowBytes];
  };

  const Params& params;
  Storage& storage;
  const int first_row;  // of the tile that is this warpgroup's
  const Warpgroup warpgroup;

  template <int kAtoms>
  __device__ __forceinline__ void run(const dg_gemm_tile& tile, const Acc (&acc)[kAtoms]) const {
#pragma unroll
    for (int i = 0; i < kAtoms; ++i) run_block(tile, first_row + i * kWgmmaM, acc[i]);
  }

 private:
  // 64 rows, the first of which is row `row` of the tile.
  __device__ __forceinline__ void run_block(const dg_gemm_tile& tile, int row, const Acc& acc) const {
    if (row >= tile.num_rows) return;
    ptx::bulk_wait_read<0>();  // of this thread; any thread's row may be written by others
    warpgroup.sync();
    stage(tile, acc);
    warpgroup.sync_for_tma();
    push(tile, row);
  }

  __device__ __forceinline__ void stage(const dg_gemm_tile& tile, const Acc& acc) const {
    constexpr auto kChunks = ::cuda::std::make_index_sequence<Config::kBlockN / 8>{};
    if constexpr (requires { params.b2; }) {
      if (params.b2) return stage<true>(tile, acc, kChunks);
    }
    stage<false>(tile, acc, kChunks);
  }

  template <bool kBias, size_t... kChunk>
  __device__ __forceinline__ void stage(const dg_gemm_tile& tile, const Acc& acc, ::cuda::std::index_sequence<kChunk...>) const {
    (stage_chunk<kBias, kChunk>(tile, acc), ...);
  }

  // 8 columns of 64 rows.
  template <bool kBias, int kChunk>
  __device__ __forceinline__ void stage_chunk(const dg_gemm_tile& tile, const Acc& acc) const {
    const int thread = ptx::thread_index_anew() % 128, column = 8 * kChunk + thread % 4 * 2;
    float bias[2] = {0.f, 0.f};
    if constexpr (kBias) {
      if (tile.n_begin + column < params.hidden) {
        const auto* b2 = pointer<const __nv_bfloat16>(params.b2) + tile.group * params.b2_stride + tile.n_begin + column;
        bias[0] = __bfloat162float(b2[0]), bias[1] = __bfloat162float(b2[1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int reg = 4 * kChunk + 2 * half;
      auto* to = reinterpret_cast<__nv_bfloat162*>(storage.row[Acc::row(thread, half)] + 2 * column);
      *to = __floats2bfloat162_rn(acc.value[reg] + bias[0], acc.value[reg + 1] + bias[1]);
    }
  }

  __device__ __forceinline__ void push(const dg_gemm_tile& tile, int row) const {
    // 16 rows a warp, as a warp's copies are issued one after another.
    const int thread = ptx::thread_index_anew() % 128, in_block = thread / 32 * 16 + thread % 16;
    if (thread % 32 < 16 && row + in_block < tile.num_rows) {
      // Written during this launch, by another SM.
      const uint4 raw = ptx::ld_global_cg_v4(pointer<const uint4>(params.row_meta) + tile.m_begin + row + in_block);
      const int source = static_cast<int>(raw.x), entry = static_cast<int>(raw.y);
      auto* slot = peer_pointer<__nv_bfloat16>(params.symm, source, params.combine_offset) + static_cast<dg_i64>(entry) * params.hidden;
      ptx::bulk_store(slot + tile.n_begin, storage.row[in_block], 2 * dg_min(Config::kBlockN, params.hidden - tile.n_begin));
    }
    ptx::bulk_commit();
  }
};

}  // namespace deep_gemm
