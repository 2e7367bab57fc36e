#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "neo_desktop/paged_cache.h"
#include "neo_desktop/prompt_attention.h"
#include "suites.h"
#include "tensor.h"

namespace neo_desktop::testing {
namespace {

void fill(Tensor& tensor, Random& random) {
  const auto& shape = tensor.view().shape;
  for (int64_t i = 0; i < shape[0]; ++i) {
    for (int64_t h = 0; h < shape[1]; ++h) {
      for (int64_t d = 0; d < shape[2]; ++d) {
        tensor.set(tensor.at({i, h, d}), static_cast<double>(random.between(-3000, 3000)) / 1000);
      }
    }
  }
}

// Rows [first, first + count) of a tensor.
TensorView rows_of(const Tensor& tensor, int64_t first, int64_t count) {
  TensorView view = tensor.view();
  view.data = offset(view.data, view.dtype, first * view.stride(0));
  view.shape[0] = count;
  return view;
}

struct PromptProblem {
  int64_t earlier, queries, kv_heads, group, head_dim, window;
  DType dtype;
  float scale, softcap;

  explicit PromptProblem(Random& random) {
    queries = random.between(1, 60);
    earlier = random.pick<int64_t>({0, 0, random.between(0, 150), random.between(960, 1100)});
    kv_heads = random.pick<int64_t>({1, 2});
    group = random.pick<int64_t>({1, 2, 3, 7});
    head_dim = random.pick<int64_t>({8, 16, 40, 64, 80});
    window = random.pick<int64_t>({0, 0, 1, 40, 1024});
    dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
    scale = 0.3f;
    softcap = random.chance(0.2) ? 2.0f : 0.0f;
  }

  std::string text() const {
    return std::to_string(queries) + " queries after " + std::to_string(earlier) + " tokens, " +
           std::to_string(kv_heads) + " KV heads, group " + std::to_string(group) + ", head_dim " +
           std::to_string(head_dim) + ", window " + std::to_string(window) + ", " + dtype_text(dtype);
  }
};

// softmax(scale * q · K) V of one query head in double precision, with one more token with the score `sink`.
std::vector<double> reference(const PromptProblem& problem, const Tensor& q, const Tensor& k, const Tensor& v,
                              int64_t query, int64_t head, double sink) {
  const int64_t end = problem.earlier + query + 1, kv_head = head / problem.group;
  const int64_t begin = problem.window > 0 ? std::max<int64_t>(0, end - problem.window) : 0;
  std::vector<double> scores;
  double most = sink;
  for (int64_t t = begin; t < end; ++t) {
    double score = 0;
    for (int64_t d = 0; d < problem.head_dim; ++d) {
      score += q.get(q.at({query, head, d})) * k.get(k.at({t, kv_head, d}));
    }
    score *= problem.scale;
    if (problem.softcap > 0) score = problem.softcap * std::tanh(score / problem.softcap);
    scores.push_back(score);
    most = std::max(most, score);
  }
  double sum = std::exp(sink - most);
  std::vector<double> out(problem.head_dim);
  for (int64_t t = begin; t < end; ++t) {
    const double weight = std::exp(scores[t - begin] - most);
    sum += weight;
    for (int64_t d = 0; d < problem.head_dim; ++d) out[d] += weight * v.get(v.at({t, kv_head, d}));
  }
  for (double& each : out) each /= sum;
  return out;
}

}  // namespace

void test_prompts(Random& random, Report& report) {
  const PromptProblem problem(random);
  report.describe(problem.text());
  const int64_t heads = problem.kv_heads * problem.group, context = problem.earlier + problem.queries;
  const std::vector<int64_t> of_q{problem.queries, heads, problem.head_dim};
  const std::vector<int64_t> of_kv{context, problem.kv_heads, problem.head_dim};
  const auto apart = [&] { return random.between(0, 3); };
  Tensor q("q", problem.dtype, of_q, packed_strides(of_q, apart()), random);
  Tensor k("k", problem.dtype, of_kv, packed_strides(of_kv, apart()), random);
  Tensor v("v", problem.dtype, of_kv, packed_strides(of_kv, apart()), random);
  Tensor sinks("sinks", DType::kFloat32, {heads}, {1}, random);
  for (Tensor* each : {&q, &k, &v}) fill(*each, random);
  for (int64_t h = 0; h < heads; ++h) sinks.set(h, static_cast<double>(random.between(-2, 2)));
  const TensorView* sinks_view = random.chance(0.5) ? &sinks.view() : nullptr;

  for (const Isa isa : available_isas()) {
    const Tensor whole("out", problem.dtype, of_q, packed_strides(of_q), random);
    const Tensor pieces("out", problem.dtype, of_q, packed_strides(of_q), random);
    const auto attend = [&](int64_t first, int64_t count, const Tensor& out, int threads) {
      const Tensor ends("ends", DType::kInt32, {2, 2}, {2, 1}, random);
      const int64_t numbers[] = {0, count, 0, problem.earlier + first + count};
      std::copy_n(numbers, 4, ends.as<int32_t>());
      prompt_attention(
          {rows_of(q, first, count), rows_of(k, 0, numbers[3]), rows_of(v, 0, numbers[3]), ends.view(),
           rows_of(out, first, count), problem.window, sinks_view, problem.scale, problem.softcap},
          threads, isa);
    };
    attend(0, problem.queries, whole, 1);
    for (int64_t first = 0; first < problem.queries;) {
      const int64_t count = random.between(1, problem.queries - first);
      attend(first, count, pieces, random.pick({1, 2, 3}));
      first += count;
    }
    if (pieces.bytes() != whole.bytes()) report.fail(std::string("chunks have other bits, ") + isa_name(isa));
    const double allowed = problem.dtype == DType::kFloat32   ? 1e-4
                           : problem.dtype == DType::kFloat16 ? 4e-3
                                                              : 3e-2;
    const int64_t query = random.between(0, problem.queries - 1), head = random.between(0, heads - 1);
    const auto right =
        reference(problem, q, k, v, query, head, sinks_view == nullptr ? -INFINITY : sinks.get(head));
    for (int64_t d = 0; d < problem.head_dim; ++d) {
      if (!(std::abs(whole.get(whole.at({query, head, d})) - right[d]) <= allowed)) {
        report.fail(std::string("wrong answer, ") + isa_name(isa));
        break;
      }
    }
  }
}

}  // namespace neo_desktop::testing
