// Processes the items of a schedule (decode_schedule.h) on several threads.
//
// An item's result is a partial softmax (max, sum, acc) per query head. If a request has several chunks, the
// thread that finishes the last one merges them, in order, in fp32 (as in Flash-Decoding).
#include "decode_call.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <optional>
#include <tuple>
#include <vector>

#include "attention_order.h"
#include "decode_schedule.h"
#include "neo_desktop/kernels.h"
#include "neo_desktop/paged_cache.h"
#include "neo_desktop/thread_pool.h"
#include "scratch.h"
#include "slot_writer.h"

namespace neo_desktop {
namespace {

class Scratch {
 public:
  // The calling thread's memory. Only the caller makes and runs a DecodeCall with it; workers see pointers.
  static Scratch& own() {
    thread_local Scratch scratch;
    return scratch;
  }

  std::vector<DecodeRequest> requests;
  std::vector<char> continues;

  // `count` counters, with values left over from the last call.
  std::atomic<int>* counters(int64_t count) {
    if (count > num_counters_) {
      counters_ = std::make_unique<std::atomic<int>[]>(count);
      num_counters_ = count;
    }
    return counters_.get();
  }

  ScratchFloats floats;

 private:
  std::unique_ptr<std::atomic<int>[]> counters_;
  int64_t num_counters_ = 0;
};

class DecodeCall {
 public:
  DecodeCall(const DecodeArguments& arguments, const PagedCache& cache, int64_t block_tokens, int64_t window,
             const float* sinks, int num_threads, const Kernels& kernels)
      : q_(arguments.q),
        cache_(cache),
        block_tables_(arguments.block_tables),
        context_lens_(arguments.context_lens),
        block_tokens_(block_tokens),
        out_(arguments.out),
        new_rows_(arguments.new_rows),
        sinks_(sinks),
        kernels_(kernels),
        q_scale_(arguments.scale * std::numbers::log2e_v<float>),
        softcap_(arguments.softcap * std::numbers::log2e_v<float>),
        group_(static_cast<int>(q_.size(1) / cache.kv_heads)),
        padded_group_(neo_desktop::padded_group(group_)),
        takes_pairs_(cache.k_pairs || (cache.shares_rows() && block_tokens % kSegmentTokens == 0)),
        dot_products_(takes_pairs_ && q_.dtype == DType::kBFloat16 &&
                      kernels.bf16.attend[static_cast<int>(cache.dtype)] != nullptr &&
                      group_ >= kernels.bf16.min_group[static_cast<int>(cache.dtype)]),
        padded_head_dim_(static_cast<int>(whole_vectors(cache.head_dim))),
        schedule_(
            lens(), find_continuing(), q_.size(0), window,
            {cache.kv_heads, group_,
             (cache.shares_rows() ? 1 : 2) * cache.head_dim * static_cast<int64_t>(size_of(cache.dtype))},
            num_threads, Scratch::own().requests) {}

  void run() {
    if (schedule_.requests().empty()) return;
    const int64_t heads = schedule_.most_head_rows();
    const int64_t rows = heads * padded_group_;
    q_bf16_floats_ = dot_products_ ? rows * padded_head_dim_ / 2 : 0;
    q_floats_ = rows * padded_head_dim_ + q_bf16_floats_;
    state_floats_ = rows * 2 * kMaxLanes;
    partial_head_floats_ = whole_vectors(padded_group_ * (padded_head_dim_ + 2));
    own_floats_ = q_floats_ + state_floats_ + heads * partial_head_floats_;
    const bool turns = takes_pairs_ && !cache_.k_pairs;
    paired_floats_ = turns ? kPairTile * cache_.head_dim * size_of(cache_.dtype) / int64_t{sizeof(float)} : 0;
    thread_floats_ = whole_pages(own_floats_ + paired_floats_);
    Scratch& scratch = Scratch::own();
    const int threads = schedule_.threads();
    thread_memory_ =
        scratch.floats.take(threads * thread_floats_ + schedule_.partial_heads() * partial_head_floats_);
    partial_memory_ = thread_memory_ + threads * thread_floats_;
    unfinished_ = scratch.counters(schedule_.head_ranges());
    for (const DecodeRequest& request : schedule_.requests()) {
      for (int64_t range = 0; request.chunks > 1 && range < request.head_ranges; ++range) {
        unfinished_[request.head_ranges_before + range].store(static_cast<int>(request.chunks),
                                                              std::memory_order_relaxed);
      }
    }
    const std::vector<char>& continues = scratch.continues;
    if (new_rows_ && std::count(continues.begin(), continues.end(), 1) > 0) append_all();
    ThreadPool::shared().run(threads, [this](int participant) { work(participant); });
  }

 private:
  // One row per (KV head of the item, row of its request, query head of its group), consecutive in memory.
  struct Partial {
    float* acc;  // [rows, padded_head_dim]
    float* max;  // [rows]
    float* sum;  // [rows]
  };

  Partial partial_at(float* memory, const DecodeRequest& request) const {
    const int64_t rows = request.heads_per_item * request.rows * padded_group_;
    float* max = memory + rows * padded_head_dim_;
    return {memory, max, max + rows};
  }

  // The result of one chunk of an item's heads, if the heads have several chunks.
  Partial partial_of(const DecodeItem& item, int64_t chunk) const {
    const DecodeRequest& request = *item.request;
    const int64_t heads_before = request.partial_heads_before + (item.range * request.chunks + chunk) *
                                                                    request.heads_per_item * request.rows;
    return partial_at(partial_memory_ + heads_before * partial_head_floats_, request);
  }

  void work(int participant) {
    float* memory = thread_memory_ + participant * thread_floats_;
    DecodeItem last{};  // its queries are in `memory`
    DecodeSchedule::Batch batch = schedule_.take();
    while (batch.next < batch.end) {
      const DecodeItem item = schedule_.item(batch.next++);
      AttendTask task = task_of(item);
      // The kernel prefetches the next item's memory before this item ends. Near the end of the schedule no
      // thread reserves an item that another thread could start.
      if (batch.next == batch.end && schedule_.many_left()) batch = schedule_.take();
      AttendTask next;
      if (batch.next < batch.end) {
        next = task_of(schedule_.item(batch.next));
        task.next = &next;
      }
      if (item.request != last.request || item.range != last.range) load_queries(item, memory);
      last = item;
      run(item, task, memory);
      if (batch.next == batch.end) batch = schedule_.take();
    }
  }

  // All fields except the query and the results.
  AttendTask task_of(const DecodeItem& item) const {
    const DecodeRequest& request = *item.request;
    AttendTask task{};
    task.k = offset(cache_.k.data, cache_.dtype, item.head * cache_.k.head_stride);
    task.v = offset(cache_.v.data, cache_.dtype, item.head * cache_.v.head_stride);
    task.k_page_stride = cache_.k.page_stride;
    task.v_page_stride = cache_.v.page_stride;
    task.k_head_stride = cache_.k.head_stride;
    task.v_head_stride = cache_.v.head_stride;
    if (cache_.k_scale != nullptr) {
      task.k_scale = cache_.k_scale + item.head * cache_.scale_head_stride;
      task.v_scale = cache_.v_scale + item.head * cache_.scale_head_stride;
      task.scale_page_stride = cache_.scale_page_stride;
      task.scale_head_stride = cache_.scale_head_stride;
    }
    task.block_table = table_of(request.b);
    task.begin = item.begin;
    task.end = item.end;
    task.block_tokens = block_tokens_;
    task.blocks_per_page = cache_.page_tokens / block_tokens_;
    task.page_tokens = cache_.page_tokens;
    task.kv_heads = item.heads;
    task.rows = static_cast<int>(request.rows);
    task.context_len = request.end;
    task.group = group_;
    task.padded_group = padded_group_;
    task.head_dim = cache_.head_dim;
    task.padded_head_dim = padded_head_dim_;
    task.score_scale = q_scale_;
    task.softcap = softcap_;
    return task;
  }

  void run(const DecodeItem& item, AttendTask& task, float* memory) {
    const DecodeRequest& request = *item.request;
    const auto [head, heads] = std::tuple(item.head, item.heads);
    const Partial own = partial_at(memory + q_floats_ + state_floats_, request);

    if (new_rows_ && !has_appended_ && item.chunk + 1 == request.chunks) {
      append(request.b, request.end - 1, head, heads);
    }
    task.q = memory;
    task.q_bf16 = reinterpret_cast<const BFloat16*>(memory + q_floats_ - q_bf16_floats_);
    task.state = memory + q_floats_;
    task.paired = paired_floats_ > 0 ? memory + own_floats_ : nullptr;
    task.max = own.max;
    task.sum = own.sum;
    task.acc = own.acc;
    if (dot_products_) {
      kernels_.bf16.attend[static_cast<int>(cache_.dtype)](task);
    } else if (takes_pairs_) {
      kernels_.attend_pairs[static_cast<int>(cache_.dtype)](task);
    } else {
      kernels_.attend_rows[static_cast<int>(cache_.dtype)](task);
    }

    if (request.chunks == 1) {
      store_output(request, head, heads, own);
      return;
    }
    const int64_t rows = request.heads_per_item * request.rows * padded_group_;
    std::copy_n(own.acc, rows * (padded_head_dim_ + 2), partial_of(item, item.chunk).acc);
    // The last thread sees all results: each decrement releases its own, and the last one acquires all.
    if (unfinished_[request.head_ranges_before + item.range].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      for (int64_t row = 0; row < heads * request.rows; ++row) {
        for (int g = 0; g < group_; ++g) merge(item, row * padded_group_ + g, own);
      }
      store_output(request, head, heads, own);
    }
  }

  // Rows of one sequence read each other's keys and values, on any thread.
  void append_all() {
    has_appended_ = true;
    for (int64_t b = 0; b < q_.size(0); ++b) {
      if (lens()[b] > 0) append(b, lens()[b] - 1, 0, static_cast<int>(cache_.kv_heads));
    }
  }

  // Marks the rows that continue the row before them: the same blocks, and one token more.
  const std::vector<char>& find_continuing() const {
    std::vector<char>& continues = Scratch::own().continues;
    continues.assign(q_.size(0), 0);
    for (int64_t b = 1; b < q_.size(0); ++b) {
      const int64_t before = lens()[b - 1];
      const int64_t blocks = (before + block_tokens_ - 1) / block_tokens_;
      continues[b] = before > 0 && lens()[b] == before + 1 &&
                     std::equal(table_of(b), table_of(b) + blocks, table_of(b - 1));
    }
    return continues;
  }

  const int32_t* lens() const { return static_cast<const int32_t*>(context_lens_.data); }

  const int32_t* table_of(int64_t b) const {
    return static_cast<const int32_t*>(block_tables_.data) + b * block_tables_.stride(0);
  }

  // Only the item that attends to these heads' last token reads it, so no other thread waits for the write.
  void append(int64_t b, int64_t token, int64_t head, int heads) const {
    const int64_t slot = table_of(b)[token / block_tokens_] * block_tokens_ + token % block_tokens_;
    const int64_t page = slot / cache_.page_tokens;
    const int64_t row = slot % cache_.page_tokens;
    SlotWriter::of_keys(new_rows_->k, cache_, kernels_).write(b, page, row, head, heads);
    if (!cache_.shares_rows())
      SlotWriter::of_values(new_rows_->v, cache_, kernels_).write(b, page, row, head, heads);
  }

  void load_queries(const DecodeItem& item, float* q) const {
    if (padded_group_ > group_ || padded_head_dim_ > cache_.head_dim) std::fill(q, q + q_floats_, 0.0f);
    const int64_t rows = item.request->rows;
    for (int64_t i = 0; i < item.heads * rows; ++i) {
      const int64_t h = i / rows;
      const int64_t b = item.request->b + i % rows;
      for (int g = 0; g < group_; ++g) {
        float* row = q + (i * padded_group_ + g) * padded_head_dim_;
        const int64_t at = b * q_.stride(0) + ((item.head + h) * group_ + g) * q_.stride(1);
        const void* from = offset(q_.data, q_.dtype, at);
        kernels_.widen[static_cast<int>(q_.dtype)](from, row, cache_.head_dim, q_scale_);
        if (dot_products_) {
          void* narrow = q + q_floats_ - q_bf16_floats_ + (row - q) / 2;
          std::memcpy(narrow, from, cache_.head_dim * sizeof(BFloat16));
        }
      }
    }
  }

  void merge(const DecodeItem& item, int64_t row, const Partial& result) const {
    float* acc = result.acc + row * padded_head_dim_;
    for (int64_t c = 0; c < item.request->chunks; ++c) {
      const Partial part = partial_of(item, c);
      const float* values = part.acc + row * padded_head_dim_;
      if (c == 0) {
        std::copy_n(values, padded_head_dim_, acc);
        result.max[row] = part.max[row];
        result.sum[row] = part.sum[row];
        continue;
      }
      kernels_.merge(values, part.max[row], part.sum[row], acc, &result.max[row], &result.sum[row],
                     padded_head_dim_);
    }
  }

  void store_output(const DecodeRequest& request, int64_t head, int heads, const Partial& result) const {
    for (int64_t i = 0; i < heads * request.rows; ++i) {
      const int64_t h = i / request.rows;
      const int64_t b = request.b + i % request.rows;
      for (int g = 0; g < group_; ++g) {
        const int64_t row = i * padded_group_ + g;
        const float* acc = result.acc + row * padded_head_dim_;
        const int64_t at = b * out_.stride(0) + ((head + h) * group_ + g) * out_.stride(1);
        const float* sink = sinks_ == nullptr ? nullptr : sinks_ + (head + h) * group_ + g;
        const float sum = denominator(result.max[row], result.sum[row], sink);
        kernels_.narrow[static_cast<int>(out_.dtype)](acc, offset(out_.data, out_.dtype, at), cache_.head_dim,
                                                      1.0f / sum);
      }
    }
  }

  const TensorView& q_;
  const PagedCache& cache_;
  const TensorView& block_tables_;
  const TensorView& context_lens_;
  const int64_t block_tokens_;
  const TensorView& out_;
  const std::optional<NewRows>& new_rows_;
  const float* const sinks_;  // null: none
  const Kernels& kernels_;
  const float q_scale_;
  const float softcap_;  // in units of log2; 0: none
  const int group_;
  const int padded_group_;
  const bool takes_pairs_;
  const bool dot_products_;
  const int padded_head_dim_;

  DecodeSchedule schedule_;

  int64_t q_floats_ = 0;  // sizes of the parts of the scratch memory; the first holds both forms of q
  int64_t q_bf16_floats_ = 0;
  int64_t state_floats_ = 0;
  int64_t partial_head_floats_ = 0;  // per KV head
  int64_t own_floats_ = 0;           // all of these
  int64_t paired_floats_ = 0;
  int64_t thread_floats_ = 0;
  float* thread_memory_ = nullptr;
  float* partial_memory_ = nullptr;

  bool has_appended_ = false;               // the cache holds the new rows
  std::atomic<int>* unfinished_ = nullptr;  // chunks of (request, head range) still to come
};

}  // namespace

void run_decode(const DecodeArguments& arguments, const PagedCache& cache, int64_t block_tokens,
                int64_t window, const float* sinks, int num_threads, const Kernels& kernels) {
  DecodeCall(arguments, cache, block_tokens, window, sinks, num_threads, kernels).run();
}

}  // namespace neo_desktop
