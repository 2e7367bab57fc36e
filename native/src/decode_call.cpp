// Shares decode attention out over threads.
//
// The work is cut into items: a chunk of one request's context, for some of the KV heads. Chunks depend on
// the request's length and on the model only, so a result never depends on the batch or on the number of
// threads. An item takes as many KV heads as leave enough items for all threads: the heads of a page lie side
// by side in memory, and reading on is faster than jumping.
//
//   request 0, 1300 tokens    [0,1024) heads 0-3   [1024,1300) heads 0-3   [0,1024) heads 4-7   ...
//   request 1,   90 tokens    [0,90)   heads 0-3   [0,90)      heads 4-7
//
// An item's result is a partial softmax (max, sum, acc) per query head. Where a request has several chunks,
// the thread that finishes the last of them merges all, in order, in fp32 (as in Flash-Decoding).
//
// Threads take neighbouring items, many at first and fewer towards the end (guided self-scheduling): most
// partial results are then merged by the thread that made them. From another core's cache they come so slowly
// that sharing items out one by one took a fifth of the time where two threads ran on different dies.
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

#include "neo_desktop/kernels.h"
#include "neo_desktop/paged_cache.h"
#include "neo_desktop/thread_pool.h"
#include "slot_writer.h"

namespace neo_desktop {
namespace {

// A chunk's first tile is read without having been asked for in time: chunks are long, except where a request
// alone must keep all threads busy. And its result, a row of fp32 per query head, goes through memory: it
// should be little beside the keys and values that its query heads share.
constexpr int64_t kMinChunkTokens = 1024;
constexpr int64_t kMinChunkTokensPerQuery = 256;
constexpr int64_t kMaxChunks = 64;  // per request and head: bounds the memory that partial results take

// Waking a thread costs about as long as reading this much.
constexpr int64_t kMinBytesPerThread = 32 << 10;

// For fewer heads, fp32 keeps the memory's pace just as well.
constexpr int kMinDotProductGroup = 3;

// Enough for the threads to end at about the same time.
constexpr int64_t kItemsPerThread = 8;

// A thread takes this part of what is left, divided by the number of threads: with a larger one they end
// further apart, with a smaller one they share more.
constexpr int64_t kBatchesPerThread = 2;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Chunks end where segments do: in dimension pairs a segment is read as a whole, and while one thread writes
// the newest token's key there, no other may read next to it.
int64_t first_of_segment(int64_t token) { return token / kSegmentTokens * kSegmentTokens; }

struct Request {
  int64_t b;      // row of the batch
  int64_t begin;  // first token attended to
  int64_t end;
  int64_t length;  // tokens, from the beginning of the first one's segment
  int64_t chunk_tokens;
  int64_t chunks;
  int64_t first_item;
  int64_t tokens_before;  // of all items before the first one
  int64_t first_partial;  // where its partial results lie; unused with one chunk
};

// Memory that a calling thread keeps between its calls, so that calls in a row allocate nothing.
class Scratch {
 public:
  // Of this thread. Only the thread that calls uses it to make and run a DecodeCall; workers see pointers.
  static Scratch& own() {
    thread_local Scratch scratch;
    return scratch;
  }

  std::vector<Request> requests;

  // `count` counters, their values left over from the last call.
  std::atomic<int>* counters(int64_t count) {
    if (count > num_counters_) {
      counters_ = std::make_unique<std::atomic<int>[]>(count);
      num_counters_ = count;
    }
    return counters_.get();
  }

  float* floats(int64_t count) {
    if (count > capacity_) {
      memory_.reset();
      memory_.reset(new (std::align_val_t{kAlignment}) float[count]);
      capacity_ = count;
    }
    return memory_.get();
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(float* p) const { operator delete[](p, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<float[], Free> memory_;
  int64_t capacity_ = 0;
  std::unique_ptr<std::atomic<int>[]> counters_;
  int64_t num_counters_ = 0;
};

class DecodeCall {
 public:
  DecodeCall(const DecodeArguments& arguments, const PagedCache& cache, int64_t block_tokens, int64_t window,
             int num_threads, const Kernels& kernels)
      : q_(arguments.q),
        cache_(cache),
        block_tables_(arguments.block_tables),
        block_tokens_(block_tokens),
        out_(arguments.out),
        new_rows_(arguments.new_rows),
        kernels_(kernels),
        q_scale_(arguments.scale * std::numbers::log2e_v<float>),
        group_(static_cast<int>(q_.size(1) / cache.kv_heads)),
        padded_group_(neo_desktop::padded_group(group_)),
        dot_products_(cache.k_pairs && group_ >= kMinDotProductGroup && q_.dtype == DType::kBFloat16 &&
                      kernels.bf16.attend[static_cast<int>(cache.dtype)] != nullptr),
        padded_head_dim_(static_cast<int>(divide_up(cache.head_dim, kMaxLanes) * kMaxLanes)),
        requests_(Scratch::own().requests) {
    requests_.clear();
    const auto* lens = static_cast<const int32_t*>(arguments.context_lens.data);
    int64_t tokens = 0;
    int64_t chunks = 0;
    for (int64_t b = 0; b < q_.size(0); ++b) {
      const int64_t begin = window > 0 ? std::max<int64_t>(0, lens[b] - window) : 0;
      const int64_t length = lens[b] - first_of_segment(begin);
      const int64_t least = std::max(kMinChunkTokens, group_ * kMinChunkTokensPerQuery);
      const int64_t chunk_tokens = divide_up(length, least * kMaxChunks) * least;
      requests_.push_back(
          {b, begin, lens[b], length, chunk_tokens, divide_up(length, chunk_tokens), 0, 0, 0});
      tokens += length;
      chunks += requests_.back().chunks;
    }
    // The longest items first, so that no thread is left with one at the end.
    std::sort(requests_.begin(), requests_.end(), [](const Request& x, const Request& y) {
      return x.chunk_tokens != y.chunk_tokens ? x.chunk_tokens > y.chunk_tokens : x.b < y.b;
    });
    const int64_t bytes = tokens * cache.kv_heads * cache.head_dim * size_of(cache.dtype) * 2;
    const int64_t useful_threads = std::min<int64_t>(num_threads, 1 + bytes / kMinBytesPerThread);
    const int64_t ranges = std::min(divide_up(useful_threads * kItemsPerThread, chunks), cache.kv_heads);
    heads_per_item_ =
        static_cast<int>(useful_threads > 1 ? divide_up(cache.kv_heads, ranges) : cache.kv_heads);
    head_ranges_ = divide_up(cache.kv_heads, heads_per_item_);
    for (Request& request : requests_) {
      request.first_item = items_;
      request.tokens_before = item_tokens_;
      request.first_partial = partials_;
      items_ += request.chunks * head_ranges_;
      item_tokens_ += request.length * head_ranges_;
      if (request.chunks > 1) partials_ += request.chunks * head_ranges_;
    }
    threads_ = static_cast<int>(std::min(useful_threads, items_));
  }

  void run() {
    const int64_t rows = heads_per_item_ * padded_group_;
    q_bf16_floats_ = dot_products_ ? rows * padded_head_dim_ / 2 : 0;
    q_floats_ = rows * padded_head_dim_ + q_bf16_floats_;
    state_floats_ = rows * 2 * kMaxLanes;
    partial_floats_ = divide_up(rows * (padded_head_dim_ + 2), kMaxLanes) * kMaxLanes;
    thread_floats_ = q_floats_ + state_floats_ + partial_floats_;
    Scratch& scratch = Scratch::own();
    thread_memory_ = scratch.floats(threads_ * thread_floats_ + partials_ * partial_floats_);
    partial_memory_ = thread_memory_ + threads_ * thread_floats_;
    unfinished_ = scratch.counters(requests_.size() * head_ranges_);
    for (size_t r = 0; r < requests_.size(); ++r) {
      for (int64_t range = 0; range < head_ranges_; ++range) {
        unfinished_[r * head_ranges_ + range] = static_cast<int>(requests_[r].chunks);
      }
    }
    ThreadPool::shared().run(threads_, [this](int participant) { work(participant); });
  }

 private:
  // One per row = (KV head of the item, query head of its group).
  struct Partial {
    float* acc;  // [rows, padded_head_dim]
    float* max;  // [rows]
    float* sum;  // [rows]
  };

  Partial partial_at(float* memory) const {
    float* max = memory + heads_per_item_ * padded_group_ * padded_head_dim_;
    return {memory, max, max + heads_per_item_ * padded_group_};
  }

  // A chunk of a request's context for some of its KV heads.
  struct Item {
    const Request* request;
    int64_t chunk;
    int64_t range;
    int64_t head;  // the first one
    int heads;
  };

  void work(int participant) {
    float* memory = thread_memory_ + participant * thread_floats_;
    Item last{};  // whose queries lie in `memory`
    Batch batch = take();
    while (batch.next < batch.end) {
      const Item item = item_at(batch.next++);
      AttendTask task = task_of(item);
      // Knowing the next item before this one ends, the kernel asks for its memory in time. Towards the end
      // nobody holds one back that another thread could begin with.
      const bool many_left = next_item_.load(std::memory_order_relaxed) < items_ - 2 * threads_;
      if (batch.next == batch.end && many_left) batch = take();
      AttendTask next;
      if (batch.next < batch.end) {
        next = task_of(item_at(batch.next));
        task.next = &next;
      }
      if (item.request != last.request || item.range != last.range) load_queries(item, memory);
      last = item;
      run(item, task, memory);
      if (batch.next == batch.end) batch = take();
    }
  }

  // Items [next, end).
  struct Batch {
    int64_t next;
    int64_t end;
  };

  // The next items, as many as hold a thread's part of the tokens that are left, all chunks of a request's
  // heads or, where that is too much, some; none when all are taken.
  Batch take() {
    int64_t next = next_item_.load(std::memory_order_relaxed);
    int64_t end;
    do {
      if (next >= items_) return {items_, items_};
      const int64_t before = tokens_before(next);
      const int64_t part = (item_tokens_ - before) / (threads_ * kBatchesPerThread);
      end = std::max(next + 1, item_with(before + part));
      const int64_t first_chunk = end - item_at(end).chunk;
      if (first_chunk > next) end = first_chunk;
    } while (!next_item_.compare_exchange_weak(next, end, std::memory_order_relaxed));
    return {next, end};
  }

  // How many tokens all items before this one have together.
  int64_t tokens_before(int64_t item) const {
    const Request& request = last_that_begins(&Request::first_item, item);
    const int64_t index = item - request.first_item;
    return request.tokens_before + index / request.chunks * request.length +
           index % request.chunks * request.chunk_tokens;
  }

  // The item in which the token of this number lies.
  int64_t item_with(int64_t token) const {
    const Request& request = last_that_begins(&Request::tokens_before, token);
    const int64_t index = token - request.tokens_before;
    return request.first_item + index / request.length * request.chunks +
           index % request.length / request.chunk_tokens;
  }

  // The last request whose `beginning`, an item or a token, is not behind the given one.
  const Request& last_that_begins(int64_t Request::* beginning, int64_t at) const {
    const auto after = std::upper_bound(requests_.begin(), requests_.end(), at,
                                        [=](int64_t i, const Request& r) { return i < r.*beginning; });
    return *(after - 1);
  }

  Item item_at(int64_t number) const {
    const Request& request = last_that_begins(&Request::first_item, number);
    const int64_t index = number - request.first_item;
    const int64_t range = index / request.chunks;
    const int64_t head = range * heads_per_item_;
    const int64_t heads = std::min<int64_t>(heads_per_item_, cache_.kv_heads - head);
    return {&request, index % request.chunks, range, head, static_cast<int>(heads)};
  }

  // All but the query and the results.
  AttendTask task_of(const Item& item) const {
    const Request& request = *item.request;
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
    task.block_table = static_cast<const int32_t*>(block_tables_.data) + request.b * block_tables_.stride(0);
    const int64_t first = first_of_segment(request.begin) + item.chunk * request.chunk_tokens;
    task.begin = std::max(first, request.begin);
    task.end = std::min(first + request.chunk_tokens, request.end);
    task.block_tokens = block_tokens_;
    task.blocks_per_page = cache_.page_tokens / block_tokens_;
    task.page_tokens = cache_.page_tokens;
    task.kv_heads = item.heads;
    task.group = group_;
    task.padded_group = padded_group_;
    task.head_dim = cache_.head_dim;
    task.padded_head_dim = padded_head_dim_;
    task.score_scale = q_scale_;
    return task;
  }

  void run(const Item& item, AttendTask& task, float* memory) {
    const Request& request = *item.request;
    const auto [b, head, heads] = std::tuple(request.b, item.head, item.heads);
    float* own = memory + q_floats_ + state_floats_;
    // The partial results of one head range lie one after the other, chunk by chunk.
    float* first = partial_memory_ + (request.first_partial + item.range * request.chunks) * partial_floats_;
    const Partial result = partial_at(request.chunks == 1 ? own : first + item.chunk * partial_floats_);

    if (new_rows_ && item.chunk + 1 == request.chunks) append(request, head, heads);
    task.q = memory;
    task.q_bf16 = reinterpret_cast<const BFloat16*>(memory + q_floats_ - q_bf16_floats_);
    task.state = memory + q_floats_;
    task.max = result.max;
    task.sum = result.sum;
    task.acc = result.acc;
    if (dot_products_) {
      kernels_.bf16.attend[static_cast<int>(cache_.dtype)](task);
    } else if (cache_.k_pairs) {
      kernels_.attend_pairs[static_cast<int>(cache_.dtype)](task);
    } else {
      kernels_.attend_rows[static_cast<int>(cache_.dtype)](task);
    }

    if (request.chunks == 1) {
      store_output(b, head, heads, result);
      return;
    }
    // The last to finish sees everybody's results: each decrement releases its own, the last acquires all.
    if (unfinished_[(&request - requests_.data()) * head_ranges_ + item.range].fetch_sub(
            1, std::memory_order_acq_rel) == 1) {
      const Partial merged = partial_at(own);
      for (int h = 0; h < heads; ++h) {
        for (int g = 0; g < group_; ++g) merge(first, request.chunks, h * padded_group_ + g, merged);
      }
      store_output(b, head, heads, merged);
    }
  }

  // Only the item that attends to the last token of these heads reads it: nobody waits for the write.
  void append(const Request& request, int64_t head, int heads) const {
    const int64_t b = request.b;
    const int64_t token = request.end - 1;
    const auto* table = static_cast<const int32_t*>(block_tables_.data) + b * block_tables_.stride(0);
    const int64_t slot = table[token / block_tokens_] * block_tokens_ + token % block_tokens_;
    const int64_t page = slot / cache_.page_tokens;
    const int64_t row = slot % cache_.page_tokens;
    SlotWriter::of_keys(new_rows_->k, cache_, kernels_).write(b, page, row, head, heads);
    SlotWriter::of_values(new_rows_->v, cache_, kernels_).write(b, page, row, head, heads);
  }

  void load_queries(const Item& item, float* q) const {
    if (padded_group_ > group_ || padded_head_dim_ > cache_.head_dim) std::fill(q, q + q_floats_, 0.0f);
    for (int h = 0; h < item.heads; ++h) {
      for (int g = 0; g < group_; ++g) {
        float* row = q + (h * padded_group_ + g) * padded_head_dim_;
        const int64_t at = item.request->b * q_.stride(0) + ((item.head + h) * group_ + g) * q_.stride(1);
        const void* from = offset(q_.data, q_.dtype, at);
        kernels_.widen[static_cast<int>(q_.dtype)](from, row, cache_.head_dim, q_scale_);
        if (dot_products_) {
          void* narrow = q + q_floats_ - q_bf16_floats_ + (row - q) / 2;
          std::memcpy(narrow, from, cache_.head_dim * sizeof(BFloat16));
        }
      }
    }
  }

  void merge(float* first, int64_t chunks, int row, const Partial& result) const {
    float max = partial_at(first).max[row];
    for (int64_t c = 1; c < chunks; ++c)
      max = std::max(max, partial_at(first + c * partial_floats_).max[row]);
    float* acc = result.acc + row * padded_head_dim_;
    std::fill(acc, acc + cache_.head_dim, 0.0f);
    result.sum[row] = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      const Partial part = partial_at(first + c * partial_floats_);
      const float weight = std::exp2(part.max[row] - max);
      const float* values = part.acc + row * padded_head_dim_;
      result.sum[row] += weight * part.sum[row];
      for (int i = 0; i < cache_.head_dim; ++i) acc[i] += weight * values[i];
    }
  }

  void store_output(int64_t b, int64_t head, int heads, const Partial& result) const {
    for (int h = 0; h < heads; ++h) {
      for (int g = 0; g < group_; ++g) {
        const int row = h * padded_group_ + g;
        const float* acc = result.acc + row * padded_head_dim_;
        const int64_t at = b * out_.stride(0) + ((head + h) * group_ + g) * out_.stride(1);
        kernels_.narrow[static_cast<int>(out_.dtype)](acc, offset(out_.data, out_.dtype, at), cache_.head_dim,
                                                      1.0f / result.sum[row]);
      }
    }
  }

  const TensorView& q_;
  const PagedCache& cache_;
  const TensorView& block_tables_;
  const int64_t block_tokens_;
  const TensorView& out_;
  const std::optional<NewRows>& new_rows_;
  const Kernels& kernels_;
  const float q_scale_;
  const int group_;
  const int padded_group_;
  const bool dot_products_;
  const int padded_head_dim_;

  std::vector<Request>& requests_;
  int threads_;
  int heads_per_item_;
  int64_t head_ranges_;
  int64_t items_ = 0;
  int64_t item_tokens_ = 0;  // of all items
  int64_t partials_ = 0;

  int64_t q_floats_ = 0;  // sizes of the parts of the scratch memory; the first holds both forms of q
  int64_t q_bf16_floats_ = 0;
  int64_t state_floats_ = 0;
  int64_t partial_floats_ = 0;
  int64_t thread_floats_ = 0;
  float* thread_memory_ = nullptr;
  float* partial_memory_ = nullptr;

  std::atomic<int>* unfinished_ = nullptr;         // chunks of (request, head range) still to come
  alignas(64) std::atomic<int64_t> next_item_{0};  // apart from what threads only read
};

}  // namespace

void run_decode(const DecodeArguments& arguments, const PagedCache& cache, int64_t block_tokens,
                int64_t window, int num_threads, const Kernels& kernels) {
  DecodeCall(arguments, cache, block_tokens, window, num_threads, kernels).run();
}

}  // namespace neo_desktop
