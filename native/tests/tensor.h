// A tensor with its own memory, which ends directly before (or starts directly after) an inaccessible page:
// any access outside it faults, with and without a sanitizer.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "neo_desktop/tensor_view.h"
#include "random.h"

namespace neo_desktop::testing {

class GuardedMemory {
 public:
  enum class Guard { kBefore, kAfter };
  GuardedMemory(int64_t bytes, Guard guard);
  GuardedMemory(GuardedMemory&& other) noexcept;
  GuardedMemory& operator=(GuardedMemory&&) = delete;
  ~GuardedMemory();
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* mapping_;
  int64_t mapped_;
  void* data_;
  int64_t bytes_;
};

class Tensor {
 public:
  // All bytes are 0xff, which is NaN in all float types.
  Tensor(const char* name, DType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides,
         Random& random);

  const TensorView& view() const { return view_; }
  DType dtype() const { return view_.dtype; }

  // Offset of an element, in elements from the start.
  int64_t at(std::initializer_list<int64_t> index) const;
  double get(int64_t element) const;
  void set(int64_t element, double value);  // rounds to nearest, ties to even

  template <class T>
  T* as() const {
    return static_cast<T*>(view_.data);
  }
  std::string bytes() const { return {as<char>(), static_cast<size_t>(memory_.bytes())}; }

 private:
  GuardedMemory memory_;
  TensorView view_;
};

// Rounds `value` to a float type: nearest, ties to even, infinity beyond the largest. Independent of the
// library's conversions.
double rounded_to(DType dtype, double value);

// Strides of a packed tensor with a gap of `apart` elements between its rows.
std::vector<int64_t> packed_strides(const std::vector<int64_t>& shape, int64_t apart = 0);

const char* dtype_text(DType dtype);

}  // namespace neo_desktop::testing
