// In place of torch's header of this name: what DeepSpeed's CPU Adam uses of it. The compiler needs
// a quarter of the time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

namespace torch {
using at::Tensor;
constexpr auto kFloat32 = at::kFloat;
}  // namespace torch
