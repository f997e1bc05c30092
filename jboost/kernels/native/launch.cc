// SPDX-License-Identifier: Apache-2.0
#include "launch.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

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

// cuDeviceGetAttribute: the compute capability.
constexpr int kMajor = 75, kMinor = 76;
// cuKernelSetAttribute: the greatest size of shared memory that a launch may ask for.
constexpr int kMaxSharedBytes = 8;

std::string FindArchitecture(const Driver& driver, int device, int* architecture) {
  int major = 0, minor = 0;
  std::string error = driver.Say("cuDeviceGetAttribute",
                                 driver.DeviceGetAttribute(&major, kMajor, device));
  if (error.empty())
    error = driver.Say("cuDeviceGetAttribute",
                       driver.DeviceGetAttribute(&minor, kMinor, device));
  *architecture = 10 * major + minor;
  return error;
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

#define JBOOST_DRIVER(name, ...)                                           \
  do {                                                                     \
    std::string failed = driver.Say("cu" #name, driver.name(__VA_ARGS__)); \
    if (!failed.empty()) return failed;                                    \
  } while (false)

std::string FindFunction(const Driver& driver, const Launch& launch, void** function) {
  int device = 0, architecture = 0;
  JBOOST_DRIVER(CtxGetDevice, &device);
  Kernels& kernels = GetKernels();
  std::lock_guard<std::mutex> lock(kernels.mutex);
  Loaded& known = kernels.found[{device, launch.kernel}];
  if (known.function == nullptr) {
    std::string error = FindArchitecture(driver, device, &architecture);
    if (!error.empty()) return error;
    auto image = kernels.images.find(architecture);
    if (image == kernels.images.end())
      return "no kernels were compiled for GPUs of architecture " +
             std::to_string(architecture);
    void*& library = kernels.libraries[architecture];
    if (library == nullptr)
      JBOOST_DRIVER(LibraryLoadData, &library, image->second.data(), nullptr, nullptr,
                    0, nullptr, nullptr, 0);
    JBOOST_DRIVER(LibraryGetKernel, &known.kernel, library, launch.kernel.c_str());
    JBOOST_DRIVER(KernelGetFunction, &known.function, known.kernel);
  }
  // The limit is one of all launches of a kernel: it must never fall.
  if (launch.shared_bytes > known.shared_bytes) {
    JBOOST_DRIVER(KernelSetAttribute, kMaxSharedBytes,
                  static_cast<int>(launch.shared_bytes), known.kernel, device);
    known.shared_bytes = launch.shared_bytes;
  }
  *function = known.function;
  return "";
}

}  // namespace

std::string PrepareLaunch(const Launch& launch) {
  const Driver& driver = GetDriver();
  if (!driver.error.empty()) return driver.error;
  void* function = nullptr;
  return FindFunction(driver, launch, &function);
}

std::string RunLaunch(void* stream, const Launch& launch, void** arguments) {
  const Driver& driver = GetDriver();
  if (!driver.error.empty()) return driver.error;
  void* function = nullptr;
  std::string error = FindFunction(driver, launch, &function);
  if (!error.empty()) return error;
  if (launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0) return "";
  JBOOST_DRIVER(LaunchKernel, function, launch.grid[0], launch.grid[1], launch.grid[2],
                launch.threads, 1, 1, launch.shared_bytes, stream, arguments, nullptr);
  return "";
}

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
  int count = 0, architecture = 0;
  if (!driver.error.empty() || driver.DeviceGetCount(&count) != 0) return 0;
  if (device >= count) return 0;
  std::string error = jboost::FindArchitecture(driver, device, &architecture);
  return error.empty() ? architecture : 0;
}

// Keeps the compiled kernels for GPUs of an architecture.
extern "C" __attribute__((visibility("default"))) void jboost_cuda_load(
    int architecture, const char* image, int64_t bytes) {
  jboost::Kernels& kernels = jboost::GetKernels();
  std::lock_guard<std::mutex> lock(kernels.mutex);
  kernels.images.emplace(architecture, std::string(image, bytes));
}
