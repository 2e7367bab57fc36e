// A head's share of `scan_state`, and some channels' of `short_convolution`, for one instruction set's file
// to instantiate (see recurrent.h).
#pragma once

#include "operator_rows.h"

namespace neo_desktop {
namespace {

// Some columns of a head's state pass over some tokens: `count` vectors of them, the last of which may be
// partial.
template <class V, int count>
inline void scan_columns(const ScanTask& task, int column, int last) {
  const auto at = [&](const float* p, int c) {
    return c + 1 < count ? V::load(p + c * V::kLanes) : load_some<V>(p + c * V::kLanes, last);
  };
  const auto put = [&](float* p, int c, typename V::Reg x) {
    if (c + 1 < count) return V::store(p + c * V::kLanes, x);
    store_some<V>(p + c * V::kLanes, x, last);
  };
  for (int token = 0; token < task.tokens; ++token) {
    const float* q = task.q + token * task.key_dim;
    const float* k = task.k + token * task.key_dim;
    float* v = task.v + token * task.value_dim + column;
    const auto decay = V::broadcast(task.decay[token]);
    typename V::Reg delta[count];
    for (int c = 0; c < count; ++c) delta[c] = at(v, c);
    if (task.beta) {
      typename V::Reg known[count];
      for (int c = 0; c < count; ++c) known[c] = V::zero();
      const float* row = task.state + column;
      for (int i = 0; i < task.key_dim; ++i, row += task.value_dim) {
        const auto key = V::broadcast(k[i]);
        for (int c = 0; c < count; ++c) known[c] = V::multiply_add(key, at(row, c), known[c]);
      }
      const auto beta = V::broadcast(task.beta[token]);
      for (int c = 0; c < count; ++c) {
        delta[c] = V::multiply(beta, V::subtract(delta[c], V::multiply(decay, known[c])));
      }
    }
    typename V::Reg out[count];
    for (int c = 0; c < count; ++c) out[c] = V::zero();
    float* row = task.state + column;
    for (int i = 0; i < task.key_dim; ++i, row += task.value_dim) {
      const auto key = V::broadcast(k[i]), query = V::broadcast(q[i]);
      for (int c = 0; c < count; ++c) {
        const auto state = V::multiply_add(key, delta[c], V::multiply(decay, at(row, c)));
        put(row, c, state);
        out[c] = V::multiply_add(query, state, out[c]);
      }
    }
    for (int c = 0; c < count; ++c) put(v, c, out[c]);
  }
}

template <class V>
void scan(const ScanTask& task) {
  constexpr int kVectors = 4;
  for (int column = 0; column < task.value_dim; column += kVectors * V::kLanes) {
    const int left = task.value_dim - column;
    const int vectors = left < kVectors * V::kLanes ? (left + V::kLanes - 1) / V::kLanes : kVectors;
    const int last = left - (vectors - 1) * V::kLanes;
    if (vectors == 4) scan_columns<V, 4>(task, column, last);
    if (vectors == 3) scan_columns<V, 3>(task, column, last);
    if (vectors == 2) scan_columns<V, 2>(task, column, last);
    if (vectors == 1) scan_columns<V, 1>(task, column, last);
  }
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
