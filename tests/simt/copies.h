// Asynchronous copies of the SIMT machine: TMA boxes, bulk copies, cp.async. They happen as late as the program allows.
//
// A load makes its destination NaN when it is issued, and lands when no thread can go on: who reads before the mbarrier is done, or still
// reads when the load is issued, gets NaN. Bytes of the source that change meanwhile arrive as NaN.
// A store takes its bytes when it is issued, and checks when it is waited for that they have not changed. They reach global memory when
// bulk_wait asks for it, or when the CTA ends; in a random order, half of the stores and loads are immediate.
#pragma once
#include "mbarrier.h"

namespace simt {

// ---- tensor maps (driver.py writes them) -----------------------------------------------------------------------------------------------

struct TensorMap {
  static constexpr unsigned kMagic = 0x544d4150;
  uint64_t address, strides[4];  // in bytes, of dims[1..]
  uint32_t dims[5], magic;
  uint16_t box[5];
  uint8_t rank, element_bytes, swizzle_bytes, dtype;  // dtype: CUtensorMapDataType
};
constexpr uint8_t kDtypeF32 = 7, kDtypeBf16 = 9;

inline TensorMap tensor_map(const void* p) {
  TensorMap map;
  std::memcpy(&map, p, sizeof(map));
  if (map.magic != TensorMap::kMagic) fail("a copy through bytes that are no tensor map");
  if (reinterpret_cast<uintptr_t>(p) % 64) fail(text("tensor map at %p, expected a multiple of 64", p));
  return map;
}

// Part of the shared and the global memory that a copy touches: `bytes` at box offset `offset`.
struct Piece {
  uint8_t* global;
  size_t offset, bytes;
};
struct Box {
  size_t bytes = 0;    // with what lies outside the tensor
  unsigned swizzle = 0;
  std::vector<Piece> pieces;  // inside the tensor
};

inline Box box_of(const TensorMap& map, const std::vector<int>& at) {
  Box box;
  const int64_t inner = map.box[0], size = map.element_bytes, low = std::max<int64_t>(0, -int64_t(at[0]));
  const int64_t high = std::min<int64_t>(inner, int64_t(map.dims[0]) - at[0]);
  if (at.size() != map.rank) fail(text("a copy with %zu coordinates through a tensor map of rank %u", at.size(), map.rank));
  if (map.swizzle_bytes && inner * size != map.swizzle_bytes) fail("the machine knows swizzled boxes of full width only");
  int64_t rows = 1;
  for (int d = 1; d < map.rank; ++d) rows *= map.box[d];
  for (int64_t row = 0; row < rows; ++row) {
    int64_t rest = row, from = at[0] * size;
    bool inside = high > low;
    for (int d = 1; d < map.rank; rest /= map.box[d], ++d) {
      const int64_t x = at[d] + rest % map.box[d];
      inside = inside && x >= 0 && x < int64_t(map.dims[d]);
      from += x * int64_t(map.strides[d - 1]);
    }
    uint8_t* begin = reinterpret_cast<uint8_t*>(map.address) + from + low * size;
    if (inside) box.pieces.push_back({begin, size_t((row * inner + low) * size), size_t((high - low) * size)});
  }
  box.bytes = rows * inner * size;
  box.swizzle = map.swizzle_bytes;
  return box;
}
inline Box linear_box(void* global, size_t bytes) {
  Box box;
  box.bytes = bytes;
  box.pieces.push_back({static_cast<uint8_t*>(global), 0, bytes});
  return box;
}

// Shared address of a box's 16-byte chunk.
inline size_t swizzled(size_t address, unsigned swizzle) { return address ^ (address >> 3 & (swizzle ? swizzle - 16 : 0)); }
// visit(place in shared memory, offset in the box, bytes) for what lies in one 16-byte chunk each.
template <class Visit>
void for_chunks(Cta& owner, const uint8_t* smem, unsigned swizzle, size_t offset, size_t bytes, Visit visit) {
  const size_t base = smem - owner.smem;
  while (bytes > 0) {
    const size_t take = std::min(bytes, 16 - offset % 16);
    visit(owner.smem + swizzled(base + offset, swizzle), offset, take);
    offset += take, bytes -= take;
  }
}
inline void check_smem(const void* smem, size_t bytes, const Box& box) {
  const auto offset = static_cast<const uint8_t*>(smem) - cta->smem;
  if (offset < 0 || size_t(offset) + bytes > cta->cluster->launch.smem_bytes)
    fail(text("a copy of %zu bytes at %s leaves shared memory", bytes, smem_name(smem).c_str()));
  const int alignment = box.swizzle ? box.swizzle * 8 : 16;
  if (offset % alignment) fail(text("a copy at %s, expected a multiple of %d", smem_name(smem).c_str(), alignment));
}

inline std::vector<uint8_t> read_global(const Box& box) {
  std::vector<uint8_t> bytes(box.bytes, 0);
  for (auto& piece : box.pieces) std::memcpy(&bytes[piece.offset], piece.global, piece.bytes);
  return bytes;
}
inline void put_in_smem(Cta& owner, uint8_t* smem, const Box& box, const std::vector<uint8_t>& bytes) {
  for_chunks(owner, smem, box.swizzle, 0, box.bytes, [&](uint8_t* to, size_t offset, size_t n) { std::memcpy(to, &bytes[offset], n); });
}
inline std::vector<uint8_t> read_smem(Cta& owner, const uint8_t* smem, const Box& box) {
  std::vector<uint8_t> bytes(box.bytes, 0);
  for (auto& piece : box.pieces)
    for_chunks(owner, smem, box.swizzle, piece.offset, piece.bytes,
               [&](uint8_t* from, size_t offset, size_t n) { std::memcpy(&bytes[offset], from, n); });
  return bytes;
}

inline bool immediate() { return cta->cluster->is_random() && cta->cluster->random() % 2; }
inline void later(std::function<void()> work) { cta->pending.push_back({cta->cluster->turn, std::move(work)}); }

// ---- loads ---------------------------------------------------------------------------------------------------------------------------

// To the same place in every CTA of `ctas` (bits by rank); each one's mbarrier counts the bytes.
inline void load_box(Box box, void* smem, void* barrier, unsigned ctas) {
  check_smem(smem, box.bytes, box);
  auto first = read_global(box);
  for (auto& owner : cta->cluster->ctas) {
    if (!(ctas >> owner->rank & 1)) continue;
    Cta& to = *owner;
    auto* place = static_cast<uint8_t*>(const_cast<void*>(in_cta(to, smem)));
    const void* bar = in_cta(to, barrier);
    put_in_smem(to, place, box, std::vector<uint8_t>(box.bytes, 0xff));
    auto land = [=, &to] {
      auto bytes = read_global(box);
      for (size_t i = 0; i < bytes.size(); ++i)
        if (bytes[i] != first[i]) bytes[i] = 0xff;
      put_in_smem(to, place, box, bytes);
      mbarrier_complete(to, bar, int64_t(box.bytes));
    };
    immediate() ? land() : later(land);
  }
}
inline unsigned only_this_cta() { return 1u << cta->rank; }

// ---- stores, in groups of the thread that issues them --------------------------------------------------------------------------------

struct Store {
  enum Action { kWrite, kAdd } action;
  Box box;
  const uint8_t* smem;
  std::vector<uint8_t> bytes;
  uint8_t dtype;
  unsigned group;
  bool read = false, written = false;
};
struct ThreadCopies {
  std::vector<Store> stores;
  unsigned groups = 0;                            // committed
  std::vector<std::pair<uint8_t*, Piece>> loads;  // cp.async since the last arrive: where to, where from (0 bytes: zeros)
};
inline ThreadCopies& thread_copies(Cta& c, unsigned thread);  // hopper.h
inline ThreadCopies& my_copies() { return thread_copies(*cta, fiber->thread.x); }

inline void add_piece(const Store& store, const Piece& piece) {
  static std::mutex one_at_a_time;
  std::lock_guard lock(one_at_a_time);
  if (store.dtype != kDtypeF32) return fail("the machine adds FP32 only");
  for (size_t i = 0; i < piece.bytes; i += 4) {
    float sum, more;
    std::memcpy(&sum, piece.global + i, 4), std::memcpy(&more, &store.bytes[piece.offset + i], 4);
    sum += more;
    std::memcpy(piece.global + i, &sum, 4);
  }
}
inline void write_store(Store& store) {
  if (store.written) return;
  store.written = true;
  for (auto& piece : store.box.pieces)
    if (store.action == Store::kAdd) add_piece(store, piece);
    else std::memcpy(piece.global, &store.bytes[piece.offset], piece.bytes);
}
inline void read_store(Store& store) {
  if (store.read) return;
  store.read = true;
  if (read_smem(*cta, store.smem, store.box) != store.bytes)
    fail(text("shared memory at %s was written while a store of it was under way", smem_name(store.smem).c_str()));
}
inline void store_box(Box box, const void* smem, Store::Action action, uint8_t dtype) {
  check_smem(smem, box.bytes, box);
  ThreadCopies& mine = my_copies();
  const auto* from = static_cast<const uint8_t*>(smem);
  auto bytes = read_smem(*cta, from, box);
  mine.stores.push_back({action, std::move(box), from, std::move(bytes), dtype, mine.groups});
  if (immediate()) write_store(mine.stores.back());
}
inline void commit_stores() { ++my_copies().groups; }
// All groups but the latest `left` have been read, and, if asked for, written.
inline void wait_for_stores(unsigned left, bool written) {
  ThreadCopies& mine = my_copies();
  auto asked = [&](const Store& store) { return store.group + left < mine.groups; };
  // Others go on meanwhile.
  if (std::any_of(mine.stores.begin(), mine.stores.end(), [&](const Store& store) { return asked(store) && !store.read; }))
    wait_for({Wait::kPoll, nullptr, 0, 0, [] { return std::string("bulk stores"); }});
  for (auto& store : mine.stores)
    if (asked(store)) {
      read_store(store);
      if (written) write_store(store);
    }
  std::erase_if(mine.stores, [](const Store& store) { return store.read && store.written; });
}
inline void end_of_stores(ThreadCopies& mine, unsigned thread) {
  if (!mine.loads.empty()) return fail(text("thread %u ends before its cp.async were waited for", thread));
  for (auto& store : mine.stores) {
    if (!store.read) return fail(text("thread %u ends while a store of %s may still be reading", thread, smem_name(store.smem).c_str()));
    write_store(store);
  }
}

// ---- cp.async ------------------------------------------------------------------------------------------------------------------------

inline void copy_16(unsigned to, const void* from, int num_bytes) {
  uint8_t* place = smem_pointer(to);
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("cp.async: addresses are multiples of 16");
  std::memset(place, 0xff, 16);
  my_copies().loads.push_back({place, {static_cast<uint8_t*>(const_cast<void*>(from)), 0, size_t(num_bytes)}});
}
inline void copies_arrive(unsigned barrier) {
  Cta& owner = *cta;
  later([&owner, loads = std::move(my_copies().loads), bar = smem_pointer(barrier)] {
    for (auto& [to, from] : loads) std::memset(to, 0, 16), std::memcpy(to, from.global, from.bytes);
    mbarrier_arrive(owner, bar);
  });
  my_copies().loads.clear();
}

}  // namespace simt
