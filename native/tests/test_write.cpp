#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "neo_desktop/paged_attention.h"
#include "problem.h"
#include "suites.h"

namespace neo_desktop::testing {
namespace {

struct WriteProblem {
  explicit WriteProblem(Random& random);

  Cache cache;
  Tensor k;  // [n, kv_heads, head_dim]
  Tensor v;
  Tensor slots;
  int num_threads;

  int64_t slot(int64_t i) const { return slots.as<int64_t>()[i]; }
  void call(Isa isa) const {
    paged_kv_write(k.view(), v.view(), cache.k.view(), cache.v.view(), cache.k_scale_view(),
                   cache.v_scale_view(), slots.view(), num_threads, isa);
  }
};

CacheShape random_shape(Random& random) {
  const bool pairs = random.chance(0.6);
  const int64_t block_size = pairs ? 16 * random.between(1, 4) : random.between(1, 40);
  const DType dtype = random.pick(
      {DType::kFloat32, DType::kFloat16, DType::kBFloat16, pairs ? DType::kInt8 : DType::kFloat16});
  return {dtype, pairs, random.between(1, 8), random.between(1, 4), block_size, 8 * random.between(1, 32)};
}

Tensor make_rows(const char* name, int64_t n, const CacheShape& shape, Random& random) {
  const std::vector<int64_t> dims{n, shape.kv_heads, shape.head_dim};
  return {name, random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16}), dims,
          packed_strides(dims, random.pick({0, 8})), random};
}

// Numbers that are hard to round: of all sizes, half-way between two others, infinite, none at all.
double hard_number(double noise, Random& random) {
  switch (random.between(0, 15)) {
    case 0:
      return std::ldexp(noise, static_cast<int>(random.between(-150, 140)));
    case 1:
      return std::ldexp(noise, static_cast<int>(random.between(-30, 18)));
    case 2:  // a tie, or next to one, in fp16 or bf16
      return std::ldexp(1 + (2 * random.between(0, 1023) + 1) / 2048.0 + random.between(-1, 1) * 0x1p-23,
                        static_cast<int>(random.between(-15, 15)));
    case 3:
      return 1 + (2 * random.between(0, 127) + 1) / 256.0 + random.between(-1, 1) * 0x1p-23;
    case 4:
      return random.pick({0.0, -0.0, 65519.0, 65520.0, -65536.0, 0x1p-24, 0x1p-25, 0x1.8p-24, 3.3e38});
    default:
      return noise;
  }
}

void fill_rows(Tensor& rows, Random& random) {
  const std::vector<int64_t>& shape = rows.view().shape;
  for (int64_t n = 0; n < shape[0]; ++n) {
    for (int64_t head = 0; head < shape[1]; ++head) {
      const bool hard = random.chance(0.5);
      const double* noise = random.noise(shape[2]);
      for (int64_t i = 0; i < shape[2]; ++i) {
        rows.set(rows.at({n, head, i}), hard ? hard_number(noise[i], random) : noise[i]);
      }
      if (!random.chance(0.05)) continue;
      const double odd = random.pick({std::nan(""), HUGE_VAL, -HUGE_VAL});
      rows.set(rows.at({n, head, random.between(0, shape[2] - 1)}), odd);
    }
  }
}

WriteProblem::WriteProblem(Random& random)
    : cache(random_shape(random), random),
      k(make_rows("k", random.between(1, cache.shape.num_blocks * cache.shape.block_size), cache.shape,
                  random)),
      v(make_rows("v", k.view().shape[0], cache.shape, random)),
      slots("slots", DType::kInt64, {k.view().shape[0]}, {1}, random),
      num_threads(random.pick({1, 2, 4})) {
  fill_rows(k, random);
  fill_rows(v, random);
  std::vector<int64_t> all(cache.shape.num_blocks * cache.shape.block_size);
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), random.engine());
  std::copy_n(all.begin(), k.view().shape[0], slots.as<int64_t>());
}

bool same(double a, double b) { return a == b ? std::signbit(a) == std::signbit(b) : a != a && b != b; }

// How a row must lie in the cache, given its elements. `at` gives an element's place there.
template <class At>
std::string wrong_row(const Tensor& source, int64_t from, const Tensor& target, int64_t dim, At at) {
  for (int64_t i = 0; i < dim; ++i) {
    const double right = rounded_to(target.dtype(), source.get(from + i));
    const double got = target.get(at(i));
    if (same(right, got)) continue;
    std::ostringstream text;
    text.precision(17);
    text << "element " << i << " is " << got << "; expected " << right << " for " << source.get(from + i);
    return text.str();
  }
  return "";
}

template <class At>
std::string wrong_int8_row(const Tensor& source, int64_t from, const Tensor& target, double scale,
                           int64_t dim, At at) {
  double largest = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const double size = std::fabs(source.get(from + i));
    if (!std::isfinite(size)) return std::isnan(scale) ? "" : "a row that is not finite must have scale NaN";
    largest = std::max(largest, size);
  }
  if (!same(scale, static_cast<float>(largest) / 127.0f)) return "the scale is not largest / 127";
  for (int64_t i = 0; i < dim; ++i) {
    const double error = std::fabs(source.get(from + i) - scale * target.get(at(i)));
    // Half a step; where the step itself is among the smallest floats, it is rounded coarsely.
    if (error > 0.50001 * scale + 127 * 0x1p-149)
      return "element " + std::to_string(i) + " is not the nearest";
  }
  return "";
}

std::string wrong_token(const WriteProblem& problem, int64_t n) {
  const Cache& cache = problem.cache;
  const int64_t dim = cache.shape.head_dim;
  const int64_t block = problem.slot(n) / cache.shape.block_size;
  const int64_t row = problem.slot(n) % cache.shape.block_size;
  for (int64_t head = 0; head < cache.shape.kv_heads; ++head) {
    const auto k_at = [&](int64_t i) { return cache.k_at(block, head, row, i); };
    const auto v_at = [&](int64_t i) { return cache.v_at(block, head, row, i); };
    const int64_t k_from = problem.k.at({n, head, 0});
    const int64_t v_from = problem.v.at({n, head, 0});
    std::string wrong;
    if (cache.k_scale) {
      wrong = wrong_int8_row(problem.k, k_from, cache.k, cache.k_scale_of(block, head, row), dim, k_at);
      if (wrong.empty()) {
        wrong = wrong_int8_row(problem.v, v_from, cache.v, cache.v_scale_of(block, head, row), dim, v_at);
      }
    } else {
      wrong = wrong_row(problem.k, k_from, cache.k, dim, k_at);
      if (wrong.empty()) wrong = wrong_row(problem.v, v_from, cache.v, dim, v_at);
    }
    if (!wrong.empty()) return "token " + std::to_string(n) + ", head " + std::to_string(head) + ": " + wrong;
  }
  return "";
}

// All is NaN in the beginning.
void erase_slots(const WriteProblem& problem) {
  const int64_t block_size = problem.cache.shape.block_size;
  for (int64_t n = 0; n < problem.k.view().shape[0]; ++n) {
    problem.cache.erase(problem.slot(n) / block_size, problem.slot(n) % block_size);
  }
}

}  // namespace

void test_write(Random& random, Report& report) {
  const WriteProblem problem(random);
  const int64_t tokens = problem.k.view().shape[0];
  const std::string untouched = problem.cache.bytes();
  for (const Isa isa : available_isas()) {
    std::ostringstream text;
    text << isa_name(isa) << "; " << tokens << " tokens of " << dtype_text(problem.k.dtype()) << " and "
         << dtype_text(problem.v.dtype()) << " to cache " << problem.cache.text();
    report.describe(text.str());
    problem.call(isa);
    for (int64_t n = 0; n < tokens; ++n) {
      const std::string wrong = wrong_token(problem, n);
      if (wrong.empty()) continue;
      report.fail(wrong);
      break;
    }
    erase_slots(problem);
    if (problem.cache.bytes() != untouched) report.fail("more was written than the slots");
  }
  const int64_t slots = problem.cache.shape.num_blocks * problem.cache.shape.block_size;
  problem.slots.as<int64_t>()[random.between(0, tokens - 1)] =
      random.pick<int64_t>({-1, slots, slots + random.between(0, 1000), INT64_MIN, INT64_MAX});
  report.describe("a wrong slot, cache " + problem.cache.text());
  try {
    problem.call(best_isa());
    report.fail("an invalid call was not refused");
  } catch (const std::invalid_argument&) {
    if (problem.cache.bytes() != untouched) report.fail("refused, but something was written");
  }
}

}  // namespace neo_desktop::testing
