// CUDA devices that are this host: tensors say that they are on a GPU, and the CPU's kernels compute them.
//
// For a build of torch without CUDA, where nothing else answers for DeviceType::CUDA. Every operation without a kernel
// of its own goes through `on_host`: each tensor gets a twin that shares its memory and says that it is on the CPU, the
// CPU's kernel runs on the twins, and what it returns moves to the device. As on a GPU, tensors of two devices do not
// mix, the device has memory and random generators of its own, and reads by the host can be made errors.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::IValue, c10::Stream;
using TensorList = c10::List<at::Tensor>;

constexpr DeviceIndex kDevices = 8;
thread_local DeviceIndex current = 0;
std::atomic<int64_t> held{0}, peak{0};
std::atomic<bool> no_waits{false};

Device on(DeviceIndex index) { return Device(DeviceType::CUDA, index < 0 ? current : index); }

// ---- memory, streams and random numbers

struct Memory final : c10::Allocator {
  static constexpr size_t kHeader = 64;  // holds the size; blocks stay aligned

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = static_cast<char*>(c10::alloc_cpu(bytes + kHeader));
    *reinterpret_cast<size_t*>(block) = bytes;
    const int64_t now = held += bytes;
    for (auto was = peak.load(); was < now && !peak.compare_exchange_weak(was, now);) {
    }
    return {block + kHeader, block, &release, on(-1)};
  }
  static void release(void* block) {
    if (block == nullptr) return;
    held -= *static_cast<size_t*>(block);
    c10::free_cpu(block);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;

c10::Storage allocate(size_t bytes, DeviceIndex index, const void* content, size_t content_bytes) {
  c10::DeviceGuard guard(on(index));
  auto data = memory.allocate(bytes);
  std::memcpy(data.get(), content, std::min(bytes, content_bytes));
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), &memory, /*resizable=*/true);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return on(-1); }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current = on(device.index()).index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// A seed, and a counter that goes up by 4 with each operation, as CUDA's.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

  explicit Generator(DeviceIndex index) : GeneratorImpl(on(index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "RNG state has another size, or is on a device");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  at::Generator of_one_operation() {
    auto made = at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15ULL + offset_ * 0xBF58476D1CE4E5B9ULL + 1);
    offset_ += 4;
    return made;
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < kDevices; ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(on(index).index());
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Device getDeviceFromPtr(void*) const override { return on(-1); }
};
struct DdpTimer final : c10d::Timer {
  explicit DdpTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override { return getTimeRef(end) - getTimeRef(start); }
};
using c10d::RegistererTimerRegistry, c10d::TimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, DdpTimer)

using at::CUDAHooksRegistry, at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

// ---- operations

// A tensor like this one in another storage.
at::Tensor in_storage(c10::Storage storage, const at::Tensor& like) {
  const auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  impl->set_storage_offset(like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

class Twins {
 public:
  DeviceIndex index = current;
  bool from_device = false, from_host = false;

  at::Tensor to_host(const at::Tensor& given) {
    if (!given.defined() || !given.is_cuda()) {
      from_host |= given.defined() && given.dim() > 0;
      return given;
    }
    index = given.get_device();
    from_device = true;
    for (auto& [device, host] : pairs_)
      if (device.is_same(given)) return host;
    auto* owner = new c10::Storage(given.storage());  // a collective may end after its caller has let go of the tensor
    c10::DataPtr data(
        owner->mutable_data(), owner, [](void* it) { delete static_cast<c10::Storage*>(it); }, at::kCPU);
    pairs_.emplace_back(given, in_storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), owner->nbytes(), std::move(data), c10::GetCPUAllocator(), true), given));
    return pairs_.back().second;
  }

  at::Tensor to_device(const at::Tensor& result) const {
    if (!result.defined() || !result.is_cpu()) return result;
    for (auto& [device, host] : pairs_)
      if (host.is_same(result)) return device;
    for (auto& [device, host] : pairs_)  // a view
      if (result.storage().nbytes() && result.storage().data() == device.storage().data())
        return in_storage(device.storage(), result);
    return in_storage(copied(result.storage()), result);
  }

  // What was resized, or got other memory, is so on the device, too.
  void follow() {
    for (auto& [device, host] : pairs_) {
      if (host.storage().data() != device.storage().data()) {
        auto moved = copied(host.storage());
        device.storage().set_nbytes(moved.nbytes());
        device.storage().set_data_ptr_noswap(std::move(moved.unsafeGetStorageImpl()->mutable_data_ptr()));
      }
      auto* impl = device.unsafeGetTensorImpl();
      if (host.sizes() != device.sizes() || host.strides() != device.strides())
        impl->set_sizes_and_strides(host.sizes(), host.strides());
      if (host.storage_offset() != device.storage_offset()) impl->set_storage_offset(host.storage_offset());
    }
  }

  // All tensors in a value: also in lists, and in lists of lists.
  template <typename Change>
  static IValue changed(const IValue& value, Change&& change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
      TensorList list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(change(one));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& one : value.toOptionalTensorVector())
        list.push_back(one ? std::optional<at::Tensor>(change(*one)) : std::nullopt);
      return list;
    }
    if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
      auto list = value.toList().copy();
      for (size_t i = 0; i < list.size(); ++i) list.set(i, changed(IValue(list.get(i)), change));
      return list;
    }
    return value;
  }

 private:
  c10::Storage copied(const c10::Storage& storage) const {
    return allocate(storage.nbytes(), index, storage.data(), storage.nbytes());
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

bool is_one_of(const std::string& name, const std::set<std::string>& names) { return names.count(name) > 0; }

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> reads = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"};
  static const std::set<std::string> takes_both = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  const auto& schema = op.schema();
  const bool sends = schema.name().rfind("c10d::", 0) == 0;
  TORCH_CHECK(!no_waits || !is_one_of(schema.name(), reads), schema.name(), " waits for the device");

  Twins twins;
  std::optional<size_t> generator_at;
  const auto begin = stack->size() - schema.arguments().size();
  for (size_t i = begin; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (schema.arguments()[i - begin].type()->str().find("Generator") != std::string::npos) generator_at = i;
    if (value.isDevice() && value.toDevice().is_cuda()) {
      twins.index = on(value.toDevice().index()).index();
      value = Device(DeviceType::CPU);
    } else {
      value = Twins::changed(value, [&](const at::Tensor& one) { return twins.to_host(one); });
    }
  }
  TORCH_CHECK(
      !(twins.from_device && twins.from_host) || sends || is_one_of(schema.name(), takes_both),
      "Expected all tensors to be on the same device, but found cuda and cpu in ", schema.name());

  auto host_generator = at::detail::getDefaultCPUGenerator();
  std::optional<at::Tensor> state;
  const auto tags = op.getTags();
  if (!sends && std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end()) {
    auto mine = default_generator(twins.index);
    if (generator_at && (*stack)[*generator_at].isGenerator()) mine = (*stack)[*generator_at].toGenerator();
    TORCH_CHECK(mine.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
    auto drawn = static_cast<Generator*>(mine.unsafeGetGeneratorImpl())->of_one_operation();
    if (generator_at) {
      (*stack)[*generator_at] = drawn;
    } else {
      state = host_generator.get_state();
      host_generator.set_state(drawn.get_state());
    }
  }
  {
    at::AutoDispatchBelowAutograd below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
  }
  if (state) host_generator.set_state(*state);
  twins.follow();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = Twins::changed((*stack)[i], [&](const at::Tensor& one) { return twins.to_device(one); });
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TORCH_CHECK(!no_waits || non_blocking || self.is_cuda() == source.is_cuda(), "copy_ waits for the device");
  at::NoGradGuard no_grad;
  Twins twins;
  twins.to_host(self).copy_(twins.to_host(source));
  return self;
}

// CUDA's softmax takes half precision and gives fp32 in one kernel.
template <at::Tensor (*kernel)(const at::Tensor&, int64_t, bool)>
at::Tensor widening(const at::Tensor& self, int64_t dim, bool widen) {
  at::AutoDispatchBelowAutograd below;
  Twins twins;
  const auto host = twins.to_host(self);
  return twins.to_device(kernel(widen ? host.to(at::kFloat) : host, dim, false));
}

template <at::Tensor (*kernel)(const at::Tensor&, const at::Tensor&, int64_t, at::ScalarType)>
at::Tensor narrowing(const at::Tensor& grad, const at::Tensor& output, int64_t dim, at::ScalarType dtype) {
  at::AutoDispatchBelowAutograd below;
  Twins twins;
  const auto host = twins.to_host(grad);
  return twins.to_device(kernel(host, twins.to_host(output), dim, host.scalar_type()).to(dtype));
}

at::Tensor& set_(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(sizes, strides);
  impl->set_storage_offset(offset);
  return self;
}

at::Tensor& set_all(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_(self, std::move(source), 0, {count}, {1});
}

at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return at::histc(self.cpu().to(at::kFloat), bins, low, high).to(self.device(), self.scalar_type());  // CUDA's takes int
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", &copy_);
  library.impl("set_.source_Storage_storage_offset", &set_);
  library.impl("set_.source_Storage", &set_all);
  library.impl("histc", &histc);
  library.impl("_softmax", &widening<&at::_softmax>);
  library.impl("_log_softmax", &widening<&at::_log_softmax>);
  library.impl("_softmax_backward_data", &narrowing<&at::_softmax_backward_data>);
  library.impl("_log_softmax_backward_data", &narrowing<&at::_log_softmax_backward_data>);
  for (const auto* name : {"convolution", "convolution_backward", "_foreach_copy_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

// In place of torch's, which ask gloo to send from a GPU.
TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  for (const auto* name : {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_",
                           "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
                           "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
                           "reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_",
                           "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(DeviceType::CUDA, &memory);
  module.attr("DEVICES") = static_cast<int>(kDevices);
  module.def("current", [] { return static_cast<int>(current); });
  module.def("set_current", [](int index) { current = static_cast<DeviceIndex>(index); });
  module.def("default_generator", [](int index) { return default_generator(static_cast<DeviceIndex>(index)); });
  module.def("held", [] { return held.load(); });
  module.def("peak", [] { return peak.load(); });
  module.def("reset_peak", [] { peak = held.load(); });
  module.def("set_no_waits", [](bool value) { no_waits = value; });
  module.def("resize", [](pybind11::handle storage, size_t bytes) {
    auto given = torch::createStorage(storage.ptr());
    auto moved = allocate(bytes, given.device().index(), given.data(), given.nbytes());
    given.set_data_ptr_noswap(std::move(moved.unsafeGetStorageImpl()->mutable_data_ptr()));
    given.set_nbytes(bytes);
  });
}
