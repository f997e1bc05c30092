// SPDX-License-Identifier: Apache-2.0
// Handlers that launch a CUDA kernel on XLA's stream.
//
// The kernel gets the strides of the batch, the addresses of all operands and results,
// and numbers; see ../cuda/prelude.h. The last `zeros` operands share their memory with
// results, which must be zeros at first; the kernel gets those only once, as results.
// The Python wrapper of a kernel answers for what it passes.
#include <array>
#include <cstdlib>

#include "ffi.h"
#include "launch.h"

namespace jboost {
namespace {

constexpr size_t kMaxBuffers = 16;

struct Strides {
  int64_t bytes[kMaxBuffers];
};

using Numbers = ffi::Span<const int64_t>;

ffi::Error Describe(std::string_view kernel, Numbers grid, int64_t threads,
                    int64_t shared_bytes, Launch* launch) {
  JBOOST_CHECK(grid.size() == 3, "grid must have 3 sizes");
  for (int axis = 0; axis < 3; ++axis) {
    // Of axes y and z.
    bool fits = grid[axis] >= 0 && grid[axis] <= (axis == 0 ? INT32_MAX : 65535);
    JBOOST_CHECK(fits, "a GPU cannot run a grid of " + std::to_string(grid[axis]) +
                           " blocks along axis " + std::to_string(axis));
    launch->grid[axis] = static_cast<uint32_t>(grid[axis]);
  }
  JBOOST_CHECK(threads > 0 && threads <= 1024 && threads % 32 == 0,
               "threads must be a multiple of 32, at most 1024");
  JBOOST_CHECK(shared_bytes >= 0 && shared_bytes < (1 << 20), "shared_bytes is wrong");
  launch->kernel = std::string(kernel);
  launch->threads = static_cast<uint32_t>(threads);
  launch->shared_bytes = static_cast<uint32_t>(shared_bytes);
  return ffi::Error::Success();
}

ffi::Error FromMessage(const std::string& message) {
  if (message.empty()) return ffi::Error::Success();
  return ffi::Error::Internal("jboost kernel: " + message);
}

ffi::Error PrepareImpl(ffi::RemainingArgs, ffi::RemainingRets, Numbers grid,
                       std::string_view kernel, Numbers, int64_t shared_bytes, Numbers,
                       int64_t threads, int64_t) {
  Launch launch;
  JBOOST_RETURN_IF_ERROR(Describe(kernel, grid, threads, shared_bytes, &launch));
  return FromMessage(PrepareLaunch(launch));
}

ffi::Error LaunchImpl(void* stream, ffi::RemainingArgs operands,
                      ffi::RemainingRets results, Numbers grid, std::string_view kernel,
                      Numbers numbers, int64_t shared_bytes, Numbers strides,
                      int64_t threads, int64_t zeros) {
  Launch launch;
  JBOOST_RETURN_IF_ERROR(Describe(kernel, grid, threads, shared_bytes, &launch));
  const size_t own = operands.size() - static_cast<size_t>(zeros);
  const size_t count = own + results.size();
  JBOOST_CHECK(
      own <= operands.size() && count <= kMaxBuffers && strides.size() == count,
      "strides must be those of at most 16 buffers");
  Strides steps{};
  std::array<void*, kMaxBuffers> buffers{};
  for (size_t i = 0; i < count; ++i) {
    steps.bytes[i] = strides[i];
    if (i < own) {
      auto operand = operands.get<ffi::AnyBuffer>(i);
      JBOOST_CHECK(operand.has_value(), "an operand is no buffer");
      buffers[i] = operand->untyped_data();
    } else {
      auto result = results.get<ffi::AnyBuffer>(i - own);
      JBOOST_CHECK(result.has_value(), "a result is no buffer");
      buffers[i] = (*result)->untyped_data();
    }
  }
  std::vector<int64_t> values(numbers.begin(), numbers.end());
  std::vector<void*> arguments{&steps};
  for (size_t i = 0; i < count; ++i) arguments.push_back(&buffers[i]);
  for (int64_t& value : values) arguments.push_back(&value);
  return FromMessage(RunLaunch(stream, launch, arguments.data()));
}

// On a CPU there is no stream: for a driver that stands in for CUDA's.
ffi::Error LaunchOnHostImpl(ffi::RemainingArgs operands, ffi::RemainingRets results,
                            Numbers grid, std::string_view kernel, Numbers numbers,
                            int64_t shared_bytes, Numbers strides, int64_t threads,
                            int64_t zeros) {
  JBOOST_CHECK(std::getenv("JBOOST_LIBCUDA") != nullptr,
               "CUDA kernels take arrays on a GPU; these are on a CPU");
  return LaunchImpl(nullptr, operands, results, grid, kernel, numbers, shared_bytes,
                    strides, threads, zeros);
}

template <class Binding>
auto WithAttributes(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Numbers>("grid")
      .template Attr<std::string_view>("kernel")
      .template Attr<Numbers>("numbers")
      .template Attr<int64_t>("shared_bytes")
      .template Attr<Numbers>("strides")
      .template Attr<int64_t>("threads")
      .template Attr<int64_t>("zeros");
}

}  // namespace

// XLA may record launches and repeat them as one CUDA graph.
#define JBOOST_LAUNCH_HANDLER(name, implementation, binding)             \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name( \
      XLA_FFI_CallFrame* call_frame) {                                   \
    return CatchErrors(call_frame, [&] {                                 \
      static auto* handler =                                             \
          WithAttributes(binding)                                        \
              .To(implementation, {ffi::Traits::kCmdBufferCompatible})   \
              .release();                                                \
      return handler->Call(call_frame);                                  \
    });                                                                  \
  }

JBOOST_LAUNCH_HANDLER(jboost_launch_prepare, PrepareImpl, ffi::Ffi::BindInitialize())
JBOOST_LAUNCH_HANDLER(jboost_launch, LaunchImpl,
                      ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>())
JBOOST_LAUNCH_HANDLER(jboost_launch_on_host, LaunchOnHostImpl, ffi::Ffi::Bind())

}  // namespace jboost
