// SPDX-License-Identifier: Apache-2.0
// Makes allocations and starts of threads fail, for tests. Only builds with
// JBOOST_FAULTS have this file; their linker replaces calls of X by calls of __wrap_X,
// and calls of __real_X by calls of X.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <system_error>

namespace {

// Counts events; those from number `first` to number `last` fail. Numbers begin at 1.
class Faults {
 public:
  // Returns how many events there were since the last call.
  int64_t Plan(int64_t first, int64_t last) {
    first_ = first;
    last_ = last;
    return count_.exchange(0);
  }
  bool NextFails() {
    int64_t number = count_.fetch_add(1) + 1;
    return first_ <= number && number <= last_;
  }

 private:
  std::atomic<int64_t> count_{0}, first_{0}, last_{0};
};

Faults allocations, threads;

}  // namespace

// The names are those of the compiler for operator new, for arrays and without
// exceptions, and for std::thread::_M_start_thread of libstdc++.
extern "C" {

void* __real__Znwm(size_t size);
void* __real__Znam(size_t size);
void* __real__ZnwmRKSt9nothrow_t(size_t size, const std::nothrow_t& tag);
void __real__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(
    void* thread, void* state, void (*depend)());

void* __wrap__Znwm(size_t size) {
  if (allocations.NextFails()) throw std::bad_alloc();
  return __real__Znwm(size);
}

void* __wrap__Znam(size_t size) {
  if (allocations.NextFails()) throw std::bad_alloc();
  return __real__Znam(size);
}

void* __wrap__ZnwmRKSt9nothrow_t(size_t size, const std::nothrow_t& tag) {
  if (allocations.NextFails()) return nullptr;
  return __real__ZnwmRKSt9nothrow_t(size, tag);
}

void __wrap__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(
    void* thread, void* state, void (*depend)()) {
  if (threads.NextFails()) {
    throw std::system_error(
        std::make_error_code(std::errc::resource_unavailable_try_again));
  }
  __real__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(
      thread, state, depend);
}

// Lets allocations, or starts of threads, number `first` to `last` from now fail.
// Returns how many there were since the last call.
__attribute__((visibility("default"))) int64_t jboost_fail_allocations(int64_t first,
                                                                       int64_t last) {
  return allocations.Plan(first, last);
}

__attribute__((visibility("default"))) int64_t jboost_fail_threads(int64_t first,
                                                                   int64_t last) {
  return threads.Plan(first, last);
}

}  // extern "C"
