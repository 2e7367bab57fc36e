#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <vector>

#include "neo_desktop/kernels.h"
#include "neo_desktop/operators.h"
#include "neo_desktop/packed_experts.h"
#include "neo_desktop/quantised_pack.h"
#include "suites.h"
#include "tensor.h"

namespace neo_desktop::testing {
namespace {

Tensor numbers(const char* name, DType dtype, std::vector<int64_t> shape, Random& random) {
  Tensor tensor(name, dtype, shape, packed_strides(shape), random);
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  for (int64_t i = 0; i < count; ++i) tensor.set(i, *random.noise(1) / 8);
  return tensor;
}

// Packed weights, and their memory.
struct Weights {
  Tensor packed, bias;
  PackedMatrix matrix;
};

Weights plain(DType dtype, int64_t rows, int64_t columns, Random& random) {
  const int64_t width = dtype == DType::kBFloat16 ? 2 : 1;
  Tensor packed = numbers("packed", dtype, {rows / kTileRows, columns / width, kTileRows, width}, random);
  Tensor bias = numbers("bias", dtype, {rows}, random);
  const auto bytes = static_cast<int64_t>(packed.bytes().size());
  const PackedPart part{dense_type(dtype), packed.as<uint8_t>(), bytes, rows};
  return {std::move(packed), std::move(bias), {{part}, std::nullopt}};
}

Weights quantised(DType dtype, int64_t rows, int64_t columns, Random& random) {
  const int64_t bytes = stored_bytes(StoredType::kQ8_0, columns);
  const Tensor stored("stored", DType::kInt8, {rows * bytes}, {1}, random);
  auto* raw = stored.as<uint8_t>();
  for (int64_t i = 0; i < rows * bytes; ++i) raw[i] = static_cast<uint8_t>(random.between(0, 255));
  for (int64_t at = 1; at < rows * bytes; at += stored_bytes(StoredType::kQ8_0, kBlockColumns)) {
    raw[at] = (raw[at] & 0x83) | 0x18;  // scales of about 2 ** -8
  }
  const int64_t packed_size = packed_bytes(StoredType::kQ8_0, rows, columns);
  Tensor packed("packed", DType::kInt8, {packed_size}, {1}, random);
  pack_rows(StoredType::kQ8_0, raw, 0, rows, columns, packed.as<uint8_t>(), 1);
  Tensor bias = numbers("bias", dtype, {rows}, random);
  const PackedPart part{weight_type_of(StoredType::kQ8_0), packed.as<uint8_t>(), packed_size, rows};
  return {std::move(packed), std::move(bias), {{part}, std::nullopt}};
}

// Scratch and output of multiply_experts.
struct Problem {
  Problem(const Tensor& x, const Tensor& ids, const Tensor& weights, int64_t intermediate, Random& random)
      : gate_up(room("gate_up", pairs(ids), 2 * intermediate, x, random)),
        gated(room("gated", pairs(ids), intermediate, x, random)),
        products(room("products", pairs(ids), x.view().shape[1], x, random)),
        out(room("out", x.view().shape[0], x.view().shape[1], x, random)),
        rows{x.view(),     ids.view(),      weights.view(), gate_up.view(),
             gated.view(), products.view(), out.view()} {}

  static int64_t pairs(const Tensor& ids) { return ids.view().shape[0] * ids.view().shape[1]; }
  static Tensor room(const char* name, int64_t rows, int64_t columns, const Tensor& x, Random& random) {
    return {name, x.dtype(), {rows, columns}, {columns, 1}, random};
  }

  Tensor gate_up, gated, products, out;
  ExpertRows rows;
};

// The same result by single calls, for one row and expert at a time.
std::vector<double> apart(const PackedExperts& experts, const ExpertRows& rows, const Tensor& x,
                          const Tensor& ids, const Tensor& weights, Isa isa, Random& random) {
  const int64_t n = x.view().shape[0], hidden = x.view().shape[1], per_row = ids.view().shape[1];
  const int64_t intermediate = rows.gated.shape[1];
  const Tensor gate_up = Problem::room("gate_up", 1, 2 * intermediate, x, random);
  const Tensor gated = Problem::room("gated", 1, intermediate, x, random);
  const Tensor made = Problem::room("made", 1, hidden, x, random);
  std::vector<double> out;
  for (int64_t row = 0; row < n; ++row) {
    std::vector<float> sums(hidden, 0.0f);
    TensorView one = x.view();
    one.data = x.as<char>() + row * one.strides[0] * size_of(x.dtype());
    one.shape[0] = 1;
    for (int64_t slot = 0; slot < per_row; ++slot) {
      const int32_t expert = ids.as<int32_t>()[row * per_row + slot];
      TensorView gate = gate_up.view(), up = gate_up.view();
      gate.shape[1] = up.shape[1] = intermediate;
      up.data = gate_up.as<char>() + intermediate * size_of(x.dtype());
      const auto multiply = [&](const TensorView& from, const PackedMatrix& matrix, const TensorView& to) {
        packed_linear(from, matrix.parts, matrix.bias, to, 1, isa);
      };
      multiply(one, experts.gate[expert], gate);
      if (!experts.is_one) multiply(one, experts.up[expert], up);
      if (experts.clamped) {
        const auto [alpha, limit] = *experts.clamped;
        kernels_for(isa).operators.clamped_mul[static_cast<int>(x.dtype())](
            gate_up.view().data, gated.view().data, static_cast<int>(intermediate), alpha, limit);
      } else if (experts.gate_by != Unary::kSilu) {
        const auto& operators = kernels_for(isa).operators;
        const auto dtype = static_cast<int>(x.dtype()), length = static_cast<int>(intermediate);
        const void* factor = experts.is_one ? gate_up.view().data : up.data;
        operators.unary[static_cast<int>(experts.gate_by)][dtype](gate_up.view().data, gated.view().data,
                                                                  length);
        operators.binary[static_cast<int>(Binary::kTimes)][dtype](gated.view().data, factor,
                                                                  gated.view().data, length);
      } else {
        silu_mul(gate_up.view(), gated.view(), 1, isa);
      }
      multiply(gated.view(), experts.down[expert], made.view());
      const float weight = weights.as<float>()[row * per_row + slot];
      for (int64_t i = 0; i < hidden; ++i) {
        const volatile float term = static_cast<float>(made.get(i)) * weight;  // round before the addition
        sums[i] += term;
      }
    }
    for (const float sum : sums) out.push_back(rounded_to(x.dtype(), sum));
  }
  return out;
}

}  // namespace

void test_experts(Random& random, Report& report) {
  const DType dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  const int64_t count = random.between(1, 5), per_row = random.between(1, count), n = random.between(1, 20);
  const int64_t hidden = 32 * random.between(1, 3) * (random.chance(0.2) ? 16 : 1);
  const int64_t intermediate = 32 * random.between(1, 3);
  const bool is_quantised = random.chance(0.5), has_bias = random.chance(0.5);
  const auto matrix = [&](int64_t rows, int64_t columns) {
    Weights made = (is_quantised ? quantised : plain)(dtype, count * rows, columns, random);
    if (has_bias) made.matrix.bias = made.bias.view();
    return made;
  };
  const Weights gate = matrix(intermediate, hidden), up = matrix(intermediate, hidden);
  const Weights down = matrix(hidden, intermediate);
  std::optional<ClampedGate> clamped;
  if (random.chance(0.3)) clamped = {1.702f, random.pick({0.1f, 7.0f})};
  const Unary gate_by = random.pick({Unary::kSilu, Unary::kGeluTanh, Unary::kRelu});
  const bool is_one = gate_by == Unary::kRelu && random.chance(0.5);
  const PackedExperts experts =
      packed_experts(count, gate.matrix, is_one ? gate.matrix : up.matrix, down.matrix, clamped, gate_by);
  const Tensor x = numbers("x", dtype, {n, hidden}, random);
  const Tensor weights = numbers("weights", DType::kFloat32, {n, per_row}, random);
  const Tensor ids("ids", DType::kInt32, {n, per_row}, {per_row, 1}, random);
  for (int64_t i = 0; i < n * per_row; ++i) {
    ids.as<int32_t>()[i] = static_cast<int32_t>(random.between(0, count - 1));
  }
  for (const Isa isa : available_isas()) {
    std::ostringstream text;
    text << isa_name(isa) << "; " << n << " rows of " << hidden << " " << dtype_text(dtype) << ", " << per_row
         << " of " << count << " experts of " << intermediate << (is_quantised ? ", quantised" : "");
    report.describe(text.str());
    std::vector<double> expected;
    for (const int threads : {1, 3}) {
      const Problem problem(x, ids, weights, intermediate, random);
      multiply_experts(experts, problem.rows, threads, isa);
      if (expected.empty()) expected = apart(experts, problem.rows, x, ids, weights, isa, random);
      for (int64_t i = 0; i < n * hidden; ++i) {
        const double got = problem.out.get(i);
        if (got != expected[i] && !(std::isnan(got) && std::isnan(expected[i]))) {
          return report.fail("not the numbers of single products");
        }
      }
    }
  }
  ids.as<int32_t>()[random.between(0, n * per_row - 1)] = random.pick({-2, static_cast<int32_t>(count)});
  const Problem problem(x, ids, weights, intermediate, random);
  const std::string before = problem.out.bytes() + problem.products.bytes();
  try {
    multiply_experts(experts, problem.rows, 3, available_isas().back());
    report.fail("an expert that there is not was taken");
  } catch (const std::invalid_argument&) {
    if (problem.out.bytes() + problem.products.bytes() != before) report.fail("something was written");
  }
}

}  // namespace neo_desktop::testing
