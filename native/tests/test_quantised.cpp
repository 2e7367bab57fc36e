#include <cmath>
#include <cstring>
#include <sstream>
#include <vector>

#include "neo_desktop/cpu.h"
#include "neo_desktop/operators.h"
#include "neo_desktop/quantised_pack.h"
#include "neo_desktop/row_program.h"
#include "suites.h"
#include "tensor.h"

namespace neo_desktop::testing {
namespace {

// Offsets of a block's float16 numbers; -1: no second one.
constexpr int kHalves[kStoredTypes][2] = {{0, -1}, {0, -1}, {0, 2},    {0, -1}, {0, 2},  {80, 82}, {108, -1},
                                          {0, 2},  {0, 2},  {208, -1}, {0, -1}, {0, -1}, {-1, -1}};

struct Part {
  StoredType type;
  int64_t rows;
  Tensor packed;
};

Tensor bytes_of(const char* name, int64_t count, Random& random) {
  return {name, DType::kInt8, {count}, {1}, random};
}

// Rows of random bits with finite scales, packed in pieces.
Part random_part(StoredType type, int64_t rows, int64_t columns, Random& random) {
  const int64_t row_bytes = stored_bytes(type, columns);
  const int64_t block = stored_bytes(type, stored_columns(type));
  const Tensor stored = bytes_of("stored", rows * row_bytes, random);
  auto* bytes = stored.as<uint8_t>();
  for (int64_t i = 0; i < rows * row_bytes; ++i) bytes[i] = static_cast<uint8_t>(random.between(0, 255));
  for (int64_t at = 0; at < rows * row_bytes; at += block) {
    for (const int half : kHalves[static_cast<int>(type)]) {
      if (half >= 0) bytes[at + half + 1] &= 0xbf;  // avoid the largest exponent
    }
    if (type == StoredType::kMxfp4) bytes[at] = static_cast<uint8_t>(random.between(100, 140));
  }
  Part part{type, rows, bytes_of("packed", packed_bytes(type, rows, columns), random)};
  std::memset(part.packed.as<char>(), 0, packed_bytes(type, rows, columns));
  const int64_t first = random.between(0, rows);
  auto* packed = part.packed.as<uint8_t>();
  pack_rows(type, bytes, 0, first, columns, packed, 1);
  pack_rows(type, bytes + first * row_bytes, first, rows - first, columns, packed, 3);
  return part;
}

PackedPart view_of(const Part& part, int64_t columns) {
  return {weight_type_of(part.type), part.packed.as<uint8_t>(), packed_bytes(part.type, part.rows, columns),
          part.rows};
}

void fill(Tensor& tensor, Random& random) {
  const std::vector<int64_t>& shape = tensor.view().shape;
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  for (int64_t i = 0; i < count; ++i) tensor.set(i, *random.noise(1));
}

Tensor numbers(const char* name, DType dtype, std::vector<int64_t> shape, Random& random) {
  Tensor tensor(name, dtype, shape, packed_strides(shape), random);
  fill(tensor, random);
  return tensor;
}

// A layer's weights.
struct LayerWeights {
  TensorView norm;
  PackedMatrix qkv;
  std::optional<TensorView> qk_norm;
  PackedMatrix output, gate_up, down;
};
constexpr float kEps = 1e-5f;

// The work between two layers, in separate tensors.
struct LayerProblem {
  LayerProblem(DType dtype, int64_t n, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t dim,
               int64_t intermediate, Random random)
      : residual(numbers("residual", dtype, {n, hidden}, random)),
        x(numbers("x", dtype, {n, hidden}, random)),
        qkv(numbers("qkv", dtype, {n, (heads + 2 * kv_heads) * dim}, random)),
        attention(numbers("attention", dtype, {n, heads * dim}, random)),
        cos(numbers("cos", DType::kFloat32, {n, dim}, random)),
        sin(numbers("sin", DType::kFloat32, {n, dim}, random)),
        normed(numbers("normed", dtype, {n, hidden}, random)),
        gate_up(numbers("gate_up", dtype, {n, 2 * intermediate}, random)),
        gated(numbers("gated", dtype, {n, intermediate}, random)),
        rotated(qkv.view()) {
    rotated.shape = {n, heads + kv_heads, dim};
    rotated.strides = {qkv.view().strides[0], dim, 1};
  }

  std::string results() const { return residual.bytes() + x.bytes() + qkv.bytes(); }

  // Computes it by single calls.
  void compute_apart(const LayerWeights& layer, Isa isa) const {
    const auto multiply = [&](const Tensor& from, const PackedMatrix& matrix, const Tensor& out) {
      packed_linear(from.view(), matrix.parts, matrix.bias, out.view(), 1, isa);
    };
    const auto normalise = [&] {
      add_rms_norm(x.view(), residual.view(), layer.norm, kEps, normed.view(), 1, isa);
    };
    multiply(attention, layer.output, x);
    normalise();
    multiply(normed, layer.gate_up, gate_up);
    silu_mul(gate_up.view(), gated.view(), 1, isa);
    multiply(gated, layer.down, x);
    normalise();
    multiply(normed, layer.qkv, qkv);
    rope(rotated, cos.view(), sin.view(), layer.qk_norm, kEps, 1, isa);
  }

  // Computes it in one call.
  void compute_together(const LayerWeights& layer, int threads, Isa isa) const {
    const auto width = [](const Tensor& tensor) { return tensor.view().size(1); };
    const auto given = {&residual, &x, &qkv, &attention, &cos, &sin};
    std::vector<RowBuffer> buffers;
    std::vector<TensorView> views;
    for (const Tensor* each : given) {
      buffers.push_back({width(*each), each->view().dtype, true});
      views.push_back(each->view());
    }
    for (const Tensor* each : {&normed, &gate_up, &gated}) {
      buffers.push_back({width(*each), each->view().dtype, false});
    }
    enum { kResidual, kX, kQkv, kAttention, kCos, kSin, kNormed, kGateUp, kGated };
    const auto all = [](int64_t buffer) { return RowColumns{buffer, 0, 0}; };
    std::vector<RowStep> steps;
    const auto multiply = [&](int64_t from, const PackedMatrix& matrix, int64_t out) {
      const int64_t columns = buffers[from].width, rows = buffers[out].width;
      steps.push_back({RowOp::kMultiply, {all(from)}, all(out), columns, rows, 0, {}, {matrix}});
    };
    const auto normalise = [&] {
      steps.push_back({RowOp::kAddRmsNorm,
                       {all(kResidual), all(kX)},
                       all(kNormed),
                       1,
                       width(normed),
                       kEps,
                       {layer.norm},
                       {}});
    };
    multiply(kAttention, layer.output, kX);
    normalise();
    multiply(kNormed, layer.gate_up, kGateUp);
    steps.push_back({RowOp::kSiluMul, {all(kGateUp)}, all(kGated), 1, width(gated), 0, {}, {}});
    multiply(kGated, layer.down, kX);
    normalise();
    multiply(kNormed, layer.qkv, kQkv);
    std::vector<TensorView> weights;
    if (layer.qk_norm) weights.push_back(*layer.qk_norm);
    steps.push_back({RowOp::kRope,
                     {all(kCos), all(kSin)},
                     {kQkv, 0, rotated.size(2)},
                     rotated.size(1),
                     rotated.size(2),
                     kEps,
                     weights,
                     {}});
    RowProgram(buffers, steps).run(views, threads, isa);
  }

  Tensor residual, x, qkv, attention, cos, sin, normed, gate_up, gated;
  TensorView rotated;
};

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

// Numbers of x are off by at most half of 1/127 of their block's largest.
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
        size =
            std::fmax(size, largest * 6e4 * 63 * 64 * kBlockColumns);  // size of sums before minima are added
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
    const auto type = static_cast<StoredType>(random.between(0, kStoredTypes - 1));
    parts.push_back(random_part(type, random.between(1, 50), columns, random));
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
  std::vector<PackedPart> views;
  std::ostringstream text;
  text << count << " rows of " << columns << " " << dtype_text(dtype) << " times";
  for (const Part& part : parts) {
    views.push_back(view_of(part, columns));
    text << " " << part.rows << " of stored type " << static_cast<int>(part.type);
  }
  std::string first;
  for (const Isa isa : available_isas()) {
    for (const int threads : {1, 3}) {
      report.describe(isa_name(isa) + ("; " + text.str()));
      const Tensor out("out", dtype, {count, rows}, {rows, 1}, random);
      packed_linear(x.view(), views, std::nullopt, out.view(), threads, isa);
      if (first.empty()) {
        first = out.bytes();
        const std::string wrong = wrong_product(x, weights, out);
        if (!wrong.empty()) report.fail(wrong);
      }
      if (out.bytes() != first) report.fail("not the same bits as those of the first instruction set");
    }
  }
}

void test_quantised_layer(Random& random, Report& report) {
  const DType dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  const int64_t n = random.chance(0.9) ? random.between(1, 20) : random.between(1000, 1100), hidden = 256,
                intermediate = 256, dim = 32;
  const int64_t heads = 8, kv_heads = random.pick({1, 2, 4});
  std::vector<Part> parts;
  const auto matrix = [&](int64_t rows) {
    const auto type = static_cast<StoredType>(random.between(0, kStoredTypes - 1));
    parts.push_back(random_part(type, rows, 256, random));
    return PackedMatrix{{view_of(parts.back(), 256)}, std::nullopt};
  };
  const Tensor norm = numbers("norm", dtype, {hidden}, random);
  const Tensor qk_norm = numbers("qk_norm", dtype, {heads + kv_heads, dim}, random);
  const Tensor bias = numbers("bias", dtype, {(heads + 2 * kv_heads) * dim}, random);
  LayerWeights layer{norm.view(),
                     matrix((heads + 2 * kv_heads) * dim),
                     std::nullopt,
                     matrix(hidden),
                     matrix(2 * intermediate),
                     matrix(hidden)};
  if (random.chance(0.5)) layer.qk_norm = qk_norm.view();
  if (random.chance(0.5)) layer.qkv.bias = bias.view();
  const Random same = random;
  for (const Isa isa : available_isas()) {
    report.describe(std::string(isa_name(isa)) + "; " + std::to_string(n) + " rows of " + dtype_text(dtype));
    const LayerProblem apart(dtype, n, hidden, heads, kv_heads, dim, intermediate, same);
    apart.compute_apart(layer, isa);
    for (const int threads : {1, 3}) {
      const LayerProblem together(dtype, n, hidden, heads, kv_heads, dim, intermediate, same);
      together.compute_together(layer, threads, isa);
      if (together.results() != apart.results()) report.fail("not the bits of single calls");
    }
  }
}

void test_dense(Random& random, Report& report) {
  const DType dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  const int64_t columns = 2 * random.between(1, 60), rows = random.between(1, 50);
  const int64_t count = random.between(1, 20), tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t width = dtype == DType::kBFloat16 ? 2 : 1;
  const Tensor packed = numbers("packed", dtype, {tiles, columns / width, kTileRows, width}, random);
  const Tensor x = numbers("x", dtype, {count, columns}, random);
  const PackedPart part{dense_type(dtype), packed.as<uint8_t>(), static_cast<int64_t>(packed.bytes().size()),
                        rows};
  const double eps = dtype == DType::kFloat32 ? 0x1p-23 : dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
  for (const Isa isa : available_isas()) {
    std::ostringstream text;
    text << isa_name(isa) << "; " << count << " rows of " << columns << " " << dtype_text(dtype) << " times "
         << rows;
    report.describe(text.str());
    const Tensor out("out", dtype, {count, rows}, {rows, 1}, random);
    packed_linear(x.view(), {part}, std::nullopt, out.view(), 1, isa);
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t row = 0; row < rows; ++row) {
        double exact = 0, magnitude = 0;
        for (int64_t i = 0; i < columns; ++i) {
          const double product =
              x.get(x.at({n, i})) *
              packed.get(packed.at({row / kTileRows, i / width, row % kTileRows, i % width}));
          exact += product;
          magnitude += std::fabs(product);
        }
        const double allowed =
            static_cast<double>(columns + 2) * 0x1p-23 * magnitude + eps * std::fabs(exact) + 1e-30;
        if (std::fabs(out.get(out.at({n, row})) - exact) > allowed) report.fail("a product is wrong");
      }
    }
    const Tensor again("out", dtype, {count, rows}, {rows, 1}, random);
    packed_linear(x.view(), {part}, std::nullopt, again.view(), 3, isa);
    if (again.bytes() != out.bytes()) report.fail("not the same bits with more threads");
  }
}

}  // namespace neo_desktop::testing
