#pragma once
#include "hopper.h"
namespace cute {

template <class T> void warpgroup_fence_operand(T&) {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() { simt::wgmma_commit(); }
template <int kLeft> void warpgroup_wait() { simt::wgmma_wait(kLeft); }

namespace SM90::GMMA {
enum class Major { K = 0, MN = 1 };
enum class ScaleOut { Zero = 0, One = 1 };

template <int kColumns, Major kMajorA, Major kMajorB>
struct Mma {
  template <class... Rest>
  static void fma(uint64_t a, uint64_t b, float& first, Rest&&... rest) {
    static_assert(sizeof...(Rest) == kColumns / 2);
    float* last = nullptr;
    bool add = true;
    (take(rest, last, add), ...);
    if (last - &first != kColumns / 2 - 1) simt::fail("WGMMA: registers that are no array");
    simt::wgmma(a, b, major(kMajorA), major(kMajorB), kColumns, &first, add);
  }
 private:
  static void take(float& value, float*& last, bool&) { last = &value; }
  static void take(ScaleOut scale, float*&, bool& add) { add = scale == ScaleOut::One; }
  static simt::OperandMajor major(Major m) { return m == Major::K ? simt::OperandMajor::kK : simt::OperandMajor::kMN; }
};
template <Major A, Major B> using MMA_64x32x16_F32BF16BF16_SS = Mma<32, A, B>;
template <Major A, Major B> using MMA_64x64x16_F32BF16BF16_SS = Mma<64, A, B>;
template <Major A, Major B> using MMA_64x96x16_F32BF16BF16_SS = Mma<96, A, B>;
template <Major A, Major B> using MMA_64x128x16_F32BF16BF16_SS = Mma<128, A, B>;
template <Major A, Major B> using MMA_64x160x16_F32BF16BF16_SS = Mma<160, A, B>;
template <Major A, Major B> using MMA_64x192x16_F32BF16BF16_SS = Mma<192, A, B>;
template <Major A, Major B> using MMA_64x256x16_F32BF16BF16_SS = Mma<256, A, B>;
}  // namespace SM90::GMMA

}  // namespace cute
