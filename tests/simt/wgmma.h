// WGMMA of the SIMT machine: BF16 operands in shared memory, 128-byte swizzle. The instructions of a group run when a thread waits for the
// group and all 128 threads have committed it. Until then accumulators are NaN in the threads' memory, and operands must not change.
#pragma once
#include "simt.h"

namespace simt {

enum class OperandMajor { kK, kMN };

struct WgmmaAccumulator {
  int columns;
  float* at[128] = {};       // each thread's registers
  std::vector<float> value;  // [64][columns]
  int users = 0;             // instructions that have not run
};
struct WgmmaOperation {
  uint64_t a, b;
  OperandMajor major_a, major_b;
  bool add;
  std::shared_ptr<WgmmaAccumulator> sum;
  std::vector<uint16_t> operands;  // as they were when the first thread issued it: A [64][16], B [16][columns]
};
struct Warpgroup {
  std::deque<WgmmaOperation> operations;  // not yet run
  size_t first = 0;                       // number of operations[0]
  size_t issued[128] = {};
  unsigned committed[128] = {};
  std::vector<size_t> group_end;     // operations of the groups so far
  std::vector<int> group_threads;    // that have committed it
  uint64_t whole_groups = 0, done_groups = 0;  // committed by all; run
};
inline Warpgroup& warpgroup_of(Cta& c, unsigned thread);  // hopper.h
inline Warpgroup& my_warpgroup() { return warpgroup_of(*cta, fiber->thread.x); }

// Element (mn, k) of an operand. PTX ISA, "Asynchronous warpgroup level matrix shared memory layout".
inline const uint8_t* operand_element(Cta& owner, uint64_t descriptor, OperandMajor major, int mn, int k) {
  const size_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const size_t at = major == OperandMajor::kK ? start + mn / 8 * stride + mn % 8 * 128 + k * 2
                                              : start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2;
  return owner.smem + ((at ^ (at >> 3 & 0x70)) - Cta::kSmemBase);
}
inline void check_descriptor(uint64_t descriptor) {
  if (descriptor >> 62 != 1) fail("WGMMA: the machine knows the 128-byte swizzle only");
  smem_pointer((descriptor & 0x3fff) << 4);
}
inline std::vector<uint16_t> read_operands(Cta& owner, const WgmmaOperation& op) {
  const int n = op.sum->columns;
  std::vector<uint16_t> out((64 + n) * 16);
  for (int m = 0; m < 64; ++m)
    for (int k = 0; k < 16; ++k) std::memcpy(&out[m * 16 + k], operand_element(owner, op.a, op.major_a, m, k), 2);
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < n; ++i) std::memcpy(&out[1024 + k * n + i], operand_element(owner, op.b, op.major_b, i, k), 2);
  return out;
}
inline float widen(uint16_t bits) {
  const unsigned raw = unsigned(bits) << 16;
  float v;
  std::memcpy(&v, &raw, 4);
  return v;
}
__attribute__((optimize("O3"))) inline void multiply_add(float* sum, const float* a, const float* b, int n) {
  for (int m = 0; m < 64; ++m)
    for (int k = 0; k < 16; ++k) {
      const float left = a[m * 16 + k];
      const float* right = b + k * n;
      float* to = sum + m * n;
      for (int i = 0; i < n; ++i) to[i] += left * right[i];
    }
}

// Register 4j + 2h + i of thread t: row 16 (t / 32) + (t % 32) / 4 + 8h, column 8j + 2 (t % 4) + i.
template <class Visit>
void for_registers(WgmmaAccumulator& sum, unsigned t, Visit visit) {
  for (int r = 0; r < sum.columns / 2; ++r) {
    const int row = 16 * (t / 32) + t % 32 / 4 + 8 * (r / 2 % 2), column = 8 * (r / 4) + 2 * (t % 4) + r % 2;
    visit(sum.at[t][r], sum.value[row * sum.columns + column]);
  }
}

// The accumulator that the thread's registers belong to until the operations on it have run.
inline std::shared_ptr<WgmmaAccumulator> accumulator_of(Warpgroup& group, float* registers, int columns, unsigned t) {
  for (auto op = group.operations.rbegin(); op != group.operations.rend(); ++op)
    if (op->sum->at[t] == registers) {
      if (op->sum->columns != columns) fail("WGMMA: operations of different widths on one accumulator without a wait");
      return op->sum;
    }
  auto sum = std::make_shared<WgmmaAccumulator>();
  sum->columns = columns, sum->value.resize(64 * columns);
  return sum;
}
inline void wgmma(uint64_t a, uint64_t b, OperandMajor major_a, OperandMajor major_b, int columns, float* registers, bool add) {
  Warpgroup& group = my_warpgroup();
  const unsigned t = fiber->thread.x % 128;
  const size_t number = group.issued[t]++;
  if (number == group.first + group.operations.size()) {
    check_descriptor(a), check_descriptor(b);
    group.operations.push_back({a, b, major_a, major_b, add, accumulator_of(group, registers, columns, t)});
    ++group.operations.back().sum->users;
    group.operations.back().operands = read_operands(*cta, group.operations.back());
  }
  WgmmaOperation& op = group.operations[number - group.first];
  if (op.a != a || op.b != b || op.add != add || op.sum->columns != columns) fail("WGMMA: the threads of a warpgroup do not agree");
  if (!op.sum->at[t]) {
    op.sum->at[t] = registers;
    for_registers(*op.sum, t, [](float& mine, float& all) { all = mine, mine = NAN; });
  }
  if (op.sum->at[t] != registers) fail("WGMMA: another accumulator than that of the other threads");
}

inline void wgmma_commit() {
  Warpgroup& group = my_warpgroup();
  const unsigned t = fiber->thread.x % 128, number = group.committed[t]++;
  if (number == group.group_end.size()) group.group_end.push_back(group.issued[t]), group.group_threads.push_back(0);
  if (group.group_end[number] != group.issued[t]) fail("WGMMA: the threads of a warpgroup commit different groups");
  if (++group.group_threads[number] == 128) ++group.whole_groups;
}

inline void run_operation(Cta& owner, WgmmaOperation& op) {
  WgmmaAccumulator& sum = *op.sum;
  if (read_operands(owner, op) != op.operands) fail("WGMMA: an operand was written before the multiplication was waited for");
  std::vector<float> wide(op.operands.size());
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = widen(op.operands[i]);
  if (!op.add) std::fill(sum.value.begin(), sum.value.end(), 0.f);
  multiply_add(sum.value.data(), wide.data(), wide.data() + 1024, sum.columns);
  if (--sum.users == 0)
    for (unsigned t = 0; t < 128; ++t) for_registers(sum, t, [](float& mine, float& all) { mine = all; });
}
inline void wgmma_wait(unsigned left) {
  Warpgroup& group = my_warpgroup();
  const unsigned committed = group.committed[fiber->thread.x % 128], needed = committed > left ? committed - left : 0;
  wait_for({Wait::kReaches, &group.whole_groups, needed, 0, [&group, needed] {
              return text("WGMMA group %u (%llu committed by the whole warpgroup)", needed, (unsigned long long)group.whole_groups);
            }});
  for (; group.done_groups < needed; ++group.done_groups)
    for (; group.first < group.group_end[group.done_groups]; ++group.first) {
      run_operation(*cta, group.operations.front());
      group.operations.pop_front();
    }
}

}  // namespace simt
