// A head's share of `scan_state`, and some channels' of `short_convolution`, for one instruction set's file
// to instantiate (see recurrent.h).
#pragma once

#include "operator_rows.h"

namespace neo_desktop {
namespace {

// Some columns of a head's state pass over some tokens: `count` vectors, or a part of one.
template <class V, int count, bool is_part = false>
inline void scan_columns(const ScanTask& task, int column, int length = 0) {
  const auto at = [&](const float* p, int c) {
    if constexpr (is_part) return load_some<V>(p, length);
    return V::load(p + c * V::kLanes);
  };
  const auto put = [&](float* p, int c, typename V::Reg x) {
    if constexpr (is_part) return store_some<V>(p, x, length);
    V::store(p + c * V::kLanes, x);
  };
  for (int token = 0; token < task.tokens; ++token) {
    const float* before = (token == 0 ? task.before : task.state) + column;
    const float* q = task.q + token * task.key_dim;
    const float* k = task.k + token * task.key_dim;
    float* v = task.v + token * task.value_dim + column;
    const auto decay = V::broadcast(task.decay[token]);
    typename V::Reg delta[count], out[count];
#pragma GCC unroll 4
    for (int c = 0; c < count; ++c) {
      delta[c] = at(v, c);
      out[c] = V::zero();
    }
    if (task.beta) {
      typename V::Reg known[count];
#pragma GCC unroll 4
      for (int c = 0; c < count; ++c) known[c] = V::zero();
      const float* row = before;
      for (int i = 0; i < task.key_dim; ++i, row += task.value_dim) {
        const auto key = V::broadcast(k[i]);
#pragma GCC unroll 4
        for (int c = 0; c < count; ++c) known[c] = V::multiply_add(key, at(row, c), known[c]);
      }
      const auto beta = V::broadcast(task.beta[token]);
#pragma GCC unroll 4
      for (int c = 0; c < count; ++c) {
        delta[c] = V::multiply(beta, V::subtract(delta[c], V::multiply(decay, known[c])));
      }
    }
    float* row = task.state + column;
    for (int i = 0; i < task.key_dim; ++i, row += task.value_dim, before += task.value_dim) {
      const auto key = V::broadcast(k[i]), query = V::broadcast(q[i]);
#pragma GCC unroll 4
      for (int c = 0; c < count; ++c) {
        const auto state = V::multiply_add(key, delta[c], V::multiply(decay, at(before, c)));
        put(row, c, state);
        out[c] = V::multiply_add(query, state, out[c]);
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < count; ++c) put(v, c, out[c]);
  }
}

template <class V>
void scan(const ScanTask& task) {
  int column = 0;
  for (; column + 4 * V::kLanes <= task.value_dim; column += 4 * V::kLanes) scan_columns<V, 4>(task, column);
  for (; column + V::kLanes <= task.value_dim; column += V::kLanes) scan_columns<V, 1>(task, column);
  if (column < task.value_dim) scan_columns<V, 1, true>(task, column, task.value_dim - column);
}

template <class V, class T>
void convolve(const ConvolutionTask& task) {
  const T* x = static_cast<const T*>(task.x);
  T* out = static_cast<T*>(task.out);
  for (int c = 0; c < task.channels; c += V::kLanes) {
    const int n = task.channels - c;
    typename V::Reg past[kMaxConvolution], weight[kMaxConvolution];  // of the tokens before, oldest first
    for (int i = 0; i + 1 < task.width; ++i)
      past[i] = load_some<V>(task.state + i * task.state_stride + c, n);
    for (int i = 0; i < task.width; ++i) weight[i] = load_some<V>(task.weight + i * task.state_stride + c, n);
    const auto bias = task.bias ? load_some<V>(task.bias + c, n) : V::zero();
    for (int64_t token = 0; token < task.tokens; ++token) {
      past[task.width - 1] = load_some<V>(x + token * task.x_stride + c, n);
      auto sum = bias;
      for (int i = 0; i < task.width; ++i) sum = V::multiply_add(weight[i], past[i], sum);
      for (int i = 0; i + 1 < task.width; ++i) past[i] = past[i + 1];
      store_some<V>(out + token * task.out_stride + c, task.has_silu ? silu<V>(sum) : sum, n);
    }
    for (int i = 0; i + 1 < task.width; ++i)
      store_some<V>(task.state + i * task.state_stride + c, past[i], n);
  }
}

template <class V>
constexpr StateKernels make_state_kernels() {
  return {scan<V>, {convolve<V, float>, convolve<V, Half>, convolve<V, BFloat16>}};
}

}  // namespace
}  // namespace neo_desktop
