// SPDX-License-Identifier: Apache-2.0
#include "isa.h"

#include <atomic>

namespace jboost {
namespace {

Isa BestIsa() {
#ifdef JBOOST_X86
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  // Ice Lake and Zen 4 or newer: they permute bytes and compress 16-bit numbers.
  bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vbmi2");
  return avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kBaseline;
#else
  return Isa::kBaseline;
#endif
}

std::atomic<int>& Chosen() {
  static std::atomic<int> chosen(static_cast<int>(BestIsa()));
  return chosen;
}

}  // namespace

Isa CurrentIsa() { return static_cast<Isa>(Chosen().load(std::memory_order_relaxed)); }

}  // namespace jboost

// The best set that the processor has: 0 baseline, 1 AVX2, 2 AVX-512.
extern "C" __attribute__((visibility("default"))) int jboost_best_isa() {
  return static_cast<int>(jboost::BestIsa());
}

extern "C" __attribute__((visibility("default"))) int jboost_current_isa() {
  return static_cast<int>(jboost::CurrentIsa());
}

// Forces an instruction set. Returns 0, and changes nothing, if the processor lacks it.
extern "C" __attribute__((visibility("default"))) int jboost_set_isa(int isa) {
  if (isa < 0 || isa > jboost_best_isa()) return 0;
  jboost::Chosen().store(isa);
  return 1;
}
