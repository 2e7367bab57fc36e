#include "tensor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>

#include "neo_desktop/half.h"

namespace neo_desktop::testing {
namespace {

struct FloatFormat {
  int mantissa_bits;  // those written
  int min_exponent;   // of normal numbers
  double largest;
};

FloatFormat format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {10, -14, 65504.0};
    case DType::kBFloat16:
      return {7, -126, 0x1.fep127};
    default:
      return {23, -126, 0x1.fffffep127};
  }
}

double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  }
  return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}

const std::vector<double>& half_values() {
  static const std::vector<double> values = [] {
    std::vector<double> table(1 << 16);
    for (size_t bits = 0; bits < table.size(); ++bits) table[bits] = half_value(static_cast<uint16_t>(bits));
    return table;
  }();
  return values;
}

int64_t elements_spanned(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  int64_t last = 0;
  for (size_t dim = 0; dim < shape.size(); ++dim) last += (shape[dim] - 1) * strides[dim];
  return last + 1;
}

}  // namespace

GuardedMemory::GuardedMemory(int64_t bytes, Guard guard) : bytes_(bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t used = (bytes + page - 1) / page * page;
  mapped_ = used + page;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  char* start = static_cast<char*>(mapping_);
  data_ = guard == Guard::kBefore ? start + page : start + used - bytes;
  if (mprotect(guard == Guard::kBefore ? start : start + used, page, PROT_NONE) != 0) {
    throw std::system_error(errno, std::generic_category(), "mprotect");
  }
}

GuardedMemory::GuardedMemory(GuardedMemory&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(other.mapped_),
      data_(other.data_),
      bytes_(other.bytes_) {}

GuardedMemory::~GuardedMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

Tensor::Tensor(const char* name, DType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides,
               Random& random)
    : memory_(elements_spanned(shape, strides) * size_of(dtype),
              random.chance(0.8) ? GuardedMemory::Guard::kAfter : GuardedMemory::Guard::kBefore),
      view_{name, memory_.data(), dtype, std::move(shape), std::move(strides)} {
  std::memset(memory_.data(), 0xff, memory_.bytes());
}

int64_t Tensor::at(std::initializer_list<int64_t> index) const {
  int64_t element = 0;
  size_t dim = 0;
  for (const int64_t i : index) element += i * view_.strides[dim++];
  return element;
}

double Tensor::get(int64_t element) const {
  switch (view_.dtype) {
    case DType::kFloat32:
      return as<float>()[element];
    case DType::kFloat16:
      return half_values()[as<uint16_t>()[element]];
    case DType::kBFloat16:
      return std::bit_cast<float>(static_cast<uint32_t>(as<uint16_t>()[element]) << 16);
    case DType::kInt8:
      return as<int8_t>()[element];
    case DType::kInt32:
      return as<int32_t>()[element];
    case DType::kInt64:
      return static_cast<double>(as<int64_t>()[element]);
  }
  return 0;
}

void Tensor::set(int64_t element, double value) {
  switch (view_.dtype) {
    case DType::kFloat32:
      as<float>()[element] = static_cast<float>(value);
      return;
    case DType::kFloat16:
      return from_float(static_cast<float>(value), as<Half>()[element]);
    case DType::kBFloat16:
      return from_float(static_cast<float>(value), as<BFloat16>()[element]);
    case DType::kInt8:
      as<int8_t>()[element] = static_cast<int8_t>(value);
      return;
    case DType::kInt32:
      as<int32_t>()[element] = static_cast<int32_t>(value);
      return;
    case DType::kInt64:
      as<int64_t>()[element] = static_cast<int64_t>(value);
      return;
  }
}

double rounded_to(DType dtype, double value) {
  if (!std::isfinite(value) || value == 0) return value;
  const FloatFormat format = format_of(dtype);
  const double step =
      std::ldexp(1.0, std::max(std::ilogb(value), format.min_exponent) - format.mantissa_bits);
  const double rounded = std::nearbyint(value / step) * step;
  if (std::fabs(rounded) <= format.largest) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

std::vector<int64_t> packed_strides(const std::vector<int64_t>& shape, int64_t apart) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t dim = shape.size() - 1; dim-- > 0;) {
    strides[dim] = strides[dim + 1] * shape[dim + 1] + (dim + 2 == shape.size() ? apart : 0);
  }
  return strides;
}

const char* dtype_text(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
    case DType::kInt8:
      return "int8";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "?";
}

}  // namespace neo_desktop::testing
