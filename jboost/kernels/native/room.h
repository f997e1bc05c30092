// SPDX-License-Identifier: Apache-2.0
// Memory for what a task needs for a while.
#ifndef JBOOST_ROOM_H_
#define JBOOST_ROOM_H_

#include <cstdint>
#include <memory>

namespace jboost {

// Memory at the start of a cache line.
template <class Number>
class Room {
 public:
  explicit Room(int64_t size) : memory_(new char[size * sizeof(Number) + 64]) {
    auto address = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = reinterpret_cast<Number*>((address + 63) & ~uintptr_t{63});
  }
  Number* get() const { return data_; }

 private:
  std::unique_ptr<char[]> memory_;
  Number* data_;
};

}  // namespace jboost

#endif  // JBOOST_ROOM_H_
