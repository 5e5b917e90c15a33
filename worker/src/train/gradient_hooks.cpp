// Sets hooks on parameters that run when backward() has completed a gradient. libtorch's Rust bindings have none.
// gradient_hooks.rs is the caller, and describes the functions.

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

namespace {

// Takes over `gradient`. Returns true if the parameter shall not keep it.
using Take = bool (*)(void *context, size_t index, at::Tensor *gradient);

struct Hook : torch::autograd::PostAccumulateGradHook {
  Hook(Take take, void *context, size_t index) : take(take), context(context), index(index) {}

  void operator()(const torch::autograd::Variable &parameter) override {
    at::Tensor &gradient = parameter.mutable_grad();
    if (gradient.defined() && take(context, index, new at::Tensor(gradient))) {
      gradient.reset();
    }
  }

  Take take;
  void *context;
  size_t index;
};

} // namespace

// Exceptions must not reach the caller; these functions fail for want of memory alone.

extern "C" void psjobs_set_gradient_hook(const at::Tensor *parameter, Take take, void *context, size_t index) noexcept {
  torch::autograd::impl::set_post_acc_grad_hooks(*parameter, std::make_unique<Hook>(take, context, index));
}

extern "C" void psjobs_clear_gradient_hook(const at::Tensor *parameter) noexcept {
  torch::autograd::impl::post_acc_grad_hooks(*parameter).reset();
}
