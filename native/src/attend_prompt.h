// Prompt attention: rows of queries over K and V in rows of fp32, fp16 or bf16.
//
// A step takes a tile of kPairTile tokens and kPromptRows rows. A row's result consists of the same terms, in
// the same order, as in decode attention over pairs (attend_pairs.h): it has the same bits beside any other
// rows, and as a decode.
//
//   keys     of a tile, converted once for all rows, to [head_dim / 2, kPairTile, 2] in fp32
//   scores   sums of even and of odd dimensions, then both; tokens that the row does not attend to are masked
//   softmax  online (tile_softmax.h)
//   values   acc += weight * v, over the tokens that the row attends to, in order
#pragma once

#include "simd_common.h"
#include "tile_softmax.h"

namespace neo_desktop {
namespace {

template <class V, class T>
class PromptAttention {
  using Reg = typename V::Reg;
  static constexpr int kVectorTokens = V::kLanes / 2;
  static constexpr int kVectors = V::kLanes / 4;  // with kPromptRows rows, they fill the registers

 public:
  explicit PromptAttention(const PromptTask& task)
      : task_(task), keys_(task.tiles), values_(task.tiles + kPairTile * task.padded_head_dim) {}

  void run() {
    const int rows = (task_.rows + kPromptRows - 1) / kPromptRows * kPromptRows;
    for (int64_t i = 0; i < static_cast<int64_t>(rows) * task_.padded_head_dim; i += V::kLanes) {
      V::store(task_.acc + i, V::zero());
    }
    for (int row = 0; row < task_.rows; ++row) TileSoftmax<V>::start(max_of(row), sum_of(row));
    const int64_t last = last_of(task_.rows - 1);
    for (tile_ = first_of(0) / kPairTile * kPairTile; tile_ < last; tile_ += kPairTile) {
      const int count = smaller(last - tile_, kPairTile);
      load_keys(count);
      load_values(count);
      for (int row = 0; row < task_.rows; row += kPromptRows) step(row);
    }
    for (int row = 0; row < task_.rows; ++row) {
      task_.max[row] = max_of(row)[0];
      task_.sum[row] = TileSoftmax<V>::total(sum_of(row));
    }
  }

 private:
  float* max_of(int row) const { return task_.state + row * 2 * kMaxLanes; }
  float* sum_of(int row) const { return max_of(row) + kMaxLanes; }

  // The tokens that a row attends to.
  int64_t first_of(int row) const {
    const int64_t first = task_.window > 0 ? task_.position + row / task_.group + 1 - task_.window : 0;
    return first > task_.begin ? first : task_.begin;
  }
  int64_t last_of(int row) const {
    const int64_t last = task_.position + row / task_.group + 1;
    return last < task_.end ? last : task_.end;
  }
  // Attended tokens within the tile, counted from its first one.
  int within(int64_t token) const { return token < tile_ ? 0 : smaller(token - tile_, kPairTile); }

  static Reg load_some(const T* row, int left) {
    if constexpr (V::kLanes > 8) {
      if (left < V::kLanes) return V::load_half(row);
    }
    return V::load(row);
  }

  void load_keys(int count) {
    constexpr int kTokens = 4;  // written together
    const auto* rows = static_cast<const T*>(task_.k) + tile_ * task_.k_stride;
    for (int t = 0; t < count; t += kTokens) {
      alignas(64) float wide[sizeof(T) == sizeof(float) ? 1 : kTokens][kMaxHeadDim];
      const float* from[kTokens];
      for (int i = 0; i < kTokens; ++i) {
        const T* row = rows + smaller(t + i, count - 1) * task_.k_stride;
        if constexpr (sizeof(T) == sizeof(float)) {
          from[i] = row;
        } else {
          for (int c = 0; c < task_.head_dim; c += V::kLanes) {
            V::store(wide[i] + c, load_some(row + c, task_.head_dim - c));
          }
          from[i] = wide[i];
        }
      }
      float* to = keys_ + 2 * t;
      for (int c = 0; c < task_.head_dim; c += 2, to += 2 * kPairTile) {
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; ++i) __builtin_memcpy(to + 2 * i, from[i] + c, 2 * sizeof(float));
      }
    }
  }

  // fp32 rows of whole vectors stay in place.
  void load_values(int count) {
    const auto* rows = static_cast<const T*>(task_.v) + tile_ * task_.v_stride;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (task_.head_dim == task_.padded_head_dim) {
        value_rows_ = rows;
        value_stride_ = task_.v_stride;
        return;
      }
    }
    value_rows_ = values_;
    value_stride_ = task_.padded_head_dim;
    for (int t = 0; t < count; ++t) {
      float* to = values_ + t * value_stride_;
      for (int c = 0; c < task_.padded_head_dim; c += V::kLanes) {
        const int left = task_.head_dim - c;
        V::store(to + c, left > 0 ? load_some(rows + t * task_.v_stride + c, left) : V::zero());
      }
    }
  }

  void step(int row) {
    const int rows = smaller(task_.rows - row, kPromptRows);
    const int begin = within(first_of(row));
    const int end = within(last_of(row + rows - 1));
    if (begin >= end) return;
    alignas(64) float weights[kPromptRows * kPairTile];
    scores(row, end, weights);
    if (task_.softcap > 0) {
      for (int r = 0; r < rows; ++r) cap_scores<V>(task_.softcap, weights + r * kPairTile, kPairTile);
    }
    for (int r = 0; r < kPromptRows; ++r) {
      float* own = weights + r * kPairTile;
      const int first = r < rows ? within(first_of(row + r)) : 0;
      const int last = r < rows ? within(last_of(row + r)) : 0;
      const bool is_empty = first >= last;
      fill(own, 0, is_empty ? kPairTile : first, is_empty ? 0 : kLowest);
      if (is_empty) continue;
      fill(own, last, kPairTile, kLowest);
      TileSoftmax<V>::run(own, max_of(row + r), sum_of(row + r), acc_of(row + r), task_.padded_head_dim);
    }
    // Tokens that all rows attend to; before and after them, tokens that only some rows attend to.
    const int all_begin = within(first_of(row + rows - 1));
    const int all_end = within(last_of(row));
    if (all_begin >= all_end) {
      for (int r = 0; r < rows; ++r) add_alone(row, r, begin, end, weights);
      return;
    }
    if (begin < all_begin) {
      for (int r = 0; r < rows; ++r) add_alone(row, r, begin, all_begin, weights);
    }
    add_values<kPromptRows, kVectors>(0, all_begin, all_end, weights, acc_of(row));
    if (all_end < end) {
      for (int r = 0; r < rows; ++r) add_alone(row, r, all_end, end, weights);
    }
  }

  float* acc_of(int row) const { return task_.acc + static_cast<int64_t>(row) * task_.padded_head_dim; }

  static void fill(float* row, int begin, int end, float value) {
    for (int t = begin; t < end; ++t) row[t] = value;
  }

  // weights[r][t] = q[r] · k[t], t up to `count` or some more.
  void scores(int row, int count, float* weights) const {
    const float* q = task_.q + static_cast<int64_t>(row) * task_.padded_head_dim;
    constexpr int kTokens = kVectors * kVectorTokens;
    for (int t = 0; t < count; t += kTokens) {
      Reg sums[kPromptRows * kVectors];
#pragma GCC unroll 24
      for (int i = 0; i < kPromptRows * kVectors; ++i) sums[i] = V::zero();
      const float* keys = keys_ + 2 * t;
      const float* factors = q;
      for (int c = 0; c < task_.head_dim; c += 2, keys += 2 * kPairTile, factors += 2 * kPromptRows) {
        Reg k[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) k[i] = V::load(keys + i * V::kLanes);
#pragma GCC unroll 6
        for (int r = 0; r < kPromptRows; ++r) {
          const Reg query = V::broadcast_pair(factors + 2 * r);
#pragma GCC unroll 4
          for (int i = 0; i < kVectors; ++i) {
            sums[r * kVectors + i] = V::multiply_add(k[i], query, sums[r * kVectors + i]);
          }
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < kPromptRows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; i += 2) {
          V::store(weights + r * kPairTile + t + i * kVectorTokens,
                   V::add_pairs(sums[r * kVectors + i], sums[r * kVectors + i + 1]));
        }
      }
    }
  }

  // Adds tokens [begin, end) of the tile that row + r attends to.
  void add_alone(int row, int r, int begin, int end, const float* weights) const {
    const int first = within(first_of(row + r));
    const int last = within(last_of(row + r));
    if (first > begin) begin = first;
    if (last < end) end = last;
    if (begin < end) add_values<1, kVectors>(0, begin, end, weights + r * kPairTile, acc_of(row + r));
  }

  // From `column` on, W vectors of a row at a time; the rest of the row uses half the width.
  template <int R, int W>
  void add_values(int column, int begin, int end, const float* weights, float* acc) const {
    for (; column + W * V::kLanes <= task_.padded_head_dim; column += W * V::kLanes) {
      Reg sums[R * W];
      float* to = acc + column;
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < W; ++i) {
          sums[r * W + i] = V::load(to + r * task_.padded_head_dim + i * V::kLanes);
        }
      }
      const float* row = value_rows_ + begin * value_stride_ + column;
      for (int t = begin; t < end; ++t, row += value_stride_) {
        Reg v[W];
#pragma GCC unroll 4
        for (int i = 0; i < W; ++i) v[i] = V::load(row + i * V::kLanes);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const Reg weight = V::broadcast(weights[r * kPairTile + t]);
#pragma GCC unroll 4
          for (int i = 0; i < W; ++i) sums[r * W + i] = V::multiply_add(v[i], weight, sums[r * W + i]);
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < W; ++i) {
          V::store(to + r * task_.padded_head_dim + i * V::kLanes, sums[r * W + i]);
        }
      }
    }
    if constexpr (W > 1) {
      if (column < task_.padded_head_dim) add_values<R, W / 2>(column, begin, end, weights, acc);
    }
  }

  const PromptTask& task_;
  float* const keys_;    // [padded_head_dim / 2, kPairTile, 2]
  float* const values_;  // [kPairTile, padded_head_dim]
  const float* value_rows_ = nullptr;
  int64_t value_stride_ = 0;
  int64_t tile_ = 0;  // its first token
};

template <class V, class T>
void attend_prompt(const PromptTask& task) {
  PromptAttention<V, T>(task).run();
}

}  // namespace
}  // namespace neo_desktop
