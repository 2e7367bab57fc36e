#include "neo_desktop/operators.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "neo_desktop/half.h"
#include "neo_desktop/kernels.h"
#include "neo_desktop/thread_pool.h"

namespace neo_desktop {
namespace {

constexpr int64_t kSerialElements = 1 << 15;  // one thread processes them before others wake

// Calls body(first, last) for parts of [0, rows).
template <class Body>
void for_rows(int64_t rows, int64_t elements, int num_threads, Body body) {
  const int64_t useful = std::clamp<int64_t>(elements / kSerialElements, 1, check_num_threads(num_threads));
  const int64_t threads = std::min(useful, rows);
  constexpr int64_t kTakesPerThread = 4;
  const int64_t take = std::max<int64_t>(rows / std::max<int64_t>(threads * kTakesPerThread, 1), 1);
  ThreadPool::shared().run_parts(threads, rows, take, body);
}

uint8_t* row_of(const TensorView& tensor, int64_t row) {
  return static_cast<uint8_t*>(tensor.data) + row * tensor.stride(0) * size_of(tensor.dtype);
}

// A float as an integer of the same order, with one zero; NaN is beyond the infinities.
int32_t ordered(float x) {
  const auto bits = std::bit_cast<int32_t>(x + 0.0F);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

template <class T>
int64_t first_largest(const T* row, int64_t count) {
  constexpr int64_t kAtOnce = 1024;
  const int32_t infinity = ordered(std::numeric_limits<float>::infinity()),
                below = ordered(-std::numeric_limits<float>::infinity());
  int32_t largest = below, smallest = infinity;
  int64_t where = 0;
  for (int64_t first = 0; first < count; first += kAtOnce) {
    const int64_t last = std::min(first + kAtOnce, count);
    int32_t top = below;
    for (int64_t i = first; i < last; ++i) {
      const int32_t x = ordered(to_float(row[i]));
      top = std::max(top, x);
      smallest = std::min(smallest, x);
    }
    if (top > largest) largest = top, where = first;
  }
  if (largest >= infinity || largest == below || smallest < below) return -1;
  while (ordered(to_float(row[where])) != largest) ++where;
  return where;
}

// Chooses the experts of one row, as `choose_experts`.
template <class T>
void choose_row(const T* row, int64_t count, const Routing& routing, int64_t k, int32_t* ids,
                float* weights) {
  const auto order = [](float x) { return std::isnan(x) ? std::numeric_limits<int32_t>::max() : ordered(x); };
  const auto numbers = [](const std::optional<TensorView>& of) {
    return of ? static_cast<const float*>(of->data) : nullptr;
  };
  const auto sigmoid = [](float x) { return 1.0F / (1.0F + std::exp(-x)); };
  const float *bias = numbers(routing.bias), *factors = numbers(routing.factors);
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float x = to_float(row[i]);
    const float score = (routing.is_sigmoid ? sigmoid(x) : x) + (bias ? bias[i] : 0.0F);
    if (found == k && order(score) <= order(weights[k - 1])) continue;
    int64_t place = found < k ? found++ : k - 1;
    for (; place > 0 && order(weights[place - 1]) < order(score); --place) {
      ids[place] = ids[place - 1];
      weights[place] = weights[place - 1];
    }
    ids[place] = static_cast<int32_t>(i);
    weights[place] = score;
  }
  const float largest = weights[0];  // of a softmax
  const auto share = [&](float x) { return routing.is_sigmoid ? sigmoid(x) : std::exp(x - largest); };
  float sum = routing.is_sigmoid && !routing.normalises ? 1.0F : routing.epsilon;
  for (int64_t i = 0; i < k; ++i) {
    weights[i] = share(to_float(row[ids[i]]));
    if (routing.normalises) sum += weights[i];
  }
  if (!routing.is_sigmoid && !routing.normalises) {
    for (int64_t i = 0; i < count; ++i) sum += share(to_float(row[i]));
  }
  for (int64_t i = 0; i < k; ++i) weights[i] *= (factors ? factors[ids[i]] : 1.0F) / sum;
}

// Calls body with a zero of a floating-point type.
template <class Body>
void with_floats(const TensorView& tensor, Body body) {
  check_dtype(tensor, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  if (tensor.dtype == DType::kFloat32) body(0.0F);
  if (tensor.dtype == DType::kFloat16) body(Half{});
  if (tensor.dtype == DType::kBFloat16) body(BFloat16{});
}

}  // namespace

void add_rms_norm(const TensorView& x, const TensorView& residual, const TensorView& weight, float eps,
                  const TensorView& out, int num_threads, Isa isa) {
  check_dims(x, "[n, hidden]", 2);
  check_dtype(x, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(x, 1);
  const int64_t n = x.size(0), hidden = x.size(1);
  check_like(residual, "[n, hidden]", {n, hidden}, x.dtype);
  check_like(weight, "[hidden]", {hidden}, x.dtype);
  check_like(out, "[n, hidden]", {n, hidden}, x.dtype);
  const auto of_row = kernels_for(isa).operators.add_rms_norm[static_cast<int>(x.dtype)];
  for_rows(n, n * hidden, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      of_row(row_of(x, row), row_of(residual, row), weight.data, row_of(out, row), static_cast<int>(hidden),
             eps);
    }
  });
}

void silu_mul(const TensorView& gate_up, const TensorView& out, int num_threads, Isa isa) {
  check_dims(out, "[n, m]", 2);
  check_dtype(out, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(out, 1);
  const int64_t n = out.size(0), columns = out.size(1);
  check_like(gate_up, "[n, 2 * m]", {n, 2 * columns}, out.dtype);
  const auto of_row = kernels_for(isa).operators.silu_mul[static_cast<int>(out.dtype)];
  for_rows(n, n * columns * 4, num_threads, [&](int64_t first, int64_t last) {  // exponentials cost more
    for (int64_t row = first; row < last; ++row) {
      of_row(row_of(gate_up, row), row_of(out, row), static_cast<int>(columns));
    }
  });
}

void choose_tokens(const TensorView& logits, const TensorView& tokens, int num_threads) {
  check_dims(logits, "[n, m]", 2);
  check_packed(logits, 1);
  const int64_t n = logits.size(0), m = logits.size(1);
  check_like(tokens, "[n]", {n}, DType::kInt64);
  with_floats(logits, [&](auto zero) {
    using T = decltype(zero);
    for_rows(n, n * m, num_threads, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        static_cast<int64_t*>(tokens.data)[row * tokens.stride(0)] =
            first_largest(reinterpret_cast<const T*>(row_of(logits, row)), m);
      }
    });
  });
}

void choose_experts(const TensorView& logits, const Routing& routing, const TensorView& ids,
                    const TensorView& weights, int num_threads) {
  check_dims(logits, "[n, experts]", 2);
  check_packed(logits, 1);
  check_dims(ids, "[n, k]", 2);
  const int64_t n = logits.size(0), count = logits.size(1), k = ids.size(1);
  check_like(ids, "[n, k]", {n, k}, DType::kInt32);
  check_like(weights, "[n, k]", {n, k}, DType::kFloat32);
  if (k < 1 || k > count) fail("ids has ", k, " columns; expected 1 to ", count);
  for (const auto& numbers : {routing.bias, routing.factors}) {
    if (numbers) check_like(*numbers, "[experts]", {count}, DType::kFloat32);
  }
  if (!routing.is_sigmoid && (routing.bias || routing.epsilon != 0))
    fail("a softmax has no bias and no epsilon");
  with_floats(logits, [&](auto zero) {
    using T = decltype(zero);
    for_rows(n, n * count * 4, num_threads, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        choose_row(reinterpret_cast<const T*>(row_of(logits, row)), count, routing, k,
                   reinterpret_cast<int32_t*>(row_of(ids, row)),
                   reinterpret_cast<float*>(row_of(weights, row)));
      }
    });
  });
}

void rope(const TensorView& heads, const TensorView& cos, const TensorView& sin,
          const std::optional<TensorView>& norm, float eps, int num_threads, Isa isa) {
  check_dims(heads, "[n, heads, head_dim]", 3);
  check_dtype(heads, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(heads, 2);
  const int64_t n = heads.size(0), count = heads.size(1), dim = heads.size(2);
  if (dim % 2 != 0) fail("heads have ", dim, " dimensions; expected an even number");
  check_like(cos, "[n, head_dim]", {n, dim}, DType::kFloat32);
  check_like(sin, "[n, head_dim]", {n, dim}, DType::kFloat32);
  if (norm) check_like(*norm, "[heads, head_dim]", {count, dim}, heads.dtype, 2);
  const auto of_row = kernels_for(isa).operators.rope[static_cast<int>(heads.dtype)];
  for_rows(n, n * count * dim, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      of_row(row_of(heads, row), static_cast<int>(count), static_cast<int>(dim),
             reinterpret_cast<const float*>(row_of(cos, row)),
             reinterpret_cast<const float*>(row_of(sin, row)), norm ? norm->data : nullptr, eps);
    }
  });
}

}  // namespace neo_desktop
