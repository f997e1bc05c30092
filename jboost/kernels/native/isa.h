// SPDX-License-Identifier: Apache-2.0
// Chooses which of the three copies of each loop is used, by the instruction set of the
// processor or the one that the user forces.
//
// Files *_loops.cc hold the inner loops, and are compiled once per instruction set.
// They use no templates of the standard library: the linker keeps one copy of such a
// function for the whole library, which could be one for a newer processor. The build
// checks it.
#ifndef JBOOST_ISA_H_
#define JBOOST_ISA_H_

// GCC 12 takes the undefined operands inside its own intrinsics for mistakes.
#if defined(__AVX2__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

#define JBOOST_INLINE inline __attribute__((always_inline))

namespace jboost {

enum class Isa { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

Isa CurrentIsa();

// Chooses the copy of a loop table; Loops is a struct of function pointers.
template <class Loops>
const Loops& ChooseLoops(const Loops& baseline, const Loops& avx2,
                         const Loops& avx512) {
  switch (CurrentIsa()) {
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    default:
      return baseline;
  }
}

// Declares the copies of a loop table, one for each instruction set.
#define JBOOST_DECLARE_LOOPS(Loops) \
  namespace baseline {              \
  extern const Loops k##Loops;      \
  }                                 \
  namespace avx2 {                  \
  extern const Loops k##Loops;      \
  }                                 \
  namespace avx512 {                \
  extern const Loops k##Loops;      \
  }

// The copy to use. A macro, because each table has its own name.
#ifdef JBOOST_X86
#define JBOOST_CHOOSE(Loops) \
  ChooseLoops(baseline::k##Loops, avx2::k##Loops, avx512::k##Loops)
#else
#define JBOOST_CHOOSE(Loops) baseline::k##Loops
#endif

}  // namespace jboost

#endif  // JBOOST_ISA_H_
