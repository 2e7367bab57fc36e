#include "answer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace neo_desktop::testing {
namespace {

// Keys and values of one request and KV head.
struct Rows {
  int64_t tokens;
  std::vector<double> keys;    // [tokens, head_dim]
  std::vector<double> values;  // [tokens, head_dim]
};

Rows attended_rows(const DecodeProblem& problem, int64_t b, int64_t head) {
  const Cache& cache = problem.cache;
  const int64_t dim = cache.shape.head_dim;
  const int64_t first = problem.first_token(b);
  Rows rows{problem.context_len(b) - first, {}, {}};
  rows.keys.resize(rows.tokens * dim);
  rows.values.resize(rows.tokens * dim);
  for (int64_t t = 0; t < rows.tokens; ++t) {
    const int64_t slot = problem.slot(b, first + t);
    const double k_scale = cache.scale_of(cache.k_scale, slot, head);
    const double v_scale = cache.scale_of(cache.v_scale, slot, head);
    const int64_t k = cache.k_at(slot, head, 0);
    const int64_t k_pair = cache.k_at(slot, head, 2) - k;
    const int64_t v = cache.v_at(slot, head, 0);
    for (int64_t i = 0; i < dim; ++i) {
      rows.keys[t * dim + i] = k_scale * cache.k.get(k + i / 2 * k_pair + i % 2);
      rows.values[t * dim + i] = v_scale * cache.v.get(v + i);
    }
  }
  return rows;
}

// Computes attention of one query, [dim], into `out`, [dim], and the possible rounding error. A sink of
// -infinity means no sink, a cap of 0 no cap.
RowError attend(const std::vector<double>& query, const Rows& rows, double scale, double cap, double sink,
                double* out) {
  const auto dim = static_cast<int64_t>(query.size());
  std::vector<double> weights(rows.tokens);
  double max = sink;
  double terms = 0;  // the largest sum of |query * key|
  double off = 0;    // largest error of a score by the kernels' tanh, with relative errors below 4e-7
  for (int64_t t = 0; t < rows.tokens; ++t) {
    double score = 0;
    double sum = 0;
    for (int64_t i = 0; i < dim; ++i) {
      const double term = query[i] * rows.keys[t * dim + i];
      score += term;
      sum += std::fabs(term);
    }
    weights[t] = score * scale;
    if (cap > 0) {
      weights[t] = cap * std::tanh(weights[t] / cap) + 0 * weights[t];
      off = std::max(off, 4e-7 * std::fabs(weights[t]));
    }
    max = std::max(max, weights[t]);
    terms = std::max(terms, sum);
  }
  double total = 0;
  for (double& weight : weights) total += weight = std::exp(weight - max);
  if (std::isfinite(sink)) total += std::exp(sink - max);
  // The row of an absent request keeps its initial content: NaN.
  std::fill(out, out + dim, rows.tokens > 0 ? 0.0 : std::numeric_limits<double>::quiet_NaN());
  double squares = 0;
  for (int64_t i = 0; i < dim; ++i) {
    double sum = 0;
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const double term = weights[t] / total * rows.values[t * dim + i];
      out[i] += term;
      sum += std::fabs(term);
    }
    if (std::isfinite(sum)) squares += sum * sum;
  }
  constexpr double kRounding = 0x1p-24;
  return {8 * kRounding * terms * std::fabs(scale) + 2 * off, 16 * kRounding * std::sqrt(squares)};
}

// The allowed error of a row of results, relative to its norm: the error of storing it, and at least the
// error of the sums in fp32.
double tolerance(const DecodeProblem& problem) {
  switch (problem.out.dtype()) {
    case DType::kBFloat16:
      return 5e-3;
    case DType::kFloat16:
      return 1e-3;
    default:
      return 1e-5;
  }
}

}  // namespace

Answer right_answer(const DecodeProblem& problem) {
  const int64_t dim = problem.cache.shape.head_dim;
  const int64_t group = problem.heads() / problem.cache.shape.kv_heads;
  Answer answer;
  answer.out.resize(problem.batch() * problem.heads() * dim);
  answer.errors.resize(problem.batch() * problem.heads());
  std::vector<double> query(dim);
  for (int64_t b = 0; b < problem.batch(); ++b) {
    for (int64_t head = 0; head < problem.cache.shape.kv_heads; ++head) {
      const Rows rows = attended_rows(problem, b, head);
      for (int64_t h = head * group; h < (head + 1) * group; ++h) {
        for (int64_t i = 0; i < dim; ++i) query[i] = problem.q.get(problem.q.at({b, h, i}));
        const int64_t at = b * problem.heads() + h;
        const double sink = problem.sinks ? problem.sinks->get(h) : -std::numeric_limits<double>::infinity();
        answer.errors[at] =
            attend(query, rows, problem.scale, problem.softcap, sink, answer.out.data() + at * dim);
      }
    }
  }
  return answer;
}

std::string what_is_wrong(const DecodeProblem& problem, const Answer& answer, double& largest) {
  const int64_t dim = problem.cache.shape.head_dim;
  const double smallest_step = problem.out.dtype() == DType::kFloat16 ? 0x1p-24 : 0;
  for (int64_t b = 0; b < problem.batch(); ++b) {
    for (int64_t h = 0; h < problem.heads(); ++h) {
      const int64_t at = b * problem.heads() + h;
      double norm = 0;
      double error = 0;
      bool finiteness_differs = false;
      for (int64_t i = 0; i < dim; ++i) {
        const double right = answer.out[at * dim + i];
        const double got = problem.out.get(problem.out.at({b, h, i}));
        finiteness_differs |= std::isfinite(right) != std::isfinite(got);
        if (!std::isfinite(right)) continue;
        norm += right * right;
        error += (got - right) * (got - right);
      }
      const double relative = std::max(tolerance(problem), answer.errors[at].of_weights);
      const double allowed =
          relative * std::sqrt(norm) + answer.errors[at].of_sums + smallest_step * std::sqrt(dim);
      const double share = error == 0 ? 0 : std::sqrt(error) / allowed;
      largest = std::max(largest, share);
      if (finiteness_differs || !(share <= 1)) {
        std::ostringstream text;
        text << "request " << b << ", head " << h << ": ";
        if (finiteness_differs) {
          text << "a number where there is none, or none where there is one";
        } else {
          text << "error " << std::sqrt(error / norm) << " of the norm, " << share
               << " times what is allowed";
        }
        return text.str();
      }
    }
  }
  return "";
}

}  // namespace neo_desktop::testing
