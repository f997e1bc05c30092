// SPDX-License-Identifier: Apache-2.0
// CUDA kernels: loaded and launched through NVIDIA's driver, which is looked for when
// it is first needed. No header and no library of CUDA is needed to build this.
#ifndef JBOOST_LAUNCH_H_
#define JBOOST_LAUNCH_H_

#include <cstdint>
#include <string>

namespace jboost {

// A launch of one kernel.
struct Launch {
  std::string kernel;
  uint32_t grid[3];
  uint32_t threads;       // of a block
  uint32_t shared_bytes;  // of a block
};

// Loads the kernel on the current GPU, which cannot be done while a stream is captured.
// Returns an error message; empty if there is none.
std::string PrepareLaunch(const Launch& launch);

// Launches the kernel; does not wait for its end. `arguments` are the addresses of the
// kernel's arguments.
std::string RunLaunch(void* stream, const Launch& launch, void** arguments);

}  // namespace jboost

#endif  // JBOOST_LAUNCH_H_
