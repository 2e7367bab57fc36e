// Element types. Included by the ISA-specific files: nothing here may generate code of its own.
#pragma once

#include <cstdint>

namespace neo_desktop {

// Keys, values, queries and outputs use the first three types; keys and values also int8. The others are
// indices.
enum class DType { kFloat32, kFloat16, kBFloat16, kInt8, kInt32, kInt64 };

constexpr int kFloatTypes = 3;
constexpr int kCacheTypes = 4;

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Int8 {
  int8_t value;
};

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt64:
      return 8;
    default:
      return 4;
  }
}

}  // namespace neo_desktop
