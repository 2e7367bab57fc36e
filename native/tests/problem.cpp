#include "problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "neo_desktop/paged_attention.h"

namespace neo_desktop::testing {
namespace {

constexpr int64_t kMostProducts = 1 << 20;  // of a problem, about: multiplications of queries and keys
constexpr int64_t kLongest = 3000;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

DType random_float(Random& random) {
  return random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
}

}  // namespace

// Numbers of a decode problem, before any memory is allocated.
struct DecodePlan {
  CacheShape cache;
  int64_t block_tokens;
  int64_t batch;
  int64_t heads;
  std::vector<int64_t> lens;
  int64_t max_blocks;

  explicit DecodePlan(Random& random) {
    cache.pairs = random.chance(0.7);
    cache.dtype = cache.pairs && random.chance(0.3) ? DType::kInt8 : random_float(random);
    cache.kv_heads = random.between(1, 4);
    heads = cache.kv_heads * random.pick({1, 2, 3, 4, 5, 7, 8, 12});
    cache.head_dim = 8 * random.pick({1, 2, 3, 5, 8, 9, 10, 12, 16, 16, 20, 32});
    block_tokens = cache.pairs ? 16 * random.pick({1, 1, 2, 3, 4, 8}) : random.pick({1, 3, 16, 17, 32, 100});
    const int64_t blocks_per_page = random.pick({1, 1, 2, 4, 4, 5});
    cache.page_tokens = block_tokens * blocks_per_page;
    batch = random.between(1, 4);
    const int64_t longest =
        std::clamp<int64_t>(kMostProducts / (batch * heads * cache.head_dim), 1, kLongest);
    int64_t blocks = 0;
    max_blocks = random.between(1, 2);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t up_to = random.chance(0.5) ? std::min<int64_t>(longest, 70) : longest;
      lens.push_back(random.between(1, up_to));
      const int64_t needed = divide_up(lens.back(), block_tokens);
      blocks += needed;
      max_blocks = std::max(max_blocks, needed + random.between(0, 1));
    }
    cache.num_pages = divide_up(blocks + random.between(0, 2), blocks_per_page);
  }
};

namespace {

// Strides of pages and heads, `piece` elements per page and head are contiguous.
std::pair<int64_t, int64_t> page_and_head_strides(const CacheShape& shape, int64_t piece, Random& random) {
  const int64_t gap = random.chance(0.3) ? 8 : 0;
  if (random.chance(0.3)) return {piece, shape.num_pages * piece + gap};
  return {shape.kv_heads * (piece + gap), piece + gap};
}

Tensor make_rows(const char* name, const CacheShape& shape, Random& random) {
  const auto [page, head] = page_and_head_strides(shape, shape.page_tokens * shape.head_dim, random);
  return {name,
          shape.dtype,
          {shape.num_pages, shape.kv_heads, shape.page_tokens, shape.head_dim},
          {page, head, shape.head_dim, 1},
          random};
}

Tensor make_k(const CacheShape& shape, Random& random) {
  if (!shape.pairs) return make_rows("k_cache", shape, random);
  const auto [page, head] = page_and_head_strides(shape, shape.page_tokens * shape.head_dim, random);
  return {"k_cache",
          shape.dtype,
          {shape.num_pages, shape.kv_heads, shape.page_tokens, shape.head_dim / 2, 2},
          {page, head, 2, 2 * shape.page_tokens, 1},
          random};
}

std::optional<Tensor> make_scale(const char* name, const CacheShape& shape, Random& random) {
  if (shape.dtype != DType::kInt8) return std::nullopt;
  // Both scales must have the same strides, so these are not drawn.
  return Tensor(name, DType::kFloat32, {shape.num_pages, shape.kv_heads, shape.page_tokens},
                {shape.kv_heads * shape.page_tokens, shape.page_tokens, 1}, random);
}

Kind random_kind(DType dtype, Random& random) {
  if (random.chance(0.5)) return Kind::kOrdinary;
  const Kind kind = random.pick(
      {Kind::kLargeLogits, Kind::kEqualLogits, Kind::kOneDominates, Kind::kDenormals, Kind::kNotANumber});
  return kind == Kind::kDenormals && dtype != DType::kFloat16 ? Kind::kOrdinary : kind;
}

float random_scale(Kind kind, int64_t head_dim, Random& random) {
  const double usual = 1 / std::sqrt(head_dim);
  if (kind == Kind::kLargeLogits) return static_cast<float>(random.pick({50, -50}) * usual);
  if (kind == Kind::kDenormals) return static_cast<float>(0x1p30 * usual);
  return static_cast<float>(random.pick({1.0, 1.0, 0.3, -1.0, 0.0}) * usual);
}

// None, short, any, or slightly more than the tokens that one thread processes at once.
int64_t random_window(Random& random) {
  if (random.chance(0.7)) return 0;
  return random.pick({random.between(1, 20), random.between(1, 2000), 1024 + random.between(1, 20)});
}

// Writes one token's key and value of one head.
class RowFiller {
 public:
  RowFiller(DecodeProblem& problem, Random& random)
      : cache_(problem.cache), kind_(problem.kind), random_(random) {
    size_ = kind_ == Kind::kDenormals ? 0x1p-15 : 1;
    value_shift_ = random.pick({0.0, 0.0, 1.0}) * size_;
  }

  void fill(int64_t slot, int64_t head) {
    const int64_t dim = cache_.shape.head_dim;
    const bool quantised = cache_.shape.dtype == DType::kInt8;
    const double* key = random_.noise(dim);
    if (kind_ == Kind::kEqualLogits) {
      key = equal_key_ = equal_key_ != nullptr ? equal_key_ : key;
    }
    const double* value = random_.noise(dim);
    const double steps = quantised ? 32 : 1;  // per unit
    for (int64_t i = 0; i < dim; ++i) {
      cache_.k.set(cache_.k_at(slot, head, i), limited(steps * size_ * key[i]));
      cache_.v.set(cache_.v_at(slot, head, i), limited(steps * (size_ * value[i] + value_shift_)));
    }
    if (quantised) {
      const int64_t share = kind_ == Kind::kEqualLogits ? 50 : random_.between(25, 75);
      cache_.k_scale->set(cache_.scale_at(slot, head), share / (50 * steps));
      cache_.v_scale->set(cache_.scale_at(slot, head), random_.between(1, 100) / (50 * steps));
    }
  }

 private:
  double limited(double value) const {
    if (cache_.shape.dtype != DType::kInt8) return value;
    return std::clamp(std::nearbyint(value), -128.0, 127.0);
  }

  Cache& cache_;
  Kind kind_;
  Random& random_;
  double size_;
  double value_shift_;
  const double* equal_key_ = nullptr;
};

// All blocks in random order: one by one, or page by page, those of a page in order when taken from the back.
std::vector<int64_t> shuffled_blocks(const DecodeProblem& problem, Random& random) {
  const int64_t together = random.chance(0.5) ? 1 : problem.cache.shape.page_tokens / problem.block_tokens;
  std::vector<int64_t> firsts;
  for (int64_t block = 0; block < problem.num_blocks(); block += together) firsts.push_back(block);
  std::shuffle(firsts.begin(), firsts.end(), random.engine());
  std::vector<int64_t> blocks;
  for (const int64_t first : firsts) {
    for (int64_t i = together; i-- > 0;) blocks.push_back(first + i);
  }
  return blocks;
}

void fill_queries(DecodeProblem& problem, Random& random) {
  const double size = problem.kind == Kind::kDenormals ? 0x1p-15 : 1;
  for (int64_t b = 0; b < problem.batch(); ++b) {
    for (int64_t h = 0; h < problem.heads(); ++h) {
      const double* noise = random.noise(problem.cache.shape.head_dim);
      for (int64_t i = 0; i < problem.cache.shape.head_dim; ++i) {
        problem.q.set(problem.q.at({b, h, i}), size * noise[i]);
      }
    }
  }
}

// Makes one attended token per request point along a query of its head.
void add_dominant_tokens(DecodeProblem& problem, Random& random) {
  Cache& cache = problem.cache;
  const int64_t group = problem.heads() / cache.shape.kv_heads;
  const double longer = cache.shape.dtype == DType::kInt8 ? 100 : 20;
  for (int64_t b = 0; b < problem.batch(); ++b) {
    const int64_t token = random.between(problem.first_token(b), problem.context_len(b) - 1);
    const int64_t slot = problem.slot(b, token);
    for (int64_t head = 0; head < cache.shape.kv_heads; ++head) {
      for (int64_t i = 0; i < cache.shape.head_dim; ++i) {
        const double along = longer * problem.q.get(problem.q.at({b, head * group, i}));
        cache.k.set(cache.k_at(slot, head, i), std::clamp(std::nearbyint(along), -128.0, 127.0));
      }
    }
  }
}

void add_not_a_number(DecodeProblem& problem, Random& random) {
  Cache& cache = problem.cache;
  const double nan = std::nan("");
  const int64_t b = random.between(0, problem.batch() - 1);
  const int64_t i = random.between(0, cache.shape.head_dim - 1);
  if (random.chance(0.3))
    return problem.q.set(problem.q.at({b, random.between(0, problem.heads() - 1), i}), nan);
  const int64_t token = random.between(problem.first_token(b), problem.context_len(b) - 1);
  const int64_t slot = problem.slot(b, token);
  const int64_t head = random.between(0, cache.shape.kv_heads - 1);
  const bool key = random.chance(0.5);
  if (cache.shape.dtype == DType::kInt8) {
    Tensor& scale = key ? *cache.k_scale : *cache.v_scale;
    scale.set(cache.scale_at(slot, head), nan);
  } else if (key) {
    cache.k.set(cache.k_at(slot, head, i), nan);
  } else {
    cache.v.set(cache.v_at(slot, head, i), nan);
  }
}

}  // namespace

Cache::Cache(const CacheShape& shape, Random& random)
    : shape(shape),
      k(make_k(shape, random)),
      v(make_rows("v_cache", shape, random)),
      k_scale(make_scale("k_scale", shape, random)),
      v_scale(make_scale("v_scale", shape, random)) {}

int64_t Cache::k_at(int64_t slot, int64_t head, int64_t i) const {
  const int64_t page = slot / shape.page_tokens;
  const int64_t row = slot % shape.page_tokens;
  return shape.pairs ? k.at({page, head, row, i / 2, i % 2}) : k.at({page, head, row, i});
}

int64_t Cache::v_at(int64_t slot, int64_t head, int64_t i) const {
  return v.at({slot / shape.page_tokens, head, slot % shape.page_tokens, i});
}

int64_t Cache::scale_at(int64_t slot, int64_t head) const {
  return k_scale->at({slot / shape.page_tokens, head, slot % shape.page_tokens});
}

double Cache::scale_of(const std::optional<Tensor>& scale, int64_t slot, int64_t head) const {
  return scale ? scale->get(scale_at(slot, head)) : 1;
}

void Cache::erase(int64_t slot) const {
  const int64_t size = size_of(shape.dtype);
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    for (int64_t i = 0; i < shape.head_dim; ++i) {
      std::memset(k.as<char>() + k_at(slot, head, i) * size, 0xff, size);
      std::memset(v.as<char>() + v_at(slot, head, i) * size, 0xff, size);
    }
    if (!k_scale) continue;
    std::memset(k_scale->as<float>() + scale_at(slot, head), 0xff, sizeof(float));
    std::memset(v_scale->as<float>() + scale_at(slot, head), 0xff, sizeof(float));
  }
}

std::string Cache::bytes() const {
  std::string bytes = k.bytes() + v.bytes();
  if (k_scale) bytes += k_scale->bytes() + v_scale->bytes();
  return bytes;
}

std::string Cache::text() const {
  std::ostringstream text;
  text << dtype_text(shape.dtype) << (shape.pairs ? " pairs" : " rows") << ", " << shape.num_pages
       << " pages of " << shape.page_tokens << ", " << shape.kv_heads << " KV heads of " << shape.head_dim;
  return text.str();
}

DecodeProblem::DecodeProblem(Random& random, bool filled)
    : DecodeProblem(DecodePlan(random), random, filled) {}

DecodeProblem::DecodeProblem(const DecodePlan& plan, Random& random, bool filled)
    : kind(filled ? Kind::kOrdinary : random_kind(plan.cache.dtype, random)),
      block_tokens(plan.block_tokens),
      default_block_size(block_tokens == plan.cache.page_tokens && random.chance(0.5)),
      cache(plan.cache, random),
      q("q", random_float(random), {plan.batch, plan.heads, plan.cache.head_dim},
        packed_strides({plan.batch, plan.heads, plan.cache.head_dim}, random.pick({0, 8})), random),
      out("out", random_float(random), {plan.batch, plan.heads, plan.cache.head_dim},
          packed_strides({plan.batch, plan.heads, plan.cache.head_dim}, random.pick({0, 3})), random),
      block_tables("block_tables", DType::kInt32, {plan.batch, plan.max_blocks},
                   packed_strides({plan.batch, plan.max_blocks}, random.pick({0, 1})), random),
      context_lens("context_lens", DType::kInt32, {plan.batch}, {1}, random),
      scale(random_scale(kind, plan.cache.head_dim, random)),
      softcap(random.chance(0.3) ? random.pick({0.5f, 5.0f, 50.0f}) : 0.0f),
      window(random_window(random)),
      num_threads(random.pick({1, 2, 3, 8})) {
  const CacheShape& shape = plan.cache;
  std::vector<int64_t> free_blocks = shuffled_blocks(*this, random);
  RowFiller filler(*this, random);
  for (int64_t b = 0; b < plan.batch; ++b) {
    context_lens.set(b, plan.lens[b]);
    const int64_t first = first_token(b);
    for (int64_t i = 0; i < plan.max_blocks; ++i) {
      const bool attended = i >= first / block_tokens && i * block_tokens < plan.lens[b];
      int64_t block = random.pick<int64_t>({-1, num_blocks(), INT32_MIN, INT32_MAX});  // never read
      if (attended) {
        block = free_blocks.back();
        free_blocks.pop_back();
      } else if (filled) {
        block = random.between(0, num_blocks() - 1);
      }
      block_tables.set(block_tables.at({b, i}), static_cast<double>(block));
    }
    if (filled) continue;
    for (int64_t token = first; token < plan.lens[b]; ++token) {
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        filler.fill(slot(b, token), head);
      }
    }
  }
  for (int64_t slot = 0; filled && slot < shape.num_slots(); ++slot) {
    for (int64_t head = 0; head < shape.kv_heads; ++head) filler.fill(slot, head);
  }
  fill_queries(*this, random);
  const bool far_scores = kind == Kind::kLargeLogits || kind == Kind::kOneDominates;
  if (!far_scores && random.chance(0.3)) {
    sinks.emplace("sinks", DType::kFloat32, std::vector<int64_t>{plan.heads}, std::vector<int64_t>{1},
                  random);
    // About as large as scores, far below, or far above; but not so far above that fp32 loses the remaining
    // weights.
    for (int64_t h = 0; h < plan.heads; ++h) {
      sinks->set(h, std::clamp(random.pick({1, 1, 40}) * *random.noise(1), -60.0, 60.0));
    }
  }
  if (kind == Kind::kOneDominates) add_dominant_tokens(*this, random);
  if (kind == Kind::kNotANumber) add_not_a_number(*this, random);
  if (kind == Kind::kOrdinary && random.chance(0.5)) write_new_rows(random);
}

// paged_kv_write first writes the rows that decode is to write: they are the input of the reference.
void DecodeProblem::write_new_rows(Random& random) {
  const std::vector<int64_t> shape{batch(), cache.shape.kv_heads, cache.shape.head_dim};
  const DType dtype = random_float(random);
  new_k.emplace("k", dtype, shape, packed_strides(shape, random.pick({0, 8})), random);
  new_v.emplace("v", dtype, shape, packed_strides(shape, random.pick({0, 8})), random);
  Tensor slots("slots", DType::kInt64, {batch()}, {1}, random);
  for (int64_t b = 0; b < batch(); ++b) {
    slots.as<int64_t>()[b] = slot(b, context_len(b) - 1);
    for (int64_t head = 0; head < cache.shape.kv_heads; ++head) {
      const double* key = random.noise(cache.shape.head_dim);
      const double* value = random.noise(cache.shape.head_dim);
      for (int64_t i = 0; i < cache.shape.head_dim; ++i) {
        new_k->set(new_k->at({b, head, i}), key[i]);
        new_v->set(new_v->at({b, head, i}), value[i]);
      }
    }
  }
  paged_kv_write(new_k->view(), new_v->view(), cache.k.view(), cache.v.view(), cache.k_scale_view(),
                 cache.v_scale_view(), slots.view(), 1, Isa::kScalar);
}

void DecodeProblem::erase_new_tokens() const {
  if (!new_k) return;
  for (int64_t b = 0; b < batch(); ++b) cache.erase(slot(b, context_len(b) - 1));
}

int64_t DecodeProblem::first_token(int64_t b) const {
  return window > 0 ? std::max<int64_t>(0, context_len(b) - window) : 0;
}

DecodeArguments DecodeProblem::arguments() const {
  std::optional<NewRows> new_rows;
  if (new_k) new_rows = NewRows{new_k->view(), new_v->view()};
  return {q.view(),
          out.view(),
          block_tables.view(),
          context_lens.view(),
          new_rows,
          default_block_size ? 0 : block_tokens,
          scale,
          softcap};
}

void DecodeProblem::call(Isa isa, int threads) const {
  paged_attention_decode(arguments(), cache.k.view(), cache.v.view(), cache.k_scale_view(),
                         cache.v_scale_view(), window, sinks_view(), threads, isa);
}

std::string DecodeProblem::text() const {
  static const char* const kKinds[] = {"ordinary",      "large logits", "equal logits",
                                       "one dominates", "denormals",    "not a number"};
  std::ostringstream text;
  text << kKinds[static_cast<int>(kind)] << "; cache " << cache.text() << "; blocks of " << block_tokens
       << "; q " << dtype_text(q.dtype()) << " " << to_string(q.view().shape) << (new_k ? ", new rows" : "")
       << (sinks ? ", sinks" : "") << ", out " << dtype_text(out.dtype()) << "; lengths";
  for (int64_t b = 0; b < batch(); ++b) text << " " << context_len(b);
  text << "; window " << window << ", scale " << scale << ", softcap " << softcap << ", " << num_threads
       << " threads";
  return text.str();
}

}  // namespace neo_desktop::testing
