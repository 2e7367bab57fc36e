#include "neo_desktop/tensor_view.h"

#include <algorithm>

namespace neo_desktop {
namespace {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt8:
      return "int8";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "?";
}

}  // namespace

std::string to_string(const std::vector<int64_t>& values) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "") << values[i];
  text << "]";
  return text.str();
}

void check_dims(const TensorView& tensor, const char* meaning, size_t dims) {
  if (tensor.shape.size() != dims) {
    fail(tensor.name, " has shape ", to_string(tensor.shape), "; expected ", dims, " dimensions ", meaning);
  }
}

void check_shape(const TensorView& tensor, const char* meaning, const std::vector<int64_t>& expected) {
  if (tensor.shape != expected) {
    fail(tensor.name, " has shape ", to_string(tensor.shape), "; expected ", to_string(expected), " = ",
         meaning);
  }
}

void check_dtype(const TensorView& tensor, std::initializer_list<DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), tensor.dtype) != allowed.end()) return;
  std::ostringstream names;
  for (const DType dtype : allowed) names << (dtype == *allowed.begin() ? "" : " or ") << dtype_name(dtype);
  fail(tensor.name, " has dtype ", dtype_name(tensor.dtype), "; expected ", names.str());
}

void check_packed(const TensorView& tensor, int last_dims) {
  int64_t expected = 1;
  const int dims = static_cast<int>(tensor.shape.size());
  for (int dim = dims - 1; dim >= dims - last_dims; --dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != expected) {
      fail(tensor.name, " has strides ", to_string(tensor.strides), "; its last ", last_dims,
           last_dims == 1 ? " dimension" : " dimensions", " must be contiguous");
    }
    expected *= tensor.size(dim);
  }
}

void check_like(const TensorView& tensor, const char* meaning, const std::vector<int64_t>& shape, DType dtype,
                int packed_dims) {
  check_shape(tensor, meaning, shape);
  check_dtype(tensor, {dtype});
  check_packed(tensor, packed_dims);
}

void check_no_overlap(const TensorView& tensor, int first_dims) {
  for (int dim = 0; dim < first_dims; ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) == 0) {
      fail(tensor.name, " is expanded in dimension ", dim, " (stride 0) and cannot be written to");
    }
  }
}

}  // namespace neo_desktop
