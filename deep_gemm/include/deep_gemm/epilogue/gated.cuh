// Epilogues of the two GEMMs next to the gated activation, for a pool of rows (kind M_ENDS). Rows between a group's end and the next multiple of 128
// are not touched.
//
//   SwigluEpilogue   GEMM 1. The tile holds kBlockN / 2 gate columns, then the same columns of up:
//                    a = act(z + b13) [ * p ], and z itself if save_z. z is rounded to BF16 first, as backward will read it.
//   DswigluEpilogue  dgrad 2. The tile is dA' = dy W2; z comes by TMA in boxes of 64 rows x 32 columns (64-byte swizzle):
//                    dZ = p act'(z + b13) dA',  A' = p a,  row_dp[n block][row] = sum of dA' a over the tile's columns.
//
// Results go from registers to memory: the four threads that share a row swap what they have until each has 16 neighbouring bytes. Through shared
// memory and TMA every 64 x 32 results cost two barriers and a wait for TMA, three quarters of the epilogue's time (docs/perf/mega_moe_forward.md).
// dZ may overwrite z: TMA has read an element before it is written.
#pragma once
#include <cuda_bf16.h>
#include <deep_gemm/epilogue/staging.cuh>
#include <deep_gemm/epilogue/swiglu.cuh>
#include <deep_gemm/epilogue/vector.cuh>
#include <deep_gemm/layout/gemm_params.h>
#include <deep_gemm/schedule/gemm_tiles.h>

namespace deep_gemm {

constexpr int kGatedColumns = 32, kGatedBoxBytes = kWgmmaM * kGatedColumns * 2;

// The GEMM tile of a tile that may have a step and a round, too (schedule/mega_moe_tiles.h).
template <class Tile>
__device__ __forceinline__ const dg_gemm_tile& gemm_of(const Tile& tile) {
  if constexpr (requires { tile.round; }) return tile.gemm; else return tile;
}

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
    // From the L2: a fused launch has written it.
    return params.row_weight ? ptx::ld_global_cg_f32(reinterpret_cast<const float*>(params.row_weight + row * params.row_weight_stride)) : 1.f;
  }
};

// The four threads of a quad hold word j of chunk j of one row; afterwards each holds the four words of the chunk of its number.
__device__ __forceinline__ void gather_chunk(uint32_t (&word)[4], int quad) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool high = quad & bit;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      uint32_t &low_word = word[j], &high_word = word[j | bit];
      const uint32_t other = __shfl_xor_sync(~0u, high ? low_word : high_word, bit);
      if (high) low_word = other; else high_word = other;
    }
  }
}

// Columns column + 8 * quad .. + 7 of a row; `word` as for gather_chunk. All lanes of a warp together; exists: this thread's chunk does.
__device__ __forceinline__ void store_chunk_of_quad(dg_field_pointer base, dg_i64 ld, int row, int column, int quad, uint32_t (&word)[4], bool exists) {
  gather_chunk(word, quad);
  if (exists) ptx::st_global_na_v4(reinterpret_cast<__nv_bfloat16*>(base) + row * ld + column + 8 * quad, make_uint4(word[0], word[1], word[2], word[3]));
}

// The same for two chunks: afterwards thread q holds columns 4q .. 4q + 3 of the 16.
__device__ __forceinline__ void gather_half_chunk(uint32_t (&word)[2], int quad) {
  const bool second = quad & 2, odd = quad & 1;
  uint32_t other = __shfl_xor_sync(~0u, second ? word[0] : word[1], 2);
  if (second) word[0] = other; else word[1] = other;
  other = __shfl_xor_sync(~0u, odd ? word[0] : word[1], 1);
  if (odd) word[0] = other; else word[1] = other;
}
// Columns column + 4 * quad .. + 3 of a row.
__device__ __forceinline__ void store_half_chunk(dg_field_pointer base, dg_i64 ld, int row, int column, int quad, uint32_t (&word)[2], bool exists) {
  gather_half_chunk(word, quad);
  if (exists) ptx::st_global_na_v2(reinterpret_cast<__nv_bfloat16*>(base) + row * ld + column + 4 * quad, make_uint2(word[0], word[1]));
}

// The 8 accumulators that a thread has of one of its two rows of a box: half step i = 2 * (64-row block * kBoxes + box) + half, in [kBegin, kEnd).
// Registers have no index, so a tree of branches finds them where i is not a constant. With kColumns = 16, steps are as many half boxes.
template <int kBegin, int kEnd, int kBoxes, int kFirstColumn, int kColumns = kGatedColumns, int kAtoms, class Acc>
__device__ __forceinline__ void take_half(int i, const Acc (&acc)[kAtoms], float (&out)[kColumns / 4]) {
  if constexpr (kEnd - kBegin > 1) {
    constexpr int kMiddle = (kBegin + kEnd) / 2;
    if (i < kMiddle) take_half<kBegin, kMiddle, kBoxes, kFirstColumn, kColumns>(i, acc, out);
    else take_half<kMiddle, kEnd, kBoxes, kFirstColumn, kColumns>(i, acc, out);
  } else {
    constexpr int kStep = kBegin / 2, kHalf = kBegin % 2, kFirst = (kFirstColumn + kStep % kBoxes * kColumns) / 2;
#pragma unroll
    for (int j = 0; j < kColumns / 4; ++j) out[j] = acc[kStep / kBoxes].value[kFirst + j / 2 * 4 + 2 * kHalf + j % 2];
  }
}

// Tiles that have rounds (schedule/mega_moe_tiles.h): z is saved in the first. kActivates: a is made; else only z, in every round.
template <class Config, bool kActivates = true>
struct SwigluEpilogue {
  static constexpr int kColumns = Config::kBlockN / 2, kBoxes = kColumns / kGatedColumns;
  static_assert(kColumns % kGatedColumns == 0);
  using Acc = Accumulator<Config::kBlockN>;
  struct Storage {};
  using Params = typename Config::Params;

  const Params& params;
  const int first_row;  // of the tile that is this warpgroup's

  __device__ __forceinline__ void begin(const dg_gemm_tile&) const {}

  // Without bias, weight and with PlainSwiglu: straight on, which the epilogue's time depends on, as one warp a scheduler has nothing but neighbouring
  // instructions to hide latencies with.
  template <class Tile, int kAtoms>
  __device__ __forceinline__ void run(const Tile& work, const Acc (&acc)[kAtoms]) const {
    constexpr int kSteps = 2 * kAtoms * kBoxes;
    if (GatedInputs<Params>{params}.is_plain() && !params.row_weight) return run_straight(work, acc, ::cuda::std::make_index_sequence<kSteps>{});
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) run_half<0, kSteps, false>(work, acc, i);
  }
  __device__ __forceinline__ void finish() const {}

 private:
  static constexpr int kWords = kGatedColumns / 8;  // of two columns, that a thread has of one row of a box

  template <class Tile>
  __device__ __forceinline__ bool saves_z(const Tile& tile) const {
    if constexpr (!kActivates) return true;
    else if constexpr (requires { tile.round; }) return params.save_z && tile.round == 0;
    else return params.save_z;
  }

  template <class Tile, int kAtoms, size_t... kHalf>
  __device__ __forceinline__ void run_straight(const Tile& work, const Acc (&acc)[kAtoms], ::cuda::std::index_sequence<kHalf...>) const {
    (run_half<kHalf, kHalf + 1, true>(work, acc, kHalf), ...);
  }

  // Half step i, in [kBegin, kEnd).
  template <int kBegin, int kEnd, bool kPlain, class Tile, int kAtoms>
  __device__ __forceinline__ void run_half(const Tile& work, const Acc (&acc)[kAtoms], int i) const {
    const int row = first_row + i / 2 / kBoxes * kWgmmaM, column = gemm_of(work).n_begin + i / 2 % kBoxes * kGatedColumns;
    if (row >= gemm_of(work).num_rows || column >= params.n) return;
    float gate[2 * kWords], up[2 * kWords];
    take_half<kBegin, kEnd, kBoxes, 0>(i, acc, gate);
    take_half<kBegin, kEnd, kBoxes, kColumns>(i, acc, up);
    half_step<kPlain>(work, row, column, i % 2, gate, up);
  }

  // One of the two rows that a thread has of a box.
  template <bool kPlain, class Tile>
  __device__ __forceinline__ void half_step(const Tile& work, int row, int column, int half, const float (&gate)[2 * kWords],
                                            const float (&up)[2 * kWords]) const {
    const dg_gemm_tile& tile = gemm_of(work);
    const int thread = ptx::thread_index_anew() % 128, quad = thread % 4, in_tile = row + Acc::row(thread, half), pool_row = tile.m_begin + in_tile;
    const bool exists = in_tile < tile.num_rows && column + 8 * quad < params.n;
    uint32_t gate_word[kWords], up_word[kWords];
#pragma unroll
    for (int j = 0; j < kWords; ++j) gate_word[j] = pack_pair(gate[2 * j], gate[2 * j + 1]), up_word[j] = pack_pair(up[2 * j], up[2 * j + 1]);
    if constexpr (kActivates) {
      uint32_t act_word[kWords];
      activate<kPlain>(tile, in_tile, column + 2 * quad, gate_word, up_word, act_word);
      store_chunk_of_quad(params.d, params.ldd, pool_row, column, quad, act_word, exists);
    }
    if (!saves_z(work)) return;
    store_chunk_of_quad(params.gate_out, params.gate_up_ld, pool_row, column, quad, gate_word, exists);
    store_chunk_of_quad(params.up_out, params.gate_up_ld, pool_row, column, quad, up_word, exists);
  }

  template <bool kPlain>
  __device__ __forceinline__ void activate(const dg_gemm_tile& tile, int in_tile, int column, const uint32_t (&gate)[kWords],
                                           const uint32_t (&up)[kWords], uint32_t (&act)[kWords]) const {
    const GatedInputs<Params> inputs{params};
    const auto constants = inputs.template constants<kPlain>();
    const float weight = !kPlain && in_tile < tile.num_rows ? inputs.row_weight(tile.m_begin + in_tile) : 1.f;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      Pair g = unpack_pair(gate[j]), u = unpack_pair(up[j]);
      if constexpr (!kPlain) inputs.add_bias(g, u, tile.group, column + 8 * j);
      Pair a = {swiglu(g.x, u.x, constants), swiglu(g.y, u.y, constants)};
      if constexpr (!kPlain) a.x *= weight, a.y *= weight;
      act[j] = pack_pair(a.x, a.y);
    }
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
    alignas(1024) Z z[kSets];  // in turn
  };
  using Params = typename Config::Params;

  const Params& params;
  Storage& storage;
  const int first_row;
  const Warpgroup warpgroup;
  DswigluState& state;

  // Before the tile is multiplied: z of the first steps starts on its way, that of the others comes closer, to the L2. A fused launch calls the two
  // halves: rows that it has written itself are there only after the multiplication, and so is the staging that two warpgroups share.
  template <class Tile>
  __device__ __forceinline__ void begin(const Tile& work) const {
    start(work);
    prefetch(work, kSets);
  }
  template <class Tile>
  __device__ __forceinline__ void start(const Tile& work) const {
    const dg_gemm_tile& tile = gemm_of(work);
    const int thread = threadIdx.x % 128;
    if (thread < tile.num_rows - first_row) state.weight[thread] = GatedInputs<Params>{params}.row_weight(tile.m_begin + first_row + thread);
    if (Warpgroup::leader())
      for (int step = 0; step < kSets; ++step) load(work, step);
    warpgroup.sync();
  }
  template <class Tile>
  __device__ __forceinline__ void prefetch(const Tile& work, int first) const {
    if (!Warpgroup::leader()) return;
    for (int step = first; step < Config::kBlockM / kWgmmaM * kBoxes; ++step) {
      cute::SM90_TMA_LOAD_2D::PREFETCH::copy(z_map(work, true), column_of(gemm_of(work), step), row_of(gemm_of(work), step));
      cute::SM90_TMA_LOAD_2D::PREFETCH::copy(z_map(work, false), column_of(gemm_of(work), step), row_of(gemm_of(work), step));
    }
  }

  // Rows that are not there, and columns past the end, take their steps too: TMA fills them with zeros, and they are not stored.
  template <class Tile, int kAtoms>
  __device__ __forceinline__ void run(const Tile& work, const Acc (&acc)[kAtoms]) const {
    constexpr int kSteps = kAtoms * kBoxes;
    static_assert(kSteps % (2 * kSets) == 0, "the barriers of all sets are in phase 0 again after a tile");
    static_assert(kAtoms * kWgmmaM == Config::kBlockM, "a warpgroup has whole tiles: ping-pong");
#pragma unroll 1
    for (int i = 0; i < 4 * kSteps; ++i) {  // of half a box, and of it one of the two rows that a thread has
      const int step = i / 4, row = step / kBoxes * kWgmmaM;
      if (i % 4 == 0) state.loaded[step % kSets].wait(step / kSets % 2);
      float da[2 * kWords];
      take_half<0, 4 * kSteps, 2 * kBoxes, 0, kPartColumns>(i, acc, da);
      if (GatedInputs<Params>{params}.is_plain()) part<true>(storage.z[step % kSets], gemm_of(work), row, i / 2 % (2 * kBoxes), i % 2, da);
      else part<false>(storage.z[step % kSets], gemm_of(work), row, i / 2 % (2 * kBoxes), i % 2, da);
      if (i % 4 < 3) continue;
      warpgroup.sync();  // all have read the step's z
      if (Warpgroup::leader() && step + kSets < kSteps) load(work, step + kSets);
    }
  }
  __device__ __forceinline__ void finish() const {}

 private:
  static constexpr int kPartColumns = kGatedColumns / 2, kWords = kPartColumns / 8;

  __device__ __forceinline__ static int column_of(const dg_gemm_tile& tile, int step) { return tile.n_begin + step % kBoxes * kGatedColumns; }
  __device__ __forceinline__ static int row_of(const dg_gemm_tile& tile, int step) { return tile.m_begin + step / kBoxes * kWgmmaM; }

  // Where z of a tile lies: in rounds that recompute it, where its gradient goes.
  template <class Tile>
  __device__ __forceinline__ const void* z_map(const Tile& tile, bool gate) const {
    if constexpr (requires { params.saved_rounds; }) {
      if (tile.round >= params.saved_rounds) return gate ? &params.z_again_gate_map : &params.z_again_up_map;
    }
    return gate ? &params.z_gate_map : &params.z_up_map;
  }

  template <class Tile>
  __device__ __forceinline__ void load(const Tile& work, int step) const {
    const dg_gemm_tile& tile = gemm_of(work);
    auto& z = storage.z[step % kSets];
    auto* bar = reinterpret_cast<uint64_t*>(&state.loaded[step % kSets]);
    constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    state.loaded[step % kSets].arrive_and_expect_tx(2 * kGatedBoxBytes);
    cute::SM90_TMA_LOAD_2D::copy(z_map(work, true), bar, kHint, z.gate, column_of(tile, step), row_of(tile, step));
    cute::SM90_TMA_LOAD_2D::copy(z_map(work, false), bar, kHint, z.up, column_of(tile, step), row_of(tile, step));
  }

  // Part of a box: 16 columns of one row. More at a time would not fit beside the accumulators.
  template <bool kPlain>
  __device__ __forceinline__ void part(const typename Storage::Z& z, const dg_gemm_tile& tile, int row, int number, int half,
                                       const float (&da)[2 * kWords]) const {
    const int thread = ptx::thread_index_anew() % 128, quad = thread % 4, in_box = Acc::row(thread, half), first = tile.n_begin + number * kPartColumns;
    const GatedInputs<Params> inputs{params};
    const auto constants = inputs.template constants<kPlain>();
    const float weight = state.weight[row + in_box];
    uint32_t gate_word[kWords], up_word[kWords], act_word[kWords];
    float dp = 0.f;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int column = first + 8 * j + 2 * quad, at = box_offset<64>(in_box, number % 2 * kWords + j) + quad * 4;
      Pair gate = unpack_pair(*reinterpret_cast<const uint32_t*>(z.gate + at)), up = unpack_pair(*reinterpret_cast<const uint32_t*>(z.up + at));
      if constexpr (!kPlain) inputs.add_bias(gate, up, tile.group, column);
      const SwigluGradient x = dswiglu(gate.x, up.x, weight * da[2 * j], constants);
      const SwigluGradient y = dswiglu(gate.y, up.y, weight * da[2 * j + 1], constants);
      gate_word[j] = pack_pair(x.dgate, y.dgate), up_word[j] = pack_pair(x.dup, y.dup), act_word[j] = pack_pair(weight * x.a, weight * y.a);
      dp += column < params.n ? da[2 * j] * x.a + da[2 * j + 1] * y.a : 0.f;  // past the end accumulators are undefined
    }
    const int pool_row = tile.m_begin + row + in_box;
    const bool exists = row + in_box < tile.num_rows && first + 4 * quad < params.n;
    add_dp(tile, row, in_box, number, quad, dp);
    store_half_chunk(params.d, params.ldd, pool_row, first, quad, act_word, exists);
    store_half_chunk(params.gate_out, params.gate_up_ld, pool_row, first, quad, gate_word, exists);
    store_half_chunk(params.up_out, params.gate_up_ld, pool_row, first, quad, up_word, exists);
  }

  // The four threads of a quad hold one row. After the last part the row's sum goes out.
  __device__ __forceinline__ void add_dp(const dg_gemm_tile& tile, int row, int in_box, int number, int quad, float dp) const {
    dp += __shfl_xor_sync(~0u, dp, 1);
    dp += __shfl_xor_sync(~0u, dp, 2);
    if (quad != 0) return;
    if (number > 0) dp += state.row_dp[in_box];
    if (number < 2 * kBoxes - 1) {
      state.row_dp[in_box] = dp;
    } else if (row + in_box < tile.num_rows) {
      reinterpret_cast<float*>(params.row_dp)[tile.n_begin / Config::kBlockN * params.row_dp_stride + tile.m_begin + row + in_box] = dp;
    }
  }
};

}  // namespace deep_gemm
