#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "neo_desktop/paged_attention.h"
#include "problem.h"
#include "suites.h"

namespace neo_desktop::testing {
namespace {

// Rows, and distinct slots of a cache, to write or to read.
struct RowsProblem {
  explicit RowsProblem(Random& random);

  Cache cache;
  Tensor k;  // [n, kv_heads, head_dim]
  Tensor v;
  Tensor slots;
  int num_threads;

  int64_t tokens() const { return k.view().shape[0]; }
  int64_t slot(int64_t i) const { return slots.as<int64_t>()[i]; }
  std::string text() const;
  void write(Isa isa) const {
    paged_kv_write(k.view(), v.view(), cache.k.view(), cache.v.view(), cache.k_scale_view(),
                   cache.v_scale_view(), slots.view(), num_threads, isa);
  }
  void read(Isa isa) const {
    paged_kv_read(cache.k.view(), cache.v.view(), cache.k_scale_view(), cache.v_scale_view(), slots.view(),
                  k.view(), v.view(), num_threads, isa);
  }
};

CacheShape random_shape(Random& random) {
  const bool pairs = random.chance(0.6);
  const int64_t page_tokens = pairs ? 16 * random.between(1, 8) : random.between(1, 100);
  const DType dtype = random.pick(
      {DType::kFloat32, DType::kFloat16, DType::kBFloat16, pairs ? DType::kInt8 : DType::kFloat16});
  return {dtype, pairs, random.between(1, 8), random.between(1, 4), page_tokens, 8 * random.between(1, 32)};
}

Tensor make_rows(const char* name, int64_t n, const CacheShape& shape, Random& random) {
  const std::vector<int64_t> dims{n, shape.kv_heads, shape.head_dim};
  return {name, random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16}), dims,
          packed_strides(dims, random.pick({0, 8})), random};
}

// Numbers that are hard to round: any magnitude, ties, infinities, NaN.
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

// Some slots of the cache: adjacent, scattered, or a mixture.
std::vector<int64_t> random_slots(int64_t count, int64_t slots, Random& random) {
  const int64_t together = random.pick<int64_t>({1, 5, 16, 64, 100, slots});
  std::vector<int64_t> firsts;
  for (int64_t first = 0; first < slots; first += together) firsts.push_back(first);
  std::shuffle(firsts.begin(), firsts.end(), random.engine());
  std::vector<int64_t> chosen;
  for (const int64_t first : firsts) {
    for (int64_t slot = first; slot < std::min(first + together, slots); ++slot) chosen.push_back(slot);
  }
  chosen.resize(count);
  return chosen;
}

RowsProblem::RowsProblem(Random& random)
    : cache(random_shape(random), random),
      k(make_rows("k", random.between(1, cache.shape.num_slots()), cache.shape, random)),
      v(make_rows("v", tokens(), cache.shape, random)),
      slots("slots", DType::kInt64, {tokens()}, {1}, random),
      num_threads(random.pick({1, 2, 4})) {
  fill_rows(k, random);
  fill_rows(v, random);
  const std::vector<int64_t> chosen = random_slots(tokens(), cache.shape.num_slots(), random);
  std::copy(chosen.begin(), chosen.end(), slots.as<int64_t>());
}

std::string RowsProblem::text() const {
  std::ostringstream text;
  text << tokens() << " tokens of " << dtype_text(k.dtype()) << " and " << dtype_text(v.dtype()) << ", cache "
       << cache.text();
  return text.str();
}

bool same(double a, double b) { return a == b ? std::signbit(a) == std::signbit(b) : a != a && b != b; }

// Checks a row in the cache against its elements. `at` gives an element's index in the cache.
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
    // Half a step; if the step itself is among the smallest floats, its own rounding is coarse.
    if (error > 0.50001 * scale + 127 * 0x1p-149)
      return "element " + std::to_string(i) + " is not the nearest";
  }
  return "";
}

std::string wrong_written(const RowsProblem& problem, int64_t n) {
  const Cache& cache = problem.cache;
  const int64_t dim = cache.shape.head_dim;
  const int64_t slot = problem.slot(n);
  for (int64_t head = 0; head < cache.shape.kv_heads; ++head) {
    const auto k_at = [&](int64_t i) { return cache.k_at(slot, head, i); };
    const auto v_at = [&](int64_t i) { return cache.v_at(slot, head, i); };
    const int64_t k_from = problem.k.at({n, head, 0});
    const int64_t v_from = problem.v.at({n, head, 0});
    std::string wrong;
    if (cache.k_scale) {
      wrong =
          wrong_int8_row(problem.k, k_from, cache.k, cache.scale_of(cache.k_scale, slot, head), dim, k_at);
      if (wrong.empty()) {
        wrong =
            wrong_int8_row(problem.v, v_from, cache.v, cache.scale_of(cache.v_scale, slot, head), dim, v_at);
      }
    } else {
      wrong = wrong_row(problem.k, k_from, cache.k, dim, k_at);
      if (wrong.empty()) wrong = wrong_row(problem.v, v_from, cache.v, dim, v_at);
    }
    if (!wrong.empty()) return "token " + std::to_string(n) + ", head " + std::to_string(head) + ": " + wrong;
  }
  return "";
}

// Checks a row against its content in the cache.
template <class At>
std::string wrong_row_read(const Tensor& target, int64_t to, const Tensor& source, float scale, int64_t dim,
                           At at) {
  for (int64_t i = 0; i < dim; ++i) {
    // The product of an element and its scale is rounded to fp32, and then to the row's dtype.
    const double stored = static_cast<float>(source.get(at(i))) * scale;
    const double right = rounded_to(target.dtype(), stored);
    const double got = target.get(to + i);
    if (same(right, got)) continue;
    std::ostringstream text;
    text.precision(17);
    text << "element " << i << " is " << got << "; expected " << right << " for " << stored;
    return text.str();
  }
  return "";
}

std::string wrong_read(const RowsProblem& problem, int64_t n) {
  const Cache& cache = problem.cache;
  const int64_t slot = problem.slot(n);
  for (int64_t head = 0; head < cache.shape.kv_heads; ++head) {
    std::string wrong =
        wrong_row_read(problem.k, problem.k.at({n, head, 0}), cache.k,
                       static_cast<float>(cache.scale_of(cache.k_scale, slot, head)), cache.shape.head_dim,
                       [&](int64_t i) { return cache.k_at(slot, head, i); });
    if (wrong.empty()) {
      wrong = wrong_row_read(problem.v, problem.v.at({n, head, 0}), cache.v,
                             static_cast<float>(cache.scale_of(cache.v_scale, slot, head)),
                             cache.shape.head_dim, [&](int64_t i) { return cache.v_at(slot, head, i); });
    }
    if (!wrong.empty()) return "token " + std::to_string(n) + ", head " + std::to_string(head) + ": " + wrong;
  }
  return "";
}

// Sets the whole cache to NaN.
void erase_slots(const RowsProblem& problem) {
  for (int64_t n = 0; n < problem.tokens(); ++n) problem.cache.erase(problem.slot(n));
}

void erase_rows(const Tensor& rows) {
  const std::vector<int64_t>& shape = rows.view().shape;
  const int64_t size = size_of(rows.dtype());
  for (int64_t n = 0; n < shape[0]; ++n) {
    for (int64_t head = 0; head < shape[1]; ++head) {
      std::memset(rows.as<char>() + rows.at({n, head, 0}) * size, 0xff, shape[2] * size);
    }
  }
}

// Makes one slot invalid.
void spoil_slot(const RowsProblem& problem, Random& random) {
  const int64_t slots = problem.cache.shape.num_slots();
  problem.slots.as<int64_t>()[random.between(0, problem.tokens() - 1)] =
      random.pick<int64_t>({-1, slots, slots + random.between(0, 1000), INT64_MIN, INT64_MAX});
}

}  // namespace

void test_write(Random& random, Report& report) {
  const RowsProblem problem(random);
  const std::string untouched = problem.cache.bytes();
  for (const Isa isa : available_isas()) {
    report.describe(isa_name(isa) + ("; " + problem.text()));
    problem.write(isa);
    for (int64_t n = 0; n < problem.tokens(); ++n) {
      const std::string wrong = wrong_written(problem, n);
      if (wrong.empty()) continue;
      report.fail(wrong);
      break;
    }
    erase_slots(problem);
    if (problem.cache.bytes() != untouched) report.fail("more was written than the slots");
  }
  spoil_slot(problem, random);
  report.describe("a wrong slot, " + problem.text());
  try {
    problem.write(best_isa());
    report.fail("an invalid call was not refused");
  } catch (const std::invalid_argument&) {
    if (problem.cache.bytes() != untouched) report.fail("refused, but something was written");
  }
}

void test_read(Random& random, Report& report) {
  const RowsProblem problem(random);
  problem.write(Isa::kScalar);
  const std::string cache = problem.cache.bytes();
  erase_rows(problem.k);
  erase_rows(problem.v);
  const std::string untouched = problem.k.bytes() + problem.v.bytes();
  // Slots to read may repeat; slots to write may not.
  for (int64_t n = random.between(0, problem.tokens()); n < problem.tokens(); ++n) {
    problem.slots.as<int64_t>()[n] = problem.slot(random.between(0, n));
  }
  for (const Isa isa : available_isas()) {
    report.describe(isa_name(isa) + ("; " + problem.text()));
    problem.read(isa);
    for (int64_t n = 0; n < problem.tokens(); ++n) {
      const std::string wrong = wrong_read(problem, n);
      if (wrong.empty()) continue;
      report.fail(wrong);
      break;
    }
    erase_rows(problem.k);
    erase_rows(problem.v);
    if (problem.k.bytes() + problem.v.bytes() != untouched) report.fail("more was written than the rows");
  }
  spoil_slot(problem, random);
  report.describe("a wrong slot, " + problem.text());
  try {
    problem.read(best_isa());
    report.fail("an invalid call was not refused");
  } catch (const std::invalid_argument&) {
    if (problem.k.bytes() + problem.v.bytes() != untouched) report.fail("refused, but something was written");
  }
  if (problem.cache.bytes() != cache) report.fail("reading changed the cache");
}

}  // namespace neo_desktop::testing
