// What torch asks of a device before it lets autograd use it, answered as by one idle device, so that fake tensors can
// step on CUDA or MPS where there is neither. Built with -DFAKE_CUDA or without, for MPS; loaded before torch is used.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

#ifdef FAKE_CUDA
constexpr auto kType = c10::DeviceType::CUDA;
#else
constexpr auto kType = c10::DeviceType::MPS;
#endif
const c10::Device kDevice(kType, 0);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

c10::impl::DeviceGuardImplRegistrar registrar(kType, new Guard());

}  // namespace

// A build of torch without the device has these fixed to "none".
#define TOLD __attribute__((visibility("default")))
namespace at::accelerator {
TOLD std::optional<c10::DeviceType> getAccelerator(bool) { return kType; }
TOLD bool isAccelerator(c10::DeviceType type) { return type == kType; }
TOLD c10::DeviceIndex deviceCount() { return 1; }
TOLD c10::DeviceIndex getDeviceIndex() { return 0; }
TOLD void setDeviceIndex(c10::DeviceIndex) {}
TOLD c10::Stream getCurrentStream(c10::DeviceIndex) { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
TOLD void setCurrentStream(c10::Stream) {}
}  // namespace at::accelerator

namespace at {

#define PRESENT                                              \
  bool isAvailable() const override { return true; }         \
  bool hasPrimaryContext(DeviceIndex) const override { return true; } \
  void init() const override {}                              \
  DeviceIndex deviceCount() const override { return 1; }     \
  DeviceIndex getCurrentDevice() const override { return 0; }

#ifdef FAKE_CUDA
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  PRESENT
};
REGISTER_CUDA_HOOKS(CUDAHooks)
#else
struct MPSHooks : MPSHooksInterface {
  bool hasMPS() const override { return true; }
  PRESENT
};
REGISTER_MPS_HOOKS(MPSHooks)
#endif

}  // namespace at
