// SPDX-License-Identifier: Apache-2.0
// What the bindings of all kernels share: the thread pool, buffers, error messages.
#ifndef JBOOST_FFI_H_
#define JBOOST_FFI_H_

#include <string>
#include <vector>

#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jboost {

namespace ffi = xla::ffi;

using Int = ffi::Buffer<ffi::S32>;
using Float = ffi::Buffer<ffi::F32>;
using Bool = ffi::Buffer<ffi::PRED>;
using UInt = ffi::Buffer<ffi::U32>;

template <class Buffer>
uint8_t* Bytes(Buffer& buffer) {
  return reinterpret_cast<uint8_t*>(buffer.typed_data());
}

inline bool Has(const ffi::AnyBuffer::Dimensions& shape,
                std::vector<int64_t> expected) {
  return std::vector<int64_t>(shape.begin(), shape.end()) == expected;
}

// The handler returns before a late helper runs: the pool must not be kept.
inline Pool MakePool(ffi::ThreadPool& threads) {
  Pool pool;
  pool.num_threads = threads.num_threads();
  pool.schedule = [&threads](std::function<void()> task) {
    threads.Schedule(std::move(task));
  };
  return pool;
}

inline ffi::Error Mismatch(const std::string& what) {
  return ffi::Error::InvalidArgument("jboost kernel: " + what);
}

// Every handler begins with this: a batched or transposed buffer must not pass.
#define JBOOST_CHECK(condition, what)        \
  do {                                       \
    if (!(condition)) return Mismatch(what); \
  } while (false)

// A handler under its C name, for ctypes to find.
#define JBOOST_HANDLER(name, implementation, binding)                    \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name( \
      XLA_FFI_CallFrame* call_frame) {                                   \
    static auto* handler = (binding).To(implementation).release();       \
    return handler->Call(call_frame);                                    \
  }

}  // namespace jboost

#endif  // JBOOST_FFI_H_
