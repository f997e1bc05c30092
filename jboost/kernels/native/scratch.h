// SPDX-License-Identifier: Apache-2.0
// Temporary memory of a task or of a call, aligned to cache lines.
#ifndef JBOOST_SCRATCH_H_
#define JBOOST_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace jboost {

// Where the first cache line of a block begins.
template <class Number>
Number* AlignToLine(char* block) {
  auto address = reinterpret_cast<uintptr_t>(block);
  return reinterpret_cast<Number*>((address + 63) & ~uintptr_t{63});
}

// Uninitialized memory that begins at a cache line.
template <class Number>
class Scratch {
 public:
  explicit Scratch(int64_t size) : memory_(new char[size * sizeof(Number) + 64]) {
    data_ = AlignToLine<Number>(memory_.get());
  }
  Number* get() const { return data_; }

 private:
  std::unique_ptr<char[]> memory_;
  Number* data_;
};

struct Block {
  std::unique_ptr<char[]> memory;
  size_t size = 0;
};

// Takes a block of at least `size` bytes, one that was given back if there is one.
Block TakeBlock(size_t size);

// Gives a block back: it is kept for the next call while somebody keeps scratch memory
// (see jboost_keep_scratch), and otherwise freed.
void GiveBack(Block block) noexcept;

// The same for the rows of a whole call. A training run calls the same kernel again and
// again; the pages of new memory would have to be mapped each time, and XLA would hold
// such memory twice, for the call that runs and for the one that waits.
template <class Number>
class CallScratch {
 public:
  explicit CallScratch(int64_t size) : block_(TakeBlock(size * sizeof(Number) + 64)) {}
  ~CallScratch() { GiveBack(std::move(block_)); }
  CallScratch(const CallScratch&) = delete;
  CallScratch& operator=(const CallScratch&) = delete;
  Number* get() const { return AlignToLine<Number>(block_.memory.get()); }

 private:
  Block block_;
};

}  // namespace jboost

#endif  // JBOOST_SCRATCH_H_
