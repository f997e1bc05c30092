// SPDX-License-Identifier: Apache-2.0
// Temporary memory of a task, aligned to cache lines.
#ifndef JBOOST_SCRATCH_H_
#define JBOOST_SCRATCH_H_

#include <cstdint>
#include <memory>

namespace jboost {

// Uninitialized memory that begins at a cache line.
template <class Number>
class Scratch {
 public:
  explicit Scratch(int64_t size) : memory_(new char[size * sizeof(Number) + 64]) {
    auto address = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = reinterpret_cast<Number*>((address + 63) & ~uintptr_t{63});
  }
  Number* get() const { return data_; }

 private:
  std::unique_ptr<char[]> memory_;
  Number* data_;
};

}  // namespace jboost

#endif  // JBOOST_SCRATCH_H_
