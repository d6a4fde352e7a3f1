// Epilogues of the two GEMMs next to the gated activation, for a pool of rows (kind M_ENDS). Both write whole blocks of 64 rows: rows between a
// group's end and the next multiple of 128 hold nothing afterwards.
//
//   SwigluEpilogue   GEMM 1. The tile holds kBlockN / 2 gate columns, then the same columns of up:
//                    a = act(z + b13) [ * p ], and z itself if save_z. z is rounded to BF16 first, as backward will read it.
//   DswigluEpilogue  dgrad 2. The tile is dA' = dy W2; z comes by TMA:
//                    dZ = p act'(z + b13) dA',  A' = p a,  row_dp[n block][row] = sum of dA' a over the tile's columns.
//
// Results leave in boxes of 64 rows x 32 columns (64-byte swizzle). dZ may overwrite z: a thread reads its elements before it writes them.
#pragma once
#include <cuda_bf16.h>
#include <deep_gemm/epilogue/staging.cuh>
#include <deep_gemm/epilogue/swiglu.cuh>
#include <deep_gemm/layout/gemm_params.h>
#include <deep_gemm/schedule/gemm_tiles.h>

namespace deep_gemm {

constexpr int kGatedColumns = 32, kGatedBoxBytes = kWgmmaM * kGatedColumns * 2;

// Two neighbouring columns of one row.
struct Pair { float x, y; };

__device__ __forceinline__ Pair unpack_pair(uint32_t raw) { return {__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u)}; }
__device__ __forceinline__ uint32_t pack_pair(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

// The part of the gated parameters that both epilogues read; Params has GemmGatedParams' fields of these names.
template <class Params>
struct GatedInputs {
  const Params& params;

  template <bool kPlain>
  __device__ __forceinline__ auto constants() const {
    if constexpr (kPlain) return PlainSwiglu{};
    else return SwigluConstants{params.alpha, params.up_offset, params.clamp};
  }
  __device__ __forceinline__ bool is_plain() const { return !params.gate_bias && constants<false>().is_plain(); }

  // Adds the biases of columns `column` and `column + 1`, where there are any.
  __device__ __forceinline__ void add_bias(Pair& gate, Pair& up, int group, int column) const {
    if (!params.gate_bias || column >= params.n) return;
    const dg_i64 at = group * params.bias_stride + column;
    const Pair g = unpack_pair(*reinterpret_cast<const uint32_t*>(reinterpret_cast<const __nv_bfloat16*>(params.gate_bias) + at));
    const Pair u = unpack_pair(*reinterpret_cast<const uint32_t*>(reinterpret_cast<const __nv_bfloat16*>(params.up_bias) + at));
    gate.x += g.x, gate.y += g.y, up.x += u.x, up.y += u.y;
  }
  __device__ __forceinline__ float row_weight(int row) const {
    return params.row_weight ? *reinterpret_cast<const float*>(params.row_weight + row * params.row_weight_stride) : 1.f;
  }
};

// The 8 accumulators that a thread has of one of its two rows of a box: half step i = 2 * (64-row block * kBoxes + box) + half, in [kBegin, kEnd).
// Registers have no index, so a tree of branches finds them. Half steps are a loop, not unrolled: straight-line code for all of them would be
// 70 KB, and spend most of its time waiting for instructions.
constexpr int kGatedValues = kGatedColumns / 4;
template <int kBegin, int kEnd, int kBoxes, int kFirstColumn, int kAtoms, class Acc>
__device__ __forceinline__ void take_half(int i, const Acc (&acc)[kAtoms], float (&out)[kGatedValues]) {
  if constexpr (kEnd - kBegin > 1) {
    constexpr int kMiddle = (kBegin + kEnd) / 2;
    if (i < kMiddle) take_half<kBegin, kMiddle, kBoxes, kFirstColumn>(i, acc, out);
    else take_half<kMiddle, kEnd, kBoxes, kFirstColumn>(i, acc, out);
  } else {
    constexpr int kStep = kBegin / 2, kHalf = kBegin % 2, kFirst = (kFirstColumn + kStep % kBoxes * kGatedColumns) / 2;
#pragma unroll
    for (int j = 0; j < kGatedValues; ++j) out[j] = acc[kStep / kBoxes].value[kFirst + j / 2 * 4 + 2 * kHalf + j % 2];
  }
}

// z is saved in the first round of tiles that have rounds (schedule/mega_moe_tiles.h).
template <class Config>
struct SwigluEpilogue {
  static constexpr int kColumns = Config::kBlockN / 2, kBoxes = kColumns / kGatedColumns;
  static_assert(kColumns % kGatedColumns == 0);
  using Acc = Accumulator<Config::kBlockN>;
  struct Storage {
    static constexpr int kSets = 2;  // in turn
    struct Set {
      uint8_t gate[kGatedBoxBytes], up[kGatedBoxBytes], act[kGatedBoxBytes];
    };
    alignas(1024) Set set[kSets];
  };
  static_assert(sizeof(Storage) == Config::kStagingBoxes * DG_GEMM_BOX_BYTES);
  using Params = typename Config::Params;

  const Params& params;
  Storage& storage;
  const int first_row;  // of the tile that is this warpgroup's
  const Warpgroup warpgroup;

  __device__ __forceinline__ void begin(const dg_gemm_tile&) const {}

  template <class Tile, int kAtoms>
  __device__ __forceinline__ void run(const Tile& work, const Acc (&acc)[kAtoms]) const {
    const dg_gemm_tile& tile = gemm_of(work);
#pragma unroll 1
    for (int i = 0; i < 2 * kAtoms * kBoxes; ++i) {
      const int step = i / 2, half = i % 2, row = first_row + step / kBoxes * kWgmmaM, column = tile.n_begin + step % kBoxes * kGatedColumns;
      if (row >= tile.num_rows || column >= params.n) continue;
      auto& set = storage.set[step % Storage::kSets];
      // Boxes that are left out may make two steps in a row use one set: the first of a block of rows waits for all.
      if (half == 0) step % kBoxes == 0 ? warpgroup.template wait_until_read<0>() : warpgroup.template wait_until_read<1>();
      float gate[kGatedValues], up[kGatedValues];
      take_half<0, 2 * kAtoms * kBoxes, kBoxes, 0>(i, acc, gate);
      take_half<0, 2 * kAtoms * kBoxes, kBoxes, kColumns>(i, acc, up);
      if (GatedInputs<Params>{params}.is_plain()) half_step<true>(set, work, row, column, half, gate, up);
      else half_step<false>(set, work, row, column, half, gate, up);
      if (half == 0) continue;
      warpgroup.sync_for_tma();
      if (Warpgroup::leader()) store(set, column, tile.m_begin + row, saves_z(work));
    }
  }
  __device__ __forceinline__ void finish() const {
    if (Warpgroup::leader()) cute::tma_store_wait<0>();
  }

 private:
  template <class Tile>
  __device__ __forceinline__ static const dg_gemm_tile& gemm_of(const Tile& tile) {
    if constexpr (requires { tile.round; }) return tile.gemm; else return tile;
  }
  template <class Tile>
  __device__ __forceinline__ bool saves_z(const Tile& tile) const {
    if constexpr (requires { tile.round; }) return params.save_z && tile.round == 0; else return params.save_z;
  }

  // kPlain: no bias and PlainSwiglu. Compiled apart, as fewer instructions and no branch let the compiler work on several pairs at a time.
  template <bool kPlain, class Tile>
  __device__ __forceinline__ void half_step(typename Storage::Set& set, const Tile& work, int row, int column, int half,
                                            const float (&gate)[kGatedValues], const float (&up)[kGatedValues]) const {
    const dg_gemm_tile& tile = gemm_of(work);
    const int thread = ptx::thread_index_anew() % 128, quad = thread % 4, in_box = Acc::row(thread, half);
    const GatedInputs<Params> inputs{params};
    const auto constants = inputs.template constants<kPlain>();
    const float weight = row + in_box < tile.num_rows ? inputs.row_weight(tile.m_begin + row + in_box) : 0.f;
#pragma unroll
    for (int j = 0; j < kGatedValues / 2; ++j) {
      const int at = box_offset<64>(in_box, j) + quad * 4;
      const uint32_t gate_word = pack_pair(gate[2 * j], gate[2 * j + 1]), up_word = pack_pair(up[2 * j], up[2 * j + 1]);
      Pair g = unpack_pair(gate_word), u = unpack_pair(up_word);
      if constexpr (!kPlain) inputs.add_bias(g, u, tile.group, column + 8 * j + 2 * quad);
      const uint32_t act = pack_pair(weight * swiglu(g.x, u.x, constants), weight * swiglu(g.y, u.y, constants));
      *reinterpret_cast<uint32_t*>(set.act + at) = act;
      if (!saves_z(work)) continue;
      *reinterpret_cast<uint32_t*>(set.gate + at) = gate_word;
      *reinterpret_cast<uint32_t*>(set.up + at) = up_word;
    }
  }

  __device__ __forceinline__ void store(const typename Storage::Set& set, int column, int row, bool save_z) const {
    cute::SM90_TMA_STORE_2D::copy(&params.d_map, set.act, column, row);
    if (save_z) {
      cute::SM90_TMA_STORE_2D::copy(&params.z_gate_map, set.gate, column, row);
      cute::SM90_TMA_STORE_2D::copy(&params.z_up_map, set.up, column, row);
    }
    cute::tma_store_arrive();
  }
};

// What DswigluEpilogue keeps per warpgroup beside its boxes. Used by no other epilogue.
struct DswigluState {
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  static constexpr int kSets = 3;

  Barrier loaded[kSets];        // count 1: the leader's arrive with expected bytes; z of a step has landed. Waited on by the warpgroup
  float weight[2 * kWgmmaM];    // of the tile's rows
  float row_dp[kWgmmaM];        // sums so far. In shared memory, as two more registers would spill

  __device__ __forceinline__ void init_barriers() {
    for (auto& barrier : loaded) barrier.init(1);
  }
};

template <class Config>
struct DswigluEpilogue {
  static constexpr int kBoxes = Config::kBlockN / kGatedColumns, kSets = DswigluState::kSets;
  using Acc = Accumulator<Config::kBlockN>;
  struct Storage {
    struct Z {
      uint8_t gate[kGatedBoxBytes], up[kGatedBoxBytes];
    };
    alignas(1024) Z z[kSets];  // in turn; the gradient overwrites it
    uint8_t act[2][kGatedBoxBytes];
  };
  static_assert(sizeof(Storage) == Config::kStagingBoxes * DG_GEMM_BOX_BYTES);

  using Params = typename Config::Params;

  const Params& params;
  Storage& storage;
  const int first_row;
  const Warpgroup warpgroup;
  DswigluState& state;

  // Before the tile is multiplied: z of the first steps starts on its way, that of the others comes closer, to the L2.
  __device__ __forceinline__ void begin(const dg_gemm_tile& tile) const {
    const int thread = threadIdx.x % 128;
    if (thread < tile.num_rows - first_row) state.weight[thread] = GatedInputs<Params>{params}.row_weight(tile.m_begin + first_row + thread);
    if (Warpgroup::leader()) {
      cute::tma_store_wait<0>();
      for (int step = 0; step < kSets; ++step) load(tile, step);
      for (int step = kSets; step < Config::kBlockM / kWgmmaM * kBoxes; ++step) prefetch(tile, step);
    }
    warpgroup.sync();
  }

  // Rows that are not there, and columns past the end, take their steps too: TMA fills them with zeros and leaves them out.
  template <int kAtoms>
  __device__ __forceinline__ void run(const dg_gemm_tile& tile, const Acc (&acc)[kAtoms]) const {
    constexpr int kSteps = kAtoms * kBoxes;
    static_assert(kSteps % (2 * kSets) == 0, "the barriers of all sets are in phase 0 again after a tile");
    static_assert(kAtoms * kWgmmaM == Config::kBlockM, "a warpgroup has whole tiles: ping-pong");
#pragma unroll 1
    for (int i = 0; i < 2 * kSteps; ++i) {
      const int step = i / 2, half = i % 2, row = step / kBoxes * kWgmmaM;
      if (half == 0) {
        state.loaded[step % kSets].wait(step / kSets % 2);
      } else if (step > 0 && Warpgroup::leader()) {
        // What the step before stored has been read: its set of z may be loaded, and, after this step, its box of A' be written. In the middle of
        // a step, so that nobody waits for TMA to read it.
        cute::tma_store_wait<0>();
        if (step + kSets - 1 < kSteps) load(tile, step + kSets - 1);
      }
      float da[kGatedValues];
      take_half<0, 2 * kSteps, kBoxes, 0>(i, acc, da);
      if (GatedInputs<Params>{params}.is_plain()) half_step<true>(storage.z[step % kSets], storage.act[step % 2], tile, row, step % kBoxes, half, da);
      else half_step<false>(storage.z[step % kSets], storage.act[step % 2], tile, row, step % kBoxes, half, da);
      if (half == 0) continue;
      warpgroup.sync_for_tma();
      if (Warpgroup::leader() && row < tile.num_rows) store(step, tile.n_begin + step % kBoxes * kGatedColumns, tile.m_begin + row);
    }
  }
  __device__ __forceinline__ void finish() const {
    if (Warpgroup::leader()) cute::tma_store_wait<0>();
  }

 private:
  __device__ __forceinline__ static int column_of(const dg_gemm_tile& tile, int step) { return tile.n_begin + step % kBoxes * kGatedColumns; }
  __device__ __forceinline__ static int row_of(const dg_gemm_tile& tile, int step) { return tile.m_begin + step / kBoxes * kWgmmaM; }

  __device__ __forceinline__ void load(const dg_gemm_tile& tile, int step) const {
    auto& z = storage.z[step % kSets];
    auto* bar = reinterpret_cast<uint64_t*>(&state.loaded[step % kSets]);
    constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    state.loaded[step % kSets].arrive_and_expect_tx(2 * kGatedBoxBytes);
    cute::SM90_TMA_LOAD_2D::copy(&params.z_gate_map, bar, kHint, z.gate, column_of(tile, step), row_of(tile, step));
    cute::SM90_TMA_LOAD_2D::copy(&params.z_up_map, bar, kHint, z.up, column_of(tile, step), row_of(tile, step));
  }
  __device__ __forceinline__ void prefetch(const dg_gemm_tile& tile, int step) const {
    cute::SM90_TMA_LOAD_2D::PREFETCH::copy(&params.z_gate_map, column_of(tile, step), row_of(tile, step));
    cute::SM90_TMA_LOAD_2D::PREFETCH::copy(&params.z_up_map, column_of(tile, step), row_of(tile, step));
  }
  __device__ __forceinline__ void store(int step, int column, int row) const {
    cute::SM90_TMA_STORE_2D::copy(&params.dz_gate_map, storage.z[step % kSets].gate, column, row);
    cute::SM90_TMA_STORE_2D::copy(&params.dz_up_map, storage.z[step % kSets].up, column, row);
    cute::SM90_TMA_STORE_2D::copy(&params.d_map, storage.act[step % 2], column, row);
    cute::tma_store_arrive();
  }

  // One of the two rows that a thread has of a box: in place, gate and up become their gradients. All of z is read first: the compiler cannot
  // know that the writes do not change it.
  template <bool kPlain>
  __device__ __forceinline__ void half_step(typename Storage::Z& z, uint8_t* act, const dg_gemm_tile& tile, int row, int box, int half,
                                            const float (&da)[kGatedValues]) const {
    const int thread = ptx::thread_index_anew() % 128, quad = thread % 4, in_box = Acc::row(thread, half);
    const GatedInputs<Params> inputs{params};
    const auto constants = inputs.template constants<kPlain>();
    const float weight = state.weight[row + in_box];
    uint32_t gate_word[kGatedValues / 2], up_word[kGatedValues / 2], act_word[kGatedValues / 2];
    float dp = 0.f;
#pragma unroll
    for (int j = 0; j < kGatedValues / 2; ++j) {
      const int at = box_offset<64>(in_box, j) + quad * 4;
      gate_word[j] = *reinterpret_cast<const uint32_t*>(z.gate + at), up_word[j] = *reinterpret_cast<const uint32_t*>(z.up + at);
    }
#pragma unroll
    for (int j = 0; j < kGatedValues / 2; ++j) {
      const int column = tile.n_begin + box * kGatedColumns + 8 * j + 2 * quad;
      Pair gate = unpack_pair(gate_word[j]), up = unpack_pair(up_word[j]);
      if constexpr (!kPlain) inputs.add_bias(gate, up, tile.group, column);
      const SwigluGradient x = dswiglu(gate.x, up.x, weight * da[2 * j], constants);
      const SwigluGradient y = dswiglu(gate.y, up.y, weight * da[2 * j + 1], constants);
      gate_word[j] = pack_pair(x.dgate, y.dgate), up_word[j] = pack_pair(x.dup, y.dup), act_word[j] = pack_pair(weight * x.a, weight * y.a);
      dp += column < params.n ? da[2 * j] * x.a + da[2 * j + 1] * y.a : 0.f;  // past the end accumulators are undefined
    }
#pragma unroll
    for (int j = 0; j < kGatedValues / 2; ++j) {
      const int at = box_offset<64>(in_box, j) + quad * 4;
      *reinterpret_cast<uint32_t*>(z.gate + at) = gate_word[j], *reinterpret_cast<uint32_t*>(z.up + at) = up_word[j];
      *reinterpret_cast<uint32_t*>(act + at) = act_word[j];
    }
    add_dp(tile, row, in_box, box, quad, dp);
  }

  // The four threads of a quad hold one row. After the last box the row's sum goes out.
  __device__ __forceinline__ void add_dp(const dg_gemm_tile& tile, int row, int in_box, int box, int quad, float dp) const {
    dp += __shfl_xor_sync(~0u, dp, 1);
    dp += __shfl_xor_sync(~0u, dp, 2);
    if (quad != 0) return;
    if (box > 0) dp += state.row_dp[in_box];
    if (box < kBoxes - 1) {
      state.row_dp[in_box] = dp;
    } else if (row + in_box < tile.num_rows) {
      reinterpret_cast<float*>(params.row_dp)[tile.n_begin / Config::kBlockN * params.row_dp_stride + tile.m_begin + row + in_box] = dp;
    }
  }
};

}  // namespace deep_gemm
