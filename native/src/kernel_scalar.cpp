// The reference: plain loops for any CPU. Tests compare the vector kernels with them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "dense_tiles.h"
#include "merge_partials.h"
#include "neo_desktop/half.h"
#include "neo_desktop/kernels.h"
#include "operator_rows.h"
#include "scan_rows.h"

namespace neo_desktop {
namespace {

// An infinite score becomes NaN, as in the other kernels.
float capped(float score, float cap) { return cap * std::tanh(score / cap) + 0 * score; }

// Adds a token to the running softmax of a query head.
[[gnu::noinline]] void add_token(const float* q, const float* key, const float* value, int dim, float softcap,
                                 float* max, float* sum, float* acc) {
  float score = 0;
  for (int i = 0; i < dim; ++i) score += q[i] * key[i];
  if (softcap > 0) score = capped(score, softcap);
  if (score > *max) {  // false for NaN, which then reaches the output through the weight
    const float correction = std::exp2(*max - score);
    *max = score;
    *sum *= correction;
    for (int i = 0; i < dim; ++i) acc[i] *= correction;
  }
  const float weight = std::exp2(score - *max);
  *sum += weight;
  for (int i = 0; i < dim; ++i) acc[i] += weight * value[i];
}

template <class T, bool pairs>
void attend_head(const AttendTask& task, int head) {
  const int dim = task.head_dim;
  const int first = head * task.rows * task.padded_group;
  const float* queries = task.q + first * task.padded_head_dim;
  float* max = task.max + first;
  float* sum = task.sum + first;
  float* accs = task.acc + first * task.padded_head_dim;
  for (int g = 0; g < task.rows * task.padded_group; ++g) {
    max[g] = -std::numeric_limits<float>::infinity();
    sum[g] = 0;
    std::memset(accs + g * task.padded_head_dim, 0, sizeof(float) * task.padded_head_dim);
  }
  for (int64_t token = task.begin; token < task.end; ++token) {
    const int64_t block = task.block_table[token / task.block_tokens];
    const int64_t page = block / task.blocks_per_page;
    const int64_t row = block % task.blocks_per_page * task.block_tokens + token % task.block_tokens;
    const T* k = static_cast<const T*>(task.k) + page * task.k_page_stride + head * task.k_head_stride;
    const T* v =
        static_cast<const T*>(task.v) + page * task.v_page_stride + head * task.v_head_stride + row * dim;
    float k_scale = 1;
    float v_scale = 1;
    if constexpr (sizeof(T) == 1) {
      const int64_t at = page * task.scale_page_stride + head * task.scale_head_stride + row;
      k_scale = task.k_scale[at];
      v_scale = task.v_scale[at];
    }
    float key[kMaxHeadDim];
    float value[kMaxHeadDim];
    for (int i = 0; i < dim; ++i) {
      const int64_t at =
          pairs && task.paired == nullptr ? (i / 2 * task.page_tokens + row) * 2 + i % 2 : row * dim + i;
      key[i] = to_float(k[at]) * k_scale;
      value[i] = to_float(v[i]) * v_scale;
    }
    // Rows before the last attend to fewer tokens.
    const int64_t first_row = std::max<int64_t>(0, token - (task.context_len - task.rows));
    for (int row = static_cast<int>(first_row); row < task.rows; ++row) {
      for (int g = row * task.padded_group; g < row * task.padded_group + task.group; ++g) {
        const float* q = queries + g * task.padded_head_dim;
        float* acc = accs + g * task.padded_head_dim;
        add_token(q, key, value, dim, task.softcap, max + g, sum + g, acc);
      }
    }
  }
}

template <class T, bool pairs>
void attend(const AttendTask& task) {
  for (int head = 0; head < task.kv_heads; ++head) attend_head<T, pairs>(task, head);
}

template <class T>
void attend_prompt(const PromptTask& task) {
  const int dim = task.head_dim;
  for (int r = 0; r < task.rows; ++r) {
    const float* queries =
        task.q + r / kPromptRows * kPromptRows * task.padded_head_dim + r % kPromptRows * 2;
    float q[kMaxHeadDim];
    for (int i = 0; i < dim; ++i) q[i] = queries[i / 2 * 2 * kPromptRows + i % 2];
    float* acc = task.acc + r * task.padded_head_dim;
    task.max[r] = -std::numeric_limits<float>::infinity();
    task.sum[r] = 0;
    std::memset(acc, 0, sizeof(float) * task.padded_head_dim);
    const int64_t position = task.position + r / task.group;
    const int64_t first = task.window > 0 ? std::max<int64_t>(0, position + 1 - task.window) : 0;
    for (int64_t t = std::max(first, task.begin); t < std::min(position + 1, task.end); ++t) {
      float key[kMaxHeadDim];
      float value[kMaxHeadDim];
      for (int i = 0; i < dim; ++i) {
        key[i] = to_float(static_cast<const T*>(task.k)[t * task.k_stride + i]);
        value[i] = to_float(static_cast<const T*>(task.v)[t * task.v_stride + i]);
      }
      add_token(q, key, value, dim, task.softcap, task.max + r, task.sum + r, acc);
    }
  }
}

template <class T>
void widen(const void* source, float* target, int length, float factor) {
  for (int i = 0; i < length; ++i) target[i] = to_float(static_cast<const T*>(source)[i]) * factor;
}

template <class T>
void narrow(const float* source, void* target, int length, float factor) {
  for (int i = 0; i < length; ++i) from_float(source[i] * factor, static_cast<T*>(target)[i]);
}

float read(const void* data, int64_t bytes) {
  constexpr int64_t kCacheLineBytes = 64;
  float sum = 0;
  for (int64_t i = 0; i + kCacheLineBytes <= bytes; i += kCacheLineBytes) {
    float word;
    std::memcpy(&word, static_cast<const char*>(data) + i, sizeof word);
    sum += word;
  }
  return sum;
}

int64_t multiply_adds(int64_t rounds, float* kept) {
  constexpr int kChains = 12;
  constexpr int kSteps = 8;
  float sums[kChains];  // all tend to 2: neither infinite nor denormal
  for (int i = 0; i < kChains; ++i) sums[i] = *kept + static_cast<float>(i);
  for (int64_t step = 0; step < rounds * kSteps; ++step) {
    for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * 0.5f + 1.0f;
  }
  for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
  *kept = sums[0];
  return rounds * kSteps * kChains;
}

// The operators' vector type with a single lane.
struct OneLane {
  using Reg = float;
  static constexpr int kLanes = 1;
  static float zero() { return 0.0f; }
  static float broadcast(float x) { return x; }
  static float add(float a, float b) { return a + b; }
  static float subtract(float a, float b) { return a - b; }
  static float multiply(float a, float b) { return a * b; }
  static float divide(float a, float b) { return a / b; }
  static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
  static float max(float a, float b) { return a > b ? a : b; }  // b where either is NaN
  static float exp2(float x) { return std::exp2(x); }
  static constexpr int kRowsAtOnce = 4;
  static void load_pairs(const BFloat16* p, float& even, float& odd) {
    even = to_float(p[0]);
    odd = to_float(p[1]);
  }
  template <class T>
  static float load(const T* p) {
    return to_float(*p);
  }
  template <class T>
  static void store(T* p, float x) {
    from_float(x, *p);
  }
};

}  // namespace

constinit const Kernels kScalarKernels = {
    {attend<float, false>, attend<Half, false>, attend<BFloat16, false>},
    {attend<float, true>, attend<Half, true>, attend<BFloat16, true>, attend<Int8, true>},
    {attend_prompt<float>, attend_prompt<Half>, attend_prompt<BFloat16>},
    merge_partials<OneLane>,
    {widen<float>, widen<Half>, widen<BFloat16>},
    {narrow<float>, narrow<Half>, narrow<BFloat16>},
    read,
    multiply_adds,
    make_row_operators<OneLane>(),
    make_dense_kernels<OneLane>(),
    make_state_kernels<OneLane>(),
    {},
};

}  // namespace neo_desktop
