// SPDX-License-Identifier: Apache-2.0
// CUDA kernels: loaded and launched, on XLA's stream, through NVIDIA's driver, which is
// looked for when it is first needed. No header and no library of CUDA is needed to
// build this.
//
// A kernel gets the strides of the batch, the addresses of all operands and results,
// and numbers; see ../cuda/prelude.h. The last `zeros` operands share their memory with
// results, which must be zeros at first; the kernel gets those only once, as results.
// The Python wrapper of a kernel answers for what it passes.
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi.h"

namespace jboost {
namespace {

// The functions of the driver that are used, with the types that its ABI promises.
struct Driver {
  int (*Init)(unsigned);
  int (*GetErrorString)(int, const char**);
  int (*DriverGetVersion)(int*);
  int (*DeviceGetCount)(int*);
  int (*DeviceGetAttribute)(int*, int, int);
  int (*CtxGetDevice)(int*);
  int (*LibraryLoadData)(void**, const void*, void*, void**, unsigned, void*, void**,
                         unsigned);
  int (*LibraryGetKernel)(void**, void*, const char*);
  int (*KernelSetAttribute)(int, int, void*, int);
  int (*KernelGetFunction)(void**, void*);
  int (*LaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned, void*, void**, void**);
  std::string error;  // empty: all were found

  Driver() {
    const char* path = std::getenv("JBOOST_LIBCUDA");
    void* library = dlopen(path != nullptr ? path : "libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
      error = dlerror();
      return;
    }
    Find(library, "cuInit", &Init);
    Find(library, "cuGetErrorString", &GetErrorString);
    Find(library, "cuDriverGetVersion", &DriverGetVersion);
    Find(library, "cuDeviceGetCount", &DeviceGetCount);
    Find(library, "cuDeviceGetAttribute", &DeviceGetAttribute);
    Find(library, "cuCtxGetDevice", &CtxGetDevice);
    Find(library, "cuLibraryLoadData", &LibraryLoadData);
    Find(library, "cuLibraryGetKernel", &LibraryGetKernel);
    Find(library, "cuKernelSetAttribute", &KernelSetAttribute);
    Find(library, "cuKernelGetFunction", &KernelGetFunction);
    Find(library, "cuLaunchKernel", &LaunchKernel);
    if (error.empty()) error = Say("cuInit", Init(0));
  }

  template <class Function>
  void Find(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    if (*function == nullptr && error.empty())
      error = std::string("the driver of the GPU has no ") + name +
              " (CUDA 12.0 or newer is needed)";
  }

  // Returns the message of a call; empty if it succeeded.
  std::string Say(const char* what, int code) const {
    if (code == 0) return "";
    const char* text = nullptr;
    GetErrorString(code, &text);
    return std::string(what) + ": " + (text != nullptr ? text : "unknown error") +
           " (CUDA error " + std::to_string(code) + ")";
  }
};

const Driver& GetDriver() {
  static const Driver* driver = new Driver();  // used until the process ends
  return *driver;
}

void RequireNone(const std::string& error) {
  if (!error.empty()) throw std::runtime_error("jboost kernel: " + error);
}

#define JBOOST_DRIVER(name, ...) \
  RequireNone(driver.Say("cu" #name, driver.name(__VA_ARGS__)))

// cuDeviceGetAttribute: the compute capability.
constexpr int kMajor = 75, kMinor = 76;
// cuKernelSetAttribute: the greatest size of shared memory that a launch may ask for.
constexpr int kMaxSharedBytes = 8;

int FindArchitecture(const Driver& driver, int device) {
  int major = 0, minor = 0;
  JBOOST_DRIVER(DeviceGetAttribute, &major, kMajor, device);
  JBOOST_DRIVER(DeviceGetAttribute, &minor, kMinor, device);
  return 10 * major + minor;
}

// A kernel as the driver knows it on one device.
struct Loaded {
  void *kernel = nullptr, *function = nullptr;
  uint32_t shared_bytes = 0;  // that a launch may ask for
};

// The compiled kernels, and what the driver made of them.
struct Kernels {
  std::mutex mutex;
  std::map<int, std::string> images;                    // by architecture
  std::map<int, void*> libraries;                       // the same
  std::map<std::pair<int, std::string>, Loaded> found;  // by device and name
};

Kernels& GetKernels() {
  static Kernels* kernels = new Kernels();
  return *kernels;
}

// A launch of one kernel.
struct Launch {
  std::string kernel;
  uint32_t grid[3];
  uint32_t threads;       // of a block
  uint32_t shared_bytes;  // of a block
};

// Loads the kernel on the current GPU, which cannot be done while a stream is captured.
void* FindFunction(const Driver& driver, const Launch& launch) {
  RequireNone(driver.error);
  int device = 0;
  JBOOST_DRIVER(CtxGetDevice, &device);
  Kernels& kernels = GetKernels();
  std::lock_guard<std::mutex> lock(kernels.mutex);
  Loaded& known = kernels.found[{device, launch.kernel}];
  if (known.function == nullptr) {
    int architecture = FindArchitecture(driver, device);
    auto image = kernels.images.find(architecture);
    if (image == kernels.images.end()) {
      RequireNone("no kernels were compiled for GPUs of architecture " +
                  std::to_string(architecture));
    }
    void*& library = kernels.libraries[architecture];
    if (library == nullptr) {
      JBOOST_DRIVER(LibraryLoadData, &library, image->second.data(), nullptr, nullptr,
                    0, nullptr, nullptr, 0);
    }
    JBOOST_DRIVER(LibraryGetKernel, &known.kernel, library, launch.kernel.c_str());
    JBOOST_DRIVER(KernelGetFunction, &known.function, known.kernel);
  }
  // The limit is one of all launches of a kernel: it must never fall.
  if (launch.shared_bytes > known.shared_bytes) {
    JBOOST_DRIVER(KernelSetAttribute, kMaxSharedBytes,
                  static_cast<int>(launch.shared_bytes), known.kernel, device);
    known.shared_bytes = launch.shared_bytes;
  }
  return known.function;
}

constexpr size_t kMaxBuffers = 16;

struct Strides {
  int64_t bytes[kMaxBuffers];
};

using Numbers = ffi::Span<const int64_t>;

Launch ReadLaunch(const ffi::Dictionary& attributes) {
  auto grid = ReadAttribute<Numbers>(attributes, "grid");
  auto threads = ReadAttribute<int64_t>(attributes, "threads");
  auto shared_bytes = ReadAttribute<int64_t>(attributes, "shared_bytes");
  Require(grid.size() == 3, "grid must have 3 sizes");
  Launch launch;
  for (int axis = 0; axis < 3; ++axis) {
    // Of axes y and z.
    bool fits = grid[axis] >= 0 && grid[axis] <= (axis == 0 ? INT32_MAX : 65535);
    if (!fits) {
      throw Mismatch("a GPU cannot run a grid of " + std::to_string(grid[axis]) +
                     " blocks along axis " + std::to_string(axis));
    }
    launch.grid[axis] = static_cast<uint32_t>(grid[axis]);
  }
  Require(threads > 0 && threads <= 1024 && threads % 32 == 0,
          "threads must be a multiple of 32, at most 1024");
  Require(shared_bytes >= 0 && shared_bytes < (1 << 20), "shared_bytes is wrong");
  launch.kernel = std::string(ReadAttribute<std::string_view>(attributes, "kernel"));
  launch.threads = static_cast<uint32_t>(threads);
  launch.shared_bytes = static_cast<uint32_t>(shared_bytes);
  return launch;
}

ffi::Error PrepareImpl(ffi::RemainingArgs, ffi::RemainingRets,
                       ffi::Dictionary attributes) {
  FindFunction(GetDriver(), ReadLaunch(attributes));
  return ffi::Error::Success();
}

// Does not wait for the end of the kernel.
ffi::Error LaunchImpl(void* stream, ffi::RemainingArgs operands,
                      ffi::RemainingRets results, ffi::Dictionary attributes) {
  Launch launch = ReadLaunch(attributes);
  auto numbers = ReadAttribute<Numbers>(attributes, "numbers");
  auto strides = ReadAttribute<Numbers>(attributes, "strides");
  const auto zeros = static_cast<size_t>(ReadAttribute<int64_t>(attributes, "zeros"));
  const size_t own = operands.size() - zeros, count = own + results.size();
  Require(own <= operands.size() && count <= kMaxBuffers && strides.size() == count,
          "strides must be those of at most 16 buffers");
  Strides steps{};
  std::array<void*, kMaxBuffers> buffers{};
  for (size_t i = 0; i < count; ++i) {
    steps.bytes[i] = strides[i];
    if (i < own) {
      auto operand = operands.get<ffi::AnyBuffer>(i);
      Require(operand.has_value(), "an operand is no buffer");
      buffers[i] = operand->untyped_data();
    } else {
      auto result = results.get<ffi::AnyBuffer>(i - own);
      Require(result.has_value(), "a result is no buffer");
      buffers[i] = (*result)->untyped_data();
    }
  }
  std::vector<int64_t> values(numbers.begin(), numbers.end());
  std::vector<void*> arguments{&steps};
  for (size_t i = 0; i < count; ++i) arguments.push_back(&buffers[i]);
  for (int64_t& value : values) arguments.push_back(&value);
  const Driver& driver = GetDriver();
  void* function = FindFunction(driver, launch);
  const uint32_t* grid = launch.grid;
  if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return ffi::Error::Success();
  JBOOST_DRIVER(LaunchKernel, function, grid[0], grid[1], grid[2], launch.threads, 1, 1,
                launch.shared_bytes, stream, arguments.data(), nullptr);
  return ffi::Error::Success();
}

// On a CPU there is no stream: for a driver that stands in for CUDA's.
ffi::Error LaunchOnHostImpl(ffi::RemainingArgs operands, ffi::RemainingRets results,
                            ffi::Dictionary attributes) {
  Require(std::getenv("JBOOST_LIBCUDA") != nullptr,
          "CUDA kernels take arrays on a GPU; these are on a CPU");
  return LaunchImpl(nullptr, operands, results, attributes);
}

}  // namespace

// XLA may record launches and repeat them as one CUDA graph.
#define JBOOST_LAUNCH_HANDLER(name, implementation, binding)             \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name( \
      XLA_FFI_CallFrame* call_frame) {                                   \
    return CatchErrors(call_frame, [&] {                                 \
      static auto* handler =                                             \
          (binding)                                                      \
              .RemainingArgs()                                           \
              .RemainingRets()                                           \
              .Attrs()                                                   \
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

// Returns why kernels cannot be launched here; empty if they can. The text stays valid.
extern "C" __attribute__((visibility("default"))) const char* jboost_cuda_error() {
  return jboost::GetDriver().error.c_str();
}

// Returns the version of CUDA that the driver supports, 13 for 13.0; 0 without a
// driver.
extern "C" __attribute__((visibility("default"))) int jboost_cuda_version() {
  const jboost::Driver& driver = jboost::GetDriver();
  int version = 0;  // 1000 * major + 10 * minor
  if (!driver.error.empty() || driver.DriverGetVersion(&version) != 0) return 0;
  return version / 1000;
}

// Returns the architecture of GPU number `device`, 90 for 9.0; 0 if there is none.
extern "C" __attribute__((visibility("default"))) int jboost_cuda_architecture(
    int device) {
  const jboost::Driver& driver = jboost::GetDriver();
  int count = 0;
  if (!driver.error.empty() || driver.DeviceGetCount(&count) != 0) return 0;
  if (device >= count) return 0;
  try {
    return jboost::FindArchitecture(driver, device);
  } catch (const std::exception&) {
    return 0;
  }
}

// Keeps the compiled kernels for GPUs of an architecture.
extern "C" __attribute__((visibility("default"))) void jboost_cuda_load(
    int architecture, const char* image, int64_t bytes) {
  jboost::Kernels& kernels = jboost::GetKernels();
  std::lock_guard<std::mutex> lock(kernels.mutex);
  kernels.images.emplace(architecture, std::string(image, bytes));
}
