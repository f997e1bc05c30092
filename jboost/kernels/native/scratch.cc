// SPDX-License-Identifier: Apache-2.0
#include "scratch.h"

#include <mutex>
#include <new>
#include <vector>

namespace jboost {
namespace {

struct Kept {
  std::mutex mutex;
  std::vector<Block> free;
  int64_t keepers = 0;
};

// Never destroyed: threads of XLA may outlive static objects. Not allocated either, so
// that callers outside handlers have no error to report.
Kept& All() {
  alignas(Kept) static unsigned char memory[sizeof(Kept)];
  static Kept* kept = new (memory) Kept;
  return *kept;
}

}  // namespace

Block TakeBlock(size_t size) {
  Kept& kept = All();
  {
    std::lock_guard<std::mutex> lock(kept.mutex);
    // The smallest that is large enough: larger ones are for other arrays.
    Block* best = nullptr;
    for (Block& block : kept.free) {
      bool fits = block.size >= size;
      if (fits && (best == nullptr || block.size < best->size)) best = &block;
    }
    if (best != nullptr) {
      Block taken = std::move(*best);
      *best = std::move(kept.free.back());
      kept.free.pop_back();
      return taken;
    }
  }
  return {std::unique_ptr<char[]>(new char[size]), size};
}

void GiveBack(Block block) noexcept {
  Kept& kept = All();
  std::lock_guard<std::mutex> lock(kept.mutex);
  if (kept.keepers == 0) return;
  try {
    kept.free.push_back(std::move(block));
  } catch (const std::bad_alloc&) {
    // The block is freed, since the list cannot grow.
  }
}

// Adds `change` to the number of those who keep scratch memory, 1 or -1. When nobody
// does anymore, what is kept is freed.
extern "C" __attribute__((visibility("default"))) void jboost_keep_scratch(
    int64_t change) {
  Kept& kept = All();
  std::lock_guard<std::mutex> lock(kept.mutex);
  kept.keepers += change;
  if (kept.keepers == 0) std::vector<Block>().swap(kept.free);
}

}  // namespace jboost
