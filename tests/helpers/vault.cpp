// A device for the tests of what has to work on accelerators: `vault`, whose memory nobody can read or write but its own copies.
//
// It lies in this process behind page protection, so that a program which takes a device's address for one of its own ends at once. Everything
// but copies is computed by the processor, on copies there. Streams and events are those of a device that is always done.

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto VAULT = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// Held while memory is open, so that no thread closes it under another one's copy.
std::recursive_mutex door;
std::unordered_map<void*, size_t> sizes;

struct Memory final : c10::Allocator {
  static void free(void* data) {
    if (data == nullptr) {
      return;
    }
    const std::scoped_lock lock(door);
    munmap(data, sizes.extract(data).mapped());
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(VAULT, 0);
    if (bytes == 0) {
      return {nullptr, nullptr, &free, device};
    }
    const std::scoped_lock lock(door);
    void* data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "no memory for ", bytes, " bytes");
    sizes.emplace(data, bytes);
    return {data, data, &free, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free;
  }

  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "nobody copies a storage here");
  }
};

Memory memory;

// A tensor of this device, or of the processor, as one of the processor. Open until this ends.
class Opened {
 public:
  explicit Opened(const at::Tensor& tensor) : lock(door), data(nullptr) {
    if (tensor.is_cpu()) {
      here = tensor;
      return;
    }
    data = tensor.storage().mutable_data();
    protect(PROT_READ | PROT_WRITE);
    here = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  }

  Opened(const Opened&) = delete;

  ~Opened() {
    protect(PROT_NONE);
  }

  at::Tensor here;

 private:
  void protect(int how) const {
    if (data != nullptr && mprotect(data, sizes.at(data), how) != 0) {
      std::abort();
    }
  }

  std::unique_lock<std::recursive_mutex> lock;
  void* data;
};

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const Opened source(from);
  const Opened target(to);
  target.here.copy_(source.here);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, KEYS, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

void on_the_processor(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<VAULT> {
  c10::Device exchangeDevice(c10::Device) const override {
    return {VAULT, 0};
  }
  c10::Device getDevice() const override {
    return {VAULT, 0};
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, {VAULT, 0});
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return getStream(getDevice());
  }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
};

const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(VAULT, &memory);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_processor>());
}

}  // namespace
