// WGMMA on BF16 operands in shared memory, FP32 accumulators in registers: descriptors and the choice of the CuTe atom.
//
// Operand tiles lie in 128-byte-swizzled atoms as TMA writes them (box of 64 BF16 = 128 bytes wide):
//   K-major   [rows][64 of k]: 8 rows are 1024 bytes, one tile is one box.
//   MN-major  per 64 columns of mn one box [block_k of k][64 of mn], boxes one after another.
// Descriptor fields: PTX ISA, "Asynchronous warpgroup level matrix shared memory layout".
#pragma once
#include <cuda/std/utility>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/util.hpp>

namespace deep_gemm {

constexpr int kSwizzleBytes = 128;
constexpr int kSwizzleElements = kSwizzleBytes / 2;  // BF16
constexpr int kWgmmaM = 64, kWgmmaK = 16;

enum class Major { kK, kMN };

// One operand's tile: [block_mn x block_k], and how an instruction's slice of it is addressed.
template <Major kMajor, int kBlockMN, int kBlockK>
struct OperandTile {
  static_assert(kMajor == Major::kMN || kBlockK == kSwizzleElements, "a K-major tile is one swizzle atom wide");
  static_assert(kBlockMN % kSwizzleElements == 0);
  static constexpr int kElements = kBlockMN * kBlockK;
  static constexpr int kBytes = kElements * 2;
  static constexpr int kBoxBytes = kBlockK * kSwizzleBytes;  // MN-major: one box of 64 columns
  static constexpr auto kGmmaMajor = kMajor == Major::kK ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN;

  // Slice that starts at row/column mn (a multiple of 64) and contraction index k (a multiple of 16).
  __device__ __forceinline__ static uint64_t descriptor(const void* tile, int mn, int k) {
    // In units of 16 bytes. The address of a CTA's shared memory fits the 14 bits of the start, so that slices differ by additions of constants;
    // above it are bits that say which CTA of a cluster.
    const uint32_t start = cute::cast_smem_ptr_to_uint(tile) >> 4 & 0x3fff;
    const uint32_t slice = (kMajor == Major::kK ? mn * kSwizzleBytes + k * 2 : mn / kSwizzleElements * kBoxBytes + k * kSwizzleBytes) >> 4;
    constexpr uint32_t kLeading = kMajor == Major::kK ? 0 : kBoxBytes >> 4;  // next 64 columns
    constexpr uint32_t kStride = 8 * kSwizzleBytes >> 4;                      // next 8 rows (K-major) or next 8 of k (MN-major)
    cute::GmmaDescriptor desc;
    desc.reg32_[0] = start + slice | kLeading << 16;
    desc.reg32_[1] = kStride | 1u << 30;  // 128-byte swizzle
    return desc.desc_;
  }
};

template <int kN, auto kMajorA, auto kMajorB> struct WgmmaAtom;
template <auto kMajorA, auto kMajorB> struct WgmmaAtom<256, kMajorA, kMajorB> { using Type = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<kMajorA, kMajorB>; };
template <auto kMajorA, auto kMajorB> struct WgmmaAtom<192, kMajorA, kMajorB> { using Type = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<kMajorA, kMajorB>; };
template <auto kMajorA, auto kMajorB> struct WgmmaAtom<128, kMajorA, kMajorB> { using Type = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<kMajorA, kMajorB>; };
template <auto kMajorA, auto kMajorB> struct WgmmaAtom<64, kMajorA, kMajorB> { using Type = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<kMajorA, kMajorB>; };

// The 64 x kN accumulator of one warpgroup. Register 4j + 2h + i of thread t holds row 16*(t/32) + (t%32)/4 + 8h, column 8j + 2*(t%4) + i.
template <int kN>
struct Accumulator {
  static constexpr int kRegisters = kN / 2;
  float value[kRegisters];

  // Keeps the compiler from moving register accesses across asynchronous WGMMA work.
  __device__ __forceinline__ void fence() {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) cute::warpgroup_fence_operand(value[i]);
  }
  // One WGMMA on the first kColumns columns.
  template <int kColumns, auto kMajorA, auto kMajorB>
  __device__ __forceinline__ void mma(uint64_t a, uint64_t b, bool accumulate) {
    mma<typename WgmmaAtom<kColumns, kMajorA, kMajorB>::Type>(a, b, accumulate, ::cuda::std::make_index_sequence<kColumns / 2>{});
  }
  template <class Atom, size_t... kIndex>
  __device__ __forceinline__ void mma(uint64_t a, uint64_t b, bool accumulate, ::cuda::std::index_sequence<kIndex...>) {
    Atom::fma(a, b, value[kIndex]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }
  __device__ __forceinline__ static int row(int thread, int half) { return thread / 32 * 16 + thread % 32 / 4 + 8 * half; }
  __device__ __forceinline__ static int column(int thread, int j) { return 8 * j + thread % 4 * 2; }
};

}  // namespace deep_gemm
