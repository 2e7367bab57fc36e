// One call of prefill attention: blocks of a chunk's tokens, per KV head, are divided among threads, the
// largest first. The division into blocks does not change results.
#include "neo_desktop/prompt_attention.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <numbers>
#include <tuple>
#include <vector>

#include "attention_order.h"
#include "neo_desktop/kernels.h"
#include "neo_desktop/paged_cache.h"
#include "neo_desktop/thread_pool.h"
#include "scratch.h"

namespace neo_desktop {
namespace {

// A block's rows share the keys in the kernel's layout, and fit a core's cache.
constexpr int64_t kMostRows = 384;
constexpr int64_t kLeastRows = 32;
constexpr int64_t kMostTokens = 256;  // so that chunks of contexts start with blocks
constexpr int64_t kItemsPerThread = 4;

// Waking a thread takes about as long as this many products of a query and a key.
constexpr int64_t kScoresPerThread = 2048;

struct Block {
  int64_t query;     // the first one
  int64_t position;  // in its context
  int64_t tokens;
  int64_t context;  // first row of the context in K and V
  int64_t work() const { return tokens * (position + tokens); }
};

void check_ends(const TensorView& ends, int row, int64_t rows) {
  const auto* at = static_cast<const int32_t*>(ends.data) + row * ends.stride(0);
  const int64_t count = ends.size(1);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t least = i == 0 ? 0 : at[i - 1];
    if (at[i] < least || at[i] > rows) {
      fail("ends[", row, ", ", i, "] is ", at[i], "; expected a number from ", least, " to ", rows);
    }
  }
}

void check(const PromptArguments& arguments) {
  const auto& [q, k, v, ends, out, window, sinks, scale, softcap] = arguments;
  check_dims(q, "[queries, heads, head_dim]", 3);
  check_dims(k, "[contexts, kv_heads, head_dim]", 3);
  check_shape(k, "[contexts, kv_heads, head_dim of q]", {k.size(0), k.size(1), q.size(2)});
  check_shape(v, "the shape of k", k.shape);
  check_shape(out, "the shape of q", q.shape);
  if (q.size(2) % 8 != 0 || q.size(2) < 8 || q.size(2) > kMaxHeadDim) {
    fail("head_dim is ", q.size(2), "; expected a multiple of 8 from 8 to ", kMaxHeadDim);
  }
  if (k.size(1) < 1 || q.size(1) < 1 || q.size(1) % k.size(1) != 0) {
    fail("q has ", q.size(1), " heads; expected a multiple of the ", k.size(1), " KV heads");
  }
  check_dtype(q, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  for (const TensorView* each : {&k, &v, &out}) {
    check_dtype(*each, {q.dtype});
    check_packed(*each, 1);
  }
  check_packed(q, 1);
  check_no_overlap(out, 2);
  check_dims(ends, "[2, chunks + 1]", 2);
  check_shape(ends, "[2, chunks + 1]", {2, std::max<int64_t>(1, ends.size(1))});
  check_dtype(ends, {DType::kInt32});
  check_packed(ends, 1);
  check_ends(ends, 0, q.size(0));
  check_ends(ends, 1, k.size(0));
  check_constants(scale, softcap, window, sinks, q.size(1));
}

class PromptCall {
 public:
  PromptCall(const PromptArguments& arguments, int num_threads, const Kernels& kernels)
      : arguments_(arguments),
        kernels_(kernels),
        kv_heads_(arguments.k.size(1)),
        group_(arguments.q.size(1) / kv_heads_),
        head_dim_(static_cast<int>(arguments.q.size(2))),
        padded_head_dim_(static_cast<int>(whole_vectors(head_dim_))) {
    int64_t tokens = std::bit_floor<uint64_t>(std::clamp<int64_t>(kMostRows / group_, 1, kMostTokens));
    cut(tokens);
    const auto items = [&] { return static_cast<int64_t>(blocks_.size()) * kv_heads_; };
    while (num_threads > 1 && tokens > 1 && tokens * group_ > kLeastRows &&
           items() < kItemsPerThread * num_threads) {
      tokens /= 2;
      cut(tokens);
    }
    std::stable_sort(blocks_.begin(), blocks_.end(),
                     [](const Block& x, const Block& y) { return x.work() > y.work(); });
    int64_t scores = 0;
    for (const Block& block : blocks_) scores += block.work() * arguments.q.size(1);
    threads_ = static_cast<int>(std::min({int64_t{num_threads}, items(), 1 + scores / kScoresPerThread}));
    rows_ = rounded_up(tokens * group_, kPromptRows);
  }

  void run() {
    if (blocks_.empty()) return;
    thread_local ScratchFloats scratch;
    partial_floats_ = whole_vectors(rows_ * (padded_head_dim_ + 2));
    thread_floats_ = whole_pages(rows_ * padded_head_dim_ + 2 * kPairTile * padded_head_dim_ +
                                 rows_ * 2 * kMaxLanes + 2 * partial_floats_);
    memory_ = scratch.take(threads_ * thread_floats_);
    ThreadPool::shared().run(threads_, [this](int participant) { work(participant); });
  }

 private:
  // Divides the tokens into blocks of up to `tokens`, a power of two, that end at multiples of `tokens`.
  void cut(int64_t tokens) {
    blocks_.clear();
    const TensorView& ends = arguments_.ends;
    const auto* queries = static_cast<const int32_t*>(ends.data);
    const int32_t* contexts = queries + ends.stride(0);
    for (int64_t c = 0; c + 1 < ends.size(1); ++c) {
      const int64_t context_len = contexts[c + 1] - contexts[c];
      const int64_t first = context_len - (queries[c + 1] - queries[c]);
      if (first < 0) fail("chunk ", c, " has more queries than its context has tokens");
      for (int64_t position = first; position < context_len;) {
        const int64_t end = std::min(context_len, (position / tokens + 1) * tokens);
        blocks_.push_back({queries[c] + position - first, position, end - position, contexts[c]});
        position = end;
      }
    }
  }

  void work(int participant) {
    const int64_t items = static_cast<int64_t>(blocks_.size()) * kv_heads_;
    float* memory = memory_ + participant * thread_floats_;
    for (int64_t item = next_++; item < items; item = next_++) {
      attend(blocks_[item / kv_heads_], item % kv_heads_, memory);
    }
  }

  struct Partial {
    float* acc;  // [rows, padded_head_dim]
    float* max;  // [rows]
    float* sum;
  };
  Partial partial_at(float* memory) const {
    float* max = memory + rows_ * padded_head_dim_;
    return {memory, max, max + rows_};
  }

  void attend(const Block& block, int64_t head, float* memory) const {
    const auto& [k, v, window] = std::tie(arguments_.k, arguments_.v, arguments_.window);
    const int64_t rows = block.tokens * group_;
    float* tiles = memory + rows_ * padded_head_dim_;
    float* state = tiles + 2 * kPairTile * padded_head_dim_;
    float* partials = state + rows_ * 2 * kMaxLanes;
    const Partial all = partial_at(partials);
    const Partial part = partial_at(partials + partial_floats_);
    load_queries(block, head, memory);
    const ContextChunks chunks = ContextChunks::of(block.position + 1, window, group_);
    const int64_t end = block.position + block.tokens;
    for (int64_t begin = chunks.first; begin < end; begin += chunks.tokens) {
      const Partial& into = begin == chunks.first ? all : part;
      kernels_.attend_prompt[static_cast<int>(k.dtype)](
          {.q = memory,
           .k = offset(k.data, k.dtype, block.context * k.stride(0) + head * k.stride(1)),
           .v = offset(v.data, v.dtype, block.context * v.stride(0) + head * v.stride(1)),
           .k_stride = k.stride(0),
           .v_stride = v.stride(0),
           .begin = begin,
           .end = std::min(end, begin + chunks.tokens),
           .position = block.position,
           .window = window,
           .rows = static_cast<int>(rows),
           .group = static_cast<int>(group_),
           .head_dim = head_dim_,
           .padded_head_dim = padded_head_dim_,
           .softcap = arguments_.softcap * std::numbers::log2e_v<float>,
           .tiles = tiles,
           .state = state,
           .max = into.max,
           .sum = into.sum,
           .acc = into.acc});
      for (int64_t row = 0; begin > chunks.first && row < rows; ++row) {
        const ContextChunks own = ContextChunks::of(block.position + row / group_ + 1, window, group_);
        if (begin < own.first) continue;
        float* acc = all.acc + row * padded_head_dim_;
        const float* values = part.acc + row * padded_head_dim_;
        if (begin == own.first) {
          std::copy_n(values, padded_head_dim_, acc);
          all.max[row] = part.max[row];
          all.sum[row] = part.sum[row];
        } else {
          kernels_.merge(values, part.max[row], part.sum[row], acc, all.max + row, all.sum + row,
                         padded_head_dim_);
        }
      }
    }
    store_output(block, head, all);
  }

  // Converts queries to the kernel's layout: kPromptRows rows interleaved, one pair of dimensions for all
  // rows before the next pair.
  void load_queries(const Block& block, int64_t head, float* to) const {
    const TensorView& q = arguments_.q;
    const float scale = arguments_.scale * std::numbers::log2e_v<float>;
    const int64_t rows = block.tokens * group_;
    std::fill_n(to, rounded_up(rows, kPromptRows) * padded_head_dim_, 0.0f);
    for (int64_t row = 0; row < rows; ++row) {
      alignas(64) float wide[kMaxHeadDim];
      const int64_t at =
          (block.query + row / group_) * q.stride(0) + (head * group_ + row % group_) * q.stride(1);
      kernels_.widen[static_cast<int>(q.dtype)](offset(q.data, q.dtype, at), wide, head_dim_, scale);
      float* pairs = to + row / kPromptRows * kPromptRows * padded_head_dim_ + row % kPromptRows * 2;
      for (int c = 0; c < head_dim_; c += 2, pairs += 2 * kPromptRows) std::copy_n(wide + c, 2, pairs);
    }
  }

  void store_output(const Block& block, int64_t head, const Partial& result) const {
    const TensorView& out = arguments_.out;
    for (int64_t row = 0; row < block.tokens * group_; ++row) {
      const int64_t of_all = head * group_ + row % group_;
      const TensorView* sinks = arguments_.sinks;
      const float* sink = sinks == nullptr ? nullptr : static_cast<const float*>(sinks->data) + of_all;
      void* to =
          offset(out.data, out.dtype, (block.query + row / group_) * out.stride(0) + of_all * out.stride(1));
      kernels_.narrow[static_cast<int>(out.dtype)](
          result.acc + row * padded_head_dim_, to, head_dim_,
          1.0f / denominator(result.max[row], result.sum[row], sink));
    }
  }

  const PromptArguments& arguments_;
  const Kernels& kernels_;
  const int64_t kv_heads_;
  const int64_t group_;
  const int head_dim_;
  const int padded_head_dim_;
  std::vector<Block> blocks_;
  int threads_ = 1;
  int64_t rows_ = 0;  // of the largest block
  int64_t partial_floats_ = 0;
  int64_t thread_floats_ = 0;
  float* memory_ = nullptr;
  std::atomic<int64_t> next_{0};
};

}  // namespace

void prompt_attention(const PromptArguments& arguments, int num_threads, Isa isa) {
  check(arguments);
  PromptCall(arguments, check_num_threads(num_threads), kernels_for(isa)).run();
}

}  // namespace neo_desktop
