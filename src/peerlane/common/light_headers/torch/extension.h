// A part of torch/extension.h: tensors, and their bindings to Python.
#pragma once

#include <torch/types.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
