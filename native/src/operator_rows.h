// A row's share of the operators, for one instruction set's file to instantiate (see operators.h).
#pragma once

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

// What x is as a T.
template <class V, class T>
inline typename V::Reg rounded(typename V::Reg x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  T as[V::kLanes];
  V::store(as, x);
  return V::load(as);
}

// Sums of squares in 16 places, whatever the number of lanes.
template <class V>
class SquareSum {
 public:
  SquareSum() {
    for (auto& part : parts_) part = V::zero();
  }
  void add(int i, typename V::Reg x) {
    auto& part = parts_[i / V::kLanes % kParts];
    part = V::multiply_add(x, x, part);
  }
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
  SquareSum<V> squares;
  for (int i = 0; i < length; i += V::kLanes) {
    const int n = length - i;
    const auto sum = rounded<V, T>(V::add(load_some<V>(sums + i, n), load_some<V>(added + i, n)));
    store_some<V>(sums + i, sum, n);
    squares.add(i, sum);
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
      SquareSum<V> squares;
      for (int i = 0; i < dim; i += V::kLanes) squares.add(i, load_some<V>(head + i, dim - i));
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

template <class V>
constexpr RowOperators make_row_operators() {
  return {{add_rms_norm_row<V, float>, add_rms_norm_row<V, Half>, add_rms_norm_row<V, BFloat16>},
          {silu_mul_row<V, float>, silu_mul_row<V, Half>, silu_mul_row<V, BFloat16>},
          {clamped_mul_row<V, float>, clamped_mul_row<V, Half>, clamped_mul_row<V, BFloat16>},
          {rope_row<V, float>, rope_row<V, Half>, rope_row<V, BFloat16>}};
}

}  // namespace
}  // namespace neo_desktop
