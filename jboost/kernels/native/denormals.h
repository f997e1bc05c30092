// SPDX-License-Identifier: Apache-2.0
// Whether arithmetic of the current thread takes denormals for zeros.
#ifndef JBOOST_DENORMALS_H_
#define JBOOST_DENORMALS_H_

#include <cstdint>

#ifdef JBOOST_X86
#include <immintrin.h>
#endif

namespace jboost {

// Turns the flushing of denormals on or off while it lives. XLA's threads flush them.
class FlushDenormals {
 public:
#ifdef JBOOST_X86
  explicit FlushDenormals(bool flush) : saved_(_mm_getcsr()) {
    constexpr unsigned kBits = 0x8040u;
    _mm_setcsr(flush ? saved_ | kBits : saved_ & ~kBits);
  }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  explicit FlushDenormals(bool flush) {
    constexpr uint64_t kBit = uint64_t{1} << 24;
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(flush ? saved_ | kBit : saved_ & ~kBit));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  explicit FlushDenormals(bool) {}
#endif
};

}  // namespace jboost

#endif  // JBOOST_DENORMALS_H_
