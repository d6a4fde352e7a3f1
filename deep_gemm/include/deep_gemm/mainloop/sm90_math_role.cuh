// The role that multiplies what the operand ring holds and hands the sums to the epilogue.
#pragma once
#include <deep_gemm/kernels/sm90_gemm_traits.cuh>
#include <deep_gemm/ptx/fence.cuh>

namespace deep_gemm::kernels {

// One warpgroup of math: the sums of one tile after another, from the operand ring. What it needs of Traits: GemmTraits or MegaMoeTiles.
template <class Traits>
struct Multiplier {
  using Acc = typename Traits::Acc;
  typename Traits::SharedStorage& smem;
  const int warpgroup;
  typename Traits::Ring::Position at{};

  // Warpgroup 0 begins: for it the phase before the first counts as done. All warps have seen the phase before one of them may end the turn: a
  // warp two phases late would take the parity of the newer for its own, and wait for ever.
  __device__ __forceinline__ void begin_turn(int round) {
    smem.turn[warpgroup].wait((round ^ (warpgroup == 0)) & 1);
    Warpgroup{2 + warpgroup}.sync();
  }
  __device__ __forceinline__ void end_turn() {
    if (threadIdx.x % 128 == 0) smem.turn[warpgroup ^ 1].arrive();
  }

  // A tile that is the other warpgroup's.
  __device__ __forceinline__ void skip(const dg_gemm_tile& tile) { at.advance(Traits::k_blocks(tile)); }

  // First row of the tile that is this warpgroup's.
  __device__ __forceinline__ int first_row() const { return Traits::kPingPong ? 0 : warpgroup * kWgmmaM; }

  // acc = sum over the tile's k blocks, of which `columns` columns exist. Operands: TileA, TileB and kKGrouped, of the kernel or of the step. What does not exist is left out: a second block of 64 rows, columns in
  // steps of 64. Its accumulators stay undefined, and the epilogue does not look at them. Loops of their own, as WGMMAs under a condition would be
  // serialised.
  template <class Operands = Traits>
  __device__ __forceinline__ void multiply(const dg_gemm_tile& tile, int columns, Acc (&acc)[Traits::kAtoms]) {
    constexpr int kAtoms = Traits::kAtoms, kN = Traits::kBlockN;
    if (Traits::kCluster > 1 && tile.num_rows == 0) pass(tile);
    else if (kN == 192 && columns <= 64) multiply_blocks<Operands, kAtoms, 64>(tile, acc);
    else if (kN == 192 && columns <= 128) multiply_blocks<Operands, kAtoms, 128>(tile, acc);
    else if (kAtoms == 1 || tile.num_rows > kWgmmaM) multiply_blocks<Operands, kAtoms, kN>(tile, acc);
    else multiply_blocks<Operands, 1, kN>(tile, acc);
  }

 private:
  // This CTA has no tile, but its peer's tiles come through its ring. All warps have seen a stage full before it is handed back: without WGMMA
  // nothing else keeps them within a lap of each other, which a parity needs.
  __device__ __forceinline__ void pass(const dg_gemm_tile& tile) {
    const int blocks = Traits::k_blocks(tile);
    for (int block = 0; block < blocks; ++block, at.advance()) {
      smem.ring.full[at.stage].wait(at.phase);
      Warpgroup{2 + warpgroup}.sync();
      if (Traits::kPingPong && block == blocks - 1) end_turn();
      release(at.stage);
    }
  }

  // Each stage goes back to the load role one block later, when its WGMMAs are done.
  template <class Operands, int kActive, int kN>
  __device__ __forceinline__ void multiply_blocks(const dg_gemm_tile& tile, Acc (&acc)[Traits::kAtoms]) {
    auto& ring = smem.ring;
    int previous = -1;
    const int blocks = Traits::k_blocks(tile);
    for (int block = 0; block < blocks; ++block, at.advance()) {
      ring.full[at.stage].wait(at.phase);
      if (Traits::kPingPong && block == blocks - 1) end_turn();
      if (Traits::kGatherWarps > 0) ptx::fence_proxy_async_shared();  // WGMMA reads what ordinary copies wrote; here, so that those need not wait
      const int valid = tile.k_end - tile.k_begin - block * Traits::kBlockK;
      if (Operands::kKGrouped && valid < Traits::kBlockK) zero_k_tail<Operands>(valid);
      fence<kActive>(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < kActive; ++i) multiply_block<Operands, kN>(acc[i], first_row() + i * kWgmmaM, block > 0);
      cute::warpgroup_commit_batch();
      fence<kActive>(acc);
      cute::warpgroup_wait<1>();
      release(previous);
      previous = at.stage;
    }
    cute::warpgroup_wait<0>();
    fence<kActive>(acc);
    release(previous);
  }

  template <int kActive>
  __device__ __forceinline__ static void fence(Acc (&acc)[Traits::kAtoms]) {
#pragma unroll
    for (int i = 0; i < kActive; ++i) acc[i].fence();
  }

  // 64 rows, the first kN columns of one k block.
  template <class Operands, int kN>
  __device__ __forceinline__ void multiply_block(Acc& acc, int row, bool accumulate) {
#pragma unroll
    for (int kk = 0; kk < Traits::kBlockK; kk += kWgmmaK)
      acc.template mma<kN, Operands::TileA::kGmmaMajor, Operands::TileB::kGmmaMajor>(
          Operands::TileA::descriptor(smem.operands.a[at.stage], row, kk), Operands::TileB::descriptor(smem.operands.b[at.stage], 0, kk),
          accumulate || kk > 0);
  }

  __device__ __forceinline__ void release(int stage) {
    if (stage < 0) return;
    const int thread = threadIdx.x % 128;
    if constexpr (Traits::kCluster == 1) {
      if (thread == 0) smem.ring.empty[stage].arrive();
    } else if (thread < Traits::kCluster) {
      smem.ring.empty[stage].arrive(thread);  // thread i tells CTA i of the cluster
    }
  }

  // Rows of k at and past `valid` belong to the next group, or to nobody and may hold NaN: both operands' rows become zero. A row of k is
  // 128 contiguous bytes of each box; the swizzle permutes inside it.
  template <class Operands>
  __device__ __forceinline__ void zero_k_tail(int valid) {
    constexpr int kBoxesA = Traits::kBlockM / kSwizzleElements, kBoxes = kBoxesA + Traits::kBlockN / kSwizzleElements, kChunks = kSwizzleBytes / 16;
    constexpr int kThreads = Traits::kReaders * 128;
    const int rows = Traits::kBlockK - valid;
    for (int i = threadIdx.x % kThreads; i < rows * kBoxes * kChunks; i += kThreads) {
      const int chunk = i % kChunks, row = valid + i / kChunks % rows, box = i / kChunks / rows;
      uint8_t* tile = box < kBoxesA ? smem.operands.a[at.stage] + box * Operands::TileA::kBoxBytes
                                    : smem.operands.b[at.stage] + (box - kBoxesA) * Operands::TileB::kBoxBytes;
      reinterpret_cast<uint4*>(tile + row * kSwizzleBytes)[chunk] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async_shared();  // WGMMA reads what ordinary stores wrote
    cutlass::arch::NamedBarrier::sync(kThreads, Traits::kPingPong ? 2 + warpgroup : 1);
  }
};

// The math role of one GEMM.
template <class Config>
struct MathRole {
  using Traits = GemmTraits<Config>;
  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;
  const int warpgroup;

  __device__ __forceinline__ void run() {
    typename Traits::TileQueue::Reader tiles{smem.tiles};
    Multiplier<Traits> multiplier{smem, warpgroup};
    auto epilogue = make_epilogue(multiplier.first_row());
    for (; tiles.next(); tiles.release()) {
      const dg_gemm_tile& tile = tiles.tile();
      if (Traits::kPingPong && tiles.number % 2 != warpgroup) {
        multiplier.skip(tile);
      } else {
        typename Traits::Acc acc[Traits::kAtoms];
        epilogue.begin(tile);
        if (Traits::kPingPong) multiplier.begin_turn(tiles.number / 2);
        multiplier.multiply(tile, Traits::kGateUp ? Traits::kBlockN : params.n - tile.n_begin, acc);
        epilogue.run(tile, acc);
      }
    }
    epilogue.finish();
  }

 private:
  __device__ __forceinline__ typename Traits::Epilogue make_epilogue(int first_row) const {
    const Warpgroup threads{2 + warpgroup};
    if constexpr (Traits::kDswiglu) return {params, smem.staging[warpgroup], first_row, threads, smem.dswiglu[warpgroup]};
    else if constexpr (Traits::kGateUp) return {params, first_row};
    else return {{params}, smem.staging[warpgroup], first_row, threads};
  }
};

}  // namespace deep_gemm::kernels
