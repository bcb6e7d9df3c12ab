// What torch's FakeTensorMode needs for tensors on "cuda" in a build without CUDA: a guard of one
// device with one stream, whose events are always done, and hooks that say that CUDA is there. To be
// loaded before torch is imported: see fake_cuda.py.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using namespace c10;

template <DeviceType TYPE, int COUNT>
struct Guard final : impl::DeviceGuardImplInterface {
  Device device() const { return Device(TYPE, 0); }
  Stream stream() const { return Stream(Stream::DEFAULT, device()); }
  DeviceType type() const override { return TYPE; }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const override { return stream(); }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

Guard<DeviceType::CUDA, 1> cuda;
Guard<DeviceType::PrivateUse1, 0> other;  // autograd asks for this device too

struct Install {
  Install() {
    impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&cuda);
    impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::PrivateUse1)].store(&other);
  }
} install;

}  // namespace

namespace at {

struct CUDAHooks : public CUDAHooksInterface {  // torch looks for a class of this name
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
