#include <cmath>
#include <cstring>
#include <sstream>
#include <vector>

#include "neo_desktop/cpu.h"
#include "neo_desktop/quantised_linear.h"
#include "neo_desktop/quantised_pack.h"
#include "suites.h"
#include "tensor.h"

namespace neo_desktop::testing {
namespace {

// Where blocks have numbers in float16; -1: nowhere else.
constexpr int kHalves[kStoredTypes][2] = {{0, -1},   {0, -1}, {0, 2}, {0, -1},   {0, 2},  {80, 82},
                                          {108, -1}, {0, 2},  {0, 2}, {208, -1}, {0, -1}, {0, -1}};

struct Part {
  StoredType type;
  int64_t rows;
  Tensor packed;
};

Tensor bytes_of(const char* name, int64_t count, Random& random) {
  return {name, DType::kInt8, {count}, {1}, random};
}

// Rows of any bits, whose scales are finite; packed in pieces.
Part random_part(int64_t columns, Random& random) {
  const auto type = static_cast<StoredType>(random.between(0, kStoredTypes - 1));
  const int64_t rows = random.between(1, 50);
  const int64_t row_bytes = stored_bytes(type, columns);
  const int64_t block = stored_bytes(type, stored_columns(type));
  const Tensor stored = bytes_of("stored", rows * row_bytes, random);
  auto* bytes = stored.as<uint8_t>();
  for (int64_t i = 0; i < rows * row_bytes; ++i) bytes[i] = static_cast<uint8_t>(random.between(0, 255));
  for (int64_t at = 0; at < rows * row_bytes; at += block) {
    for (const int half : kHalves[static_cast<int>(type)]) {
      if (half >= 0) bytes[at + half + 1] &= 0xbf;  // an exponent that is not the largest
    }
  }
  Part part{type, rows, bytes_of("packed", packed_bytes(type, rows, columns), random)};
  std::memset(part.packed.as<char>(), 0, packed_bytes(type, rows, columns));
  const int64_t first = random.between(0, rows);
  auto* packed = part.packed.as<uint8_t>();
  pack_rows(type, bytes, 0, first, columns, packed, 1);
  pack_rows(type, bytes + first * row_bytes, first, rows - first, columns, packed, 3);
  return part;
}

std::vector<float> dense(const std::vector<Part>& parts, int64_t columns) {
  std::vector<float> weights;
  for (const Part& part : parts) {
    std::vector<int64_t> rows(part.rows);
    for (int64_t row = 0; row < part.rows; ++row) rows[row] = row;
    std::vector<float> floats(part.rows * columns);
    unpack_rows(weight_type_of(part.type), part.packed.as<uint8_t>(), rows.data(), part.rows, columns,
                floats.data(), 2);
    weights.insert(weights.end(), floats.begin(), floats.end());
  }
  return weights;
}

// Numbers of x are off by half of a 127th of their block's largest at most.
std::string wrong_product(const Tensor& x, const std::vector<float>& weights, const Tensor& out) {
  const int64_t columns = x.view().shape[1];
  for (int64_t n = 0; n < x.view().shape[0]; ++n) {
    for (int64_t row = 0; row < out.view().shape[1]; ++row) {
      double exact = 0, allowed = 0, size = 0;
      for (int64_t block = 0; block < columns; block += kBlockColumns) {
        double largest = 0, magnitude = 0;
        for (int64_t i = block; i < block + kBlockColumns; ++i) {
          const double number = x.get(x.at({n, i})), weight = weights[row * columns + i];
          exact += number * weight;
          magnitude += std::fabs(weight);
          largest = std::fmax(largest, std::fabs(number));
        }
        allowed += largest / 127 / 2 * magnitude;
        size = std::fmax(size, largest * 6e4 * 63 * 64 * kBlockColumns);  // of sums before minima are added
      }
      allowed = allowed * 1.001 + size * static_cast<double>(columns) * 1e-9 + std::fabs(exact) * 0.01;
      const double got = out.get(out.at({n, row}));
      if (std::fabs(got - exact) <= allowed || std::fabs(exact) > 3e4) continue;
      std::ostringstream text;
      text << "product " << n << ", " << row << " is " << got << "; expected " << exact << " +- " << allowed;
      return text.str();
    }
  }
  return "";
}

}  // namespace

void test_quantised(Random& random, Report& report) {
  const int64_t columns = 256 * random.between(1, 3), count = random.between(1, 20);
  std::vector<Part> parts;
  int64_t rows = 0;
  for (int64_t i = random.between(1, 3); i > 0; --i) {
    parts.push_back(random_part(columns, random));
    rows += parts.back().rows;
  }
  const DType dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  Tensor x("x", dtype, {count, columns}, packed_strides({count, columns}, random.pick({0, 8})), random);
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t i = 0; i < columns; i += 256) {
      const double* noise = random.noise(256);
      for (int64_t j = 0; j < 256; ++j) x.set(x.at({n, i + j}), noise[j]);
    }
  }
  const std::vector<float> weights = dense(parts, columns);
  std::vector<QuantisedPart> views;
  std::ostringstream text;
  text << count << " rows of " << columns << " " << dtype_text(dtype) << " times";
  for (const Part& part : parts) {
    views.push_back({weight_type_of(part.type), part.packed.as<uint8_t>(),
                     packed_bytes(part.type, part.rows, columns), part.rows});
    text << " " << part.rows << " of stored type " << static_cast<int>(part.type);
  }
  std::string first;
  for (const Isa isa : available_isas()) {
    for (const int threads : {1, 3}) {
      report.describe(isa_name(isa) + ("; " + text.str()));
      const Tensor out("out", dtype, {count, rows}, {rows, 1}, random);
      quantised_linear(x.view(), views, std::nullopt, out.view(), threads, isa);
      if (first.empty()) {
        first = out.bytes();
        const std::string wrong = wrong_product(x, weights, out);
        if (!wrong.empty()) report.fail(wrong);
      }
      if (out.bytes() != first) report.fail("not the same bits as those of the first instruction set");
    }
  }
}

}  // namespace neo_desktop::testing
