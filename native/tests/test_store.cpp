#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "neo_desktop/row_store.h"
#include "suites.h"
#include "tensor.h"

namespace neo_desktop::testing {

void test_store(Random& random, Report& report) {
  const DType dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  const int64_t layers = random.between(1, 5), width = random.pick({1, 7, 64, 5000});
  const int64_t slots = random.between(1, 40), count = random.between(1, slots);
  const std::vector<int64_t> shape{layers, count, width}, home{layers, slots, width};
  const Tensor rows("rows", dtype, shape, packed_strides(shape, random.between(0, 3)), random);
  const Tensor into("into", dtype, home, packed_strides(home, random.between(0, 3)), random);
  const Tensor where("slots", DType::kInt64, {count}, {1}, random);
  std::vector<int64_t> order(slots);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random.engine());
  std::copy_n(order.begin(), count, where.as<int64_t>());
  report.describe(std::to_string(count) + " rows of " + std::to_string(layers) + " layers, " +
                  std::to_string(width) + " numbers of " + dtype_text(dtype));
  const int64_t row_bytes = width * size_of(dtype);
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int64_t i = 0; i < count; ++i) {
      std::memset(rows.as<char>() + rows.at({layer, i, 0}) * size_of(dtype),
                  static_cast<int>(random.between(0, 254)), row_bytes);
    }
  }
  const std::string untouched = into.bytes();
  std::string expected = untouched;
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(expected.data() + into.at({layer, order[i], 0}) * size_of(dtype),
                  rows.as<char>() + rows.at({layer, i, 0}) * size_of(dtype), row_bytes);
    }
  }
  store_rows(rows.view(), where.view(), into.view(), random.pick({1, 2, 4}));
  if (into.bytes() != expected) report.fail("rows are not where they belong, or more was written");

  where.as<int64_t>()[random.between(0, count - 1)] = random.pick<int64_t>({-1, slots, INT64_MIN, INT64_MAX});
  try {
    store_rows(rows.view(), where.view(), into.view(), 1);
    report.fail("a wrong slot was not refused");
  } catch (const std::invalid_argument&) {
    if (into.bytes() != expected) report.fail("refused, but something was written");
  }
}

}  // namespace neo_desktop::testing
