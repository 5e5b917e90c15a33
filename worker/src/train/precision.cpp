// Sets autocast for CPUs and GPUs, and TF32. libtorch's Rust bindings have autocast for GPUs alone, with half precision.
// precision.rs is the caller, and describes the functions.

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

// Exceptions must not reach the caller; these functions set numbers and flags.

extern "C" void psjobs_enter_autocast() noexcept {
  for (const auto device : {at::kCPU, at::kCUDA}) {
    at::autocast::set_autocast_dtype(device, at::kBFloat16);
    at::autocast::set_autocast_enabled(device, true);
  }
  at::autocast::increment_nesting();
}

extern "C" void psjobs_leave_autocast() noexcept {
  // Parameters that were cast are kept until here. They change before the next forward.
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  for (const auto device : {at::kCPU, at::kCUDA}) {
    at::autocast::set_autocast_enabled(device, false);
  }
}

extern "C" void psjobs_allow_tf32(bool allowed) noexcept {
  at::globalContext().setAllowTF32CuBLAS(allowed);
  at::globalContext().setAllowTF32CuDNN(allowed);
}

// For the tests.
extern "C" bool psjobs_tf32_is_allowed(bool convolution) noexcept {
  const auto operation = convolution ? at::Float32Op::CONV : at::Float32Op::MATMUL;
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, operation) == at::Float32Precision::TF32;
}
