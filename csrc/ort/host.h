// The functions of ONNX Runtime that diffbit's ops call on a CPU, and what a host of them, which is not ONNX Runtime, names its own
// (graph/host.cpp, tests/native/host.cpp).
#pragma once

#include "abi.h"

#define DIFFBIT_HOST_FUNCTIONS(set) \
  set(ort::CreateStatus, create_status); \
  set(ort::GetErrorMessage, get_error_message); \
  set(ort::ReleaseStatus, release_status); \
  set(ort::CreateCustomOpDomain, create_domain); \
  set(ort::CustomOpDomain_Add, domain_add); \
  set(ort::AddCustomOpDomain, add_domain); \
  set(ort::GetTensorMutableData, get_data); \
  set(ort::GetTensorElementType, get_element_type); \
  set(ort::GetDimensionsCount, get_dimensions_count); \
  set(ort::GetDimensions, get_dimensions); \
  set(ort::GetTensorTypeAndShape, get_type_and_shape); \
  set(ort::ReleaseTensorTypeAndShapeInfo, release_type_and_shape); \
  set(ort::KernelInfoGetAttribute_float, get_float); \
  set(ort::KernelInfoGetAttribute_int64, get_int64); \
  set(ort::KernelContext_GetInputCount, get_input_count); \
  set(ort::KernelContext_GetOutputCount, get_output_count); \
  set(ort::KernelContext_GetInput, get_input); \
  set(ort::KernelContext_GetOutput, get_output); \
  set(ort::KernelContext_ParallelFor, parallel_for);
