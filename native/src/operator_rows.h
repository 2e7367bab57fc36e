// The operators on one row, instantiated by each instruction set's file (see operators.h).
#pragma once

#include <cmath>

#include "simd_common.h"

namespace neo_desktop {
namespace {

// The lanes of n elements, n <= kLanes; the others are zero.
template <class V, class T>
inline typename V::Reg load_some(const T* p, int n) {
  if (n >= V::kLanes) return V::load(p);
  T all[V::kLanes]{};
  for (int i = 0; i < n; ++i) all[i] = p[i];
  return V::load(all);
}

template <class V, class T>
inline void store_some(T* p, typename V::Reg x, int n) {
  if (n >= V::kLanes) return V::store(p, x);
  T all[V::kLanes];
  V::store(all, x);
  for (int i = 0; i < n; ++i) p[i] = all[i];
}

// Converts x to T.
template <class V, class T>
inline typename V::Reg rounded(typename V::Reg x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  T as[V::kLanes];
  V::store(as, x);
  return V::load(as);
}

// A sum of products in 16 accumulators, for any number of lanes.
template <class V>
class ProductSum {
 public:
  ProductSum() {
    for (auto& part : parts_) part = V::zero();
  }
  void add(int i, typename V::Reg a, typename V::Reg b) {
    auto& part = parts_[i / V::kLanes % kParts];
    part = V::multiply_add(a, b, part);
  }
  void add_square(int i, typename V::Reg x) { add(i, x, x); }
  float total() const {
    float places[kMaxLanes];
    for (int part = 0; part < kParts; ++part) V::store(places + part * V::kLanes, parts_[part]);
    for (int apart = kMaxLanes / 2; apart > 0; apart /= 2) {
      for (int i = 0; i < apart; ++i) places[i] += places[i + apart];
    }
    return places[0];
  }

 private:
  static constexpr int kParts = kMaxLanes / V::kLanes;
  typename V::Reg parts_[kParts];
};

inline float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

template <class V, class T>
void add_rms_norm_row(const void* x, void* residual, const void* weight, void* out, int length, float eps) {
  const T* added = static_cast<const T*>(x);
  const T* weights = static_cast<const T*>(weight);
  T* sums = static_cast<T*>(residual);
  T* to = static_cast<T*>(out);
  ProductSum<V> squares;
  for (int i = 0; i < length; i += V::kLanes) {
    const int n = length - i;
    const auto sum = rounded<V, T>(V::add(load_some<V>(sums + i, n), load_some<V>(added + i, n)));
    store_some<V>(sums + i, sum, n);
    squares.add_square(i, sum);
  }
  const auto scale = V::broadcast(inverse_root(squares.total() / static_cast<float>(length) + eps));
  for (int i = 0; i < length; i += V::kLanes) {
    const int n = length - i;
    const auto normed = rounded<V, T>(V::multiply(load_some<V>(sums + i, n), scale));
    store_some<V>(to + i, V::multiply(normed, load_some<V>(weights + i, n)), n);
  }
}

template <class V>
inline typename V::Reg silu(typename V::Reg x) {
  const auto zero = V::zero();
  const auto above = V::max(zero, x);  // NaN stays
  const auto below = V::subtract(zero, V::max(zero, V::subtract(zero, x)));
  constexpr float kLog2e = 1.44269504f;
  const auto power = V::exp2(V::multiply(V::subtract(below, above), V::broadcast(kLog2e)));  // e^-|x|
  return V::divide(V::multiply_add(below, power, above), V::add(power, V::broadcast(1.0f)));
}

template <class V, class T>
void silu_mul_row(const void* gate_up, void* out, int length) {
  const T* gates = static_cast<const T*>(gate_up);
  const T* ups = gates + length;
  T* to = static_cast<T*>(out);
  for (int i = 0; i < length; i += V::kLanes) {
    const int n = length - i;
    const auto gate = rounded<V, T>(silu<V>(load_some<V>(gates + i, n)));
    store_some<V>(to + i, V::multiply(gate, load_some<V>(ups + i, n)), n);
  }
}

template <class V>
inline typename V::Reg at_most(typename V::Reg x, float limit) {
  return V::subtract(V::zero(), V::max(V::broadcast(-limit), V::subtract(V::zero(), x)));  // NaN stays
}

template <class V, class T>
void clamped_mul_row(const void* gate_up, void* out, int length, float alpha, float limit) {
  const T* gates = static_cast<const T*>(gate_up);
  const T* ups = gates + length;
  T* to = static_cast<T*>(out);
  for (int i = 0; i < length; i += V::kLanes) {
    const int n = length - i;
    const auto gate = at_most<V>(load_some<V>(gates + i, n), limit);
    const auto up = V::max(V::broadcast(-limit), at_most<V>(load_some<V>(ups + i, n), limit));
    const auto swished = silu<V>(V::multiply(gate, V::broadcast(alpha)));
    const auto gated = V::multiply(swished, V::broadcast(1.0f / alpha));
    store_some<V>(to + i, V::multiply(gated, V::add(up, V::broadcast(1.0f))), n);
  }
}

template <class V, class T>
void rope_row(void* heads, int count, int dim, const float* cos, const float* sin, const void* norm,
              float eps) {
  T* head = static_cast<T*>(heads);
  const T* weights = static_cast<const T*>(norm);
  const int half = dim / 2;
  for (int h = 0; h < count; ++h, head += dim) {
    if (weights) {
      ProductSum<V> squares;
      for (int i = 0; i < dim; i += V::kLanes) squares.add_square(i, load_some<V>(head + i, dim - i));
      const auto scale = V::broadcast(inverse_root(squares.total() / static_cast<float>(dim) + eps));
      for (int i = 0; i < dim; i += V::kLanes) {
        const auto normed = rounded<V, T>(V::multiply(load_some<V>(head + i, dim - i), scale));
        store_some<V>(head + i, V::multiply(normed, load_some<V>(weights + i, dim - i)), dim - i);
      }
      weights += dim;
    }
    for (int i = 0; i < half; i += V::kLanes) {
      const int n = half - i;
      const auto first = load_some<V>(head + i, n), second = load_some<V>(head + half + i, n);
      const auto of_first = V::multiply(second, load_some<V>(sin + i, n));
      const auto of_second = V::multiply(first, load_some<V>(sin + half + i, n));
      store_some<V>(head + i, V::multiply_add(first, load_some<V>(cos + i, n), of_first), n);
      store_some<V>(head + half + i, V::multiply_add(second, load_some<V>(cos + half + i, n), of_second), n);
    }
  }
}

template <class V, class T, class Weight>
void rms_norm_row(const void* x, const void* weight, void* out, int length, float eps) {
  const T* from = static_cast<const T*>(x);
  const Weight* weights = static_cast<const Weight*>(weight);
  T* to = static_cast<T*>(out);
  ProductSum<V> squares;
  for (int i = 0; i < length; i += V::kLanes) squares.add_square(i, load_some<V>(from + i, length - i));
  const auto scale = V::broadcast(inverse_root(squares.total() / static_cast<float>(length) + eps));
  for (int i = 0; i < length; i += V::kLanes) {
    const int n = length - i;
    const auto normed = rounded<V, Weight>(V::multiply(load_some<V>(from + i, n), scale));
    store_some<V>(to + i, V::multiply(normed, load_some<V>(weights + i, n)), n);
  }
}

template <class V, class T>
void layer_norm_row(const void* x, const void* weight, const void* bias, void* out, int length, float eps) {
  const T* from = static_cast<const T*>(x);
  const T* weights = static_cast<const T*>(weight);
  const T* biases = static_cast<const T*>(bias);
  T* to = static_cast<T*>(out);
  ProductSum<V> sum, squares;
  for (int i = 0; i < length; i += V::kLanes) {
    sum.add(i, load_some<V>(from + i, length - i), V::broadcast(1.0f));
  }
  const float mean = sum.total() / static_cast<float>(length);
  const auto minus_mean = V::broadcast(-mean);
  int i = 0;
  for (; i + V::kLanes <= length; i += V::kLanes)
    squares.add_square(i, V::add(V::load(from + i), minus_mean));
  float total = squares.total();
  for (; i < length; ++i) {  // padding zeros would count
    float lanes[V::kLanes];
    V::store(lanes, V::add(load_some<V>(from + i, 1), minus_mean));
    total += lanes[0] * lanes[0];
  }
  const auto scale = V::broadcast(inverse_root(total / static_cast<float>(length) + eps));
  for (i = 0; i < length; i += V::kLanes) {
    const int n = length - i;
    const auto normed = V::multiply(V::add(load_some<V>(from + i, n), minus_mean), scale);
    const auto shift = biases ? load_some<V>(biases + i, n) : V::zero();
    store_some<V>(to + i, V::multiply_add(normed, load_some<V>(weights + i, n), shift), n);
  }
}

// x * P(X < x) of a normal distribution, by Abramowitz and Stegun, 7.1.26; the probability's error is at most
// 1e-7.
template <class V>
inline typename V::Reg gelu(typename V::Reg x) {
  const auto zero = V::zero();
  const auto magnitude = V::max(x, V::subtract(zero, x));
  const auto z = V::multiply(magnitude, V::broadcast(0.707106781f));
  const auto one = V::broadcast(1.0f);
  const auto t = V::divide(one, V::multiply_add(z, V::broadcast(0.3275911f), one));
  auto p = V::broadcast(1.061405429f);
  p = V::multiply_add(p, t, V::broadcast(-1.453152027f));
  p = V::multiply_add(p, t, V::broadcast(1.421413741f));
  p = V::multiply_add(p, t, V::broadcast(-0.284496736f));
  p = V::multiply_add(p, t, V::broadcast(0.254829592f));
  const auto power = V::exp2(V::multiply(V::multiply(z, z), V::broadcast(-1.44269504f)));  // e^(-z^2)
  const auto tail = V::multiply(V::multiply(p, t), V::multiply(power, V::broadcast(0.5f)));
  return V::subtract(V::max(zero, x), V::multiply(magnitude, tail));
}

template <class V>
inline typename V::Reg gelu_by_tanh(typename V::Reg x) {
  const auto cube = V::multiply(V::multiply(x, x), x);
  const auto inner = V::multiply_add(cube, V::broadcast(0.044715f), x);
  const auto half = V::multiply(x, V::broadcast(0.5f));
  return V::multiply_add(half, tanh<V>(V::multiply(inner, V::broadcast(0.797884561f))), half);
}

// log(1 + e^x), lane by lane: recurrent layers need it for few numbers.
template <class V>
inline typename V::Reg softplus(typename V::Reg x) {
  float lanes[V::kLanes];
  V::store(lanes, x);
  for (float& lane : lanes) lane = (lane < 0 ? 0 : lane) + std::log1p(std::exp(-std::fabs(lane)));
  return V::load(lanes);
}

template <class V, Unary kind>
inline typename V::Reg apply(typename V::Reg x) {
  if constexpr (kind == Unary::kSilu) return silu<V>(x);
  if constexpr (kind == Unary::kSigmoid) {
    const auto half = V::broadcast(0.5f);
    return V::multiply_add(tanh<V>(V::multiply(x, half)), half, half);
  }
  if constexpr (kind == Unary::kTanh) return tanh<V>(x);
  if constexpr (kind == Unary::kRelu) return V::max(V::zero(), x);  // NaN stays
  if constexpr (kind == Unary::kGelu) return gelu<V>(x);
  if constexpr (kind == Unary::kGeluTanh) return gelu_by_tanh<V>(x);
  if constexpr (kind == Unary::kSoftplus) return softplus<V>(x);
}

template <class V, Binary kind>
inline typename V::Reg apply(typename V::Reg a, typename V::Reg b) {
  if constexpr (kind == Binary::kAdd) return V::add(a, b);
  if constexpr (kind == Binary::kSubtract) return V::subtract(a, b);
  if constexpr (kind == Binary::kTimes) return V::multiply(a, b);
}

template <class V, class T, Unary kind>
void unary_row(const void* x, void* out, int length) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(out);
  for (int i = 0; i < length; i += V::kLanes) {
    store_some<V>(to + i, apply<V, kind>(load_some<V>(from + i, length - i)), length - i);
  }
}

template <class V, class T, Binary kind>
void binary_row(const void* a, const void* b, void* out, int length) {
  const T* one = static_cast<const T*>(a);
  const T* other = static_cast<const T*>(b);
  T* to = static_cast<T*>(out);
  for (int i = 0; i < length; i += V::kLanes) {
    const int n = length - i;
    store_some<V>(to + i, apply<V, kind>(load_some<V>(one + i, n), load_some<V>(other + i, n)), n);
  }
}

template <class V, class T>
void scale_row(const void* x, void* out, int length, float factor, float addend) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(out);
  const auto by = V::broadcast(factor), plus = V::broadcast(addend);
  for (int i = 0; i < length; i += V::kLanes) {
    store_some<V>(to + i, V::multiply_add(load_some<V>(from + i, length - i), by, plus), length - i);
  }
}

template <class V, class From, class To>
void convert_row(const void* source, void* target, int length) {
  const From* from = static_cast<const From*>(source);
  To* to = static_cast<To*>(target);
  for (int i = 0; i < length; i += V::kLanes) {
    store_some<V>(to + i, load_some<V>(from + i, length - i), length - i);
  }
}

#define NEO_DESKTOP_OF_DTYPES(function, ...)                                                    \
  {function<V, float __VA_OPT__(, ) __VA_ARGS__>, function<V, Half __VA_OPT__(, ) __VA_ARGS__>, \
   function<V, BFloat16 __VA_OPT__(, ) __VA_ARGS__>}

template <class V>
constexpr RowOperators make_row_operators() {
  return {
      NEO_DESKTOP_OF_DTYPES(add_rms_norm_row),
      NEO_DESKTOP_OF_DTYPES(silu_mul_row),
      NEO_DESKTOP_OF_DTYPES(clamped_mul_row),
      NEO_DESKTOP_OF_DTYPES(rope_row),
      {rms_norm_row<V, float, float>, rms_norm_row<V, Half, Half>, rms_norm_row<V, BFloat16, BFloat16>},
      NEO_DESKTOP_OF_DTYPES(rms_norm_row, float),
      NEO_DESKTOP_OF_DTYPES(layer_norm_row),
      {NEO_DESKTOP_OF_DTYPES(convert_row, float), NEO_DESKTOP_OF_DTYPES(convert_row, Half),
       NEO_DESKTOP_OF_DTYPES(convert_row, BFloat16)},
      {NEO_DESKTOP_OF_DTYPES(unary_row, Unary::kSilu), NEO_DESKTOP_OF_DTYPES(unary_row, Unary::kSigmoid),
       NEO_DESKTOP_OF_DTYPES(unary_row, Unary::kTanh), NEO_DESKTOP_OF_DTYPES(unary_row, Unary::kRelu),
       NEO_DESKTOP_OF_DTYPES(unary_row, Unary::kGelu), NEO_DESKTOP_OF_DTYPES(unary_row, Unary::kGeluTanh),
       NEO_DESKTOP_OF_DTYPES(unary_row, Unary::kSoftplus)},
      {NEO_DESKTOP_OF_DTYPES(binary_row, Binary::kAdd), NEO_DESKTOP_OF_DTYPES(binary_row, Binary::kSubtract),
       NEO_DESKTOP_OF_DTYPES(binary_row, Binary::kTimes)},
      NEO_DESKTOP_OF_DTYPES(scale_row)};
}

#undef NEO_DESKTOP_OF_DTYPES

}  // namespace
}  // namespace neo_desktop
