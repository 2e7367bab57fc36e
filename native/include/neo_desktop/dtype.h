// Element types. Included by the ISA-specific files: nothing here may generate code of its own.
#pragma once

#include <cstdint>

namespace neo_desktop {

// The first three can hold keys, values, queries and outputs; the others index.
enum class DType { kFloat32, kFloat16, kBFloat16, kInt32, kInt64 };

constexpr int kFloatTypes = 3;

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

constexpr int64_t size_of(DType dtype) {
  return dtype == DType::kInt64 ? 8 : dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 4;
}

}  // namespace neo_desktop
