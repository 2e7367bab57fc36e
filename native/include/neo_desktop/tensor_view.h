// A non-owning view of the caller's tensor: address, dtype, shape and strides.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "neo_desktop/dtype.h"

namespace neo_desktop {

struct TensorView {
  std::string name;  // the caller's name, for error messages
  void* data;
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements

  int64_t size(int dim) const { return shape[dim]; }
  int64_t stride(int dim) const { return strides[dim]; }
};

// Throws std::invalid_argument with the concatenated parts as message.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// "[2, 3, 64]"
std::string to_string(const std::vector<int64_t>& values);

// Each check throws std::invalid_argument with the tensor's name and the problem.
void check_dims(const TensorView& tensor, const char* meaning, size_t dims);
void check_shape(const TensorView& tensor, const char* meaning, const std::vector<int64_t>& expected);
void check_dtype(const TensorView& tensor, std::initializer_list<DType> allowed);
void check_packed(const TensorView& tensor, int last_dims);  // the last dimensions are contiguous
void check_like(const TensorView& tensor, const char* meaning, const std::vector<int64_t>& shape, DType dtype,
                int packed_dims = 1);                             // the three checks above
void check_no_overlap(const TensorView& tensor, int first_dims);  // no expanded (stride 0) dimension

}  // namespace neo_desktop
