#include "decode_schedule.h"

#include <algorithm>

#include "attention_order.h"

namespace neo_desktop {
namespace {

// Waking a thread takes about as long as reading this many bytes.
constexpr int64_t kMinBytesPerThread = 32 << 10;

// The rest is divided into at least this many items per thread. Larger items make threads finish further
// apart; smaller items read memory in shorter pieces.
constexpr int64_t kItemsPerThread = 4;

// And into at least this many batches per thread. Larger batches make threads finish further apart; with
// smaller batches threads share more memory.
constexpr int64_t kBatchesPerThread = 3;

// The rows of a sequence are divided where they would make fewer items than this per thread.
constexpr int64_t kRowItemsPerThread = 2;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t length_of(const DecodeRequest& request) { return request.end - request.begin; }

// Attended tokens before a chunk.
int64_t tokens_before(const DecodeRequest& request, int64_t chunk) {
  return std::max<int64_t>(0, request.first_chunk + chunk * request.chunk_tokens - request.begin);
}

// The chunk of the token that follows this many attended tokens.
int64_t chunk_after(const DecodeRequest& request, int64_t tokens) {
  return (request.begin - request.first_chunk + tokens) / request.chunk_tokens;
}

int64_t longest_chunk(const DecodeRequest& request) {
  return std::min(request.chunk_tokens, length_of(request));
}

// True if a row can join the request of the rows before it: their chunks must be the same, up to their ends.
bool can_join(const DecodeRequest& request, const ContextChunks& chunks) {
  return request.begin == chunks.begin && request.first_chunk == chunks.first &&
         request.chunk_tokens == chunks.tokens && request.chunks == chunks.count;
}

}  // namespace

DecodeSchedule::DecodeSchedule(const int32_t* context_lens, const std::vector<char>& continues, int64_t batch,
                               int64_t window, const Shape& shape, int num_threads,
                               std::vector<DecodeRequest>& requests)
    : requests_(requests), kv_heads_(shape.kv_heads) {
  requests_.clear();
  const int64_t sequences = batch - std::count(continues.begin(), continues.end(), 1);
  int64_t most_rows = 1;
  for (int64_t b = 0; b < batch; ++b) {
    if (context_lens[b] == 0) continue;
    const ContextChunks chunks = ContextChunks::of(context_lens[b], window, shape.group);
    if (!continues[b]) {
      const auto first_row = continues.begin() + b;
      const int64_t rows = std::find(first_row + 1, continues.end(), 0) - first_row;
      const int64_t items = sequences * kv_heads_ * chunks.count;
      most_rows = divide_up(rows, divide_up(kRowItemsPerThread * num_threads, items));
    }
    if (continues[b] && can_join(requests_.back(), chunks) && requests_.back().rows < most_rows) {
      requests_.back().rows += 1;
      requests_.back().end = chunks.end;
      work_ += kv_heads_;
      continue;
    }
    DecodeRequest request{};
    request.b = b;
    request.rows = 1;
    request.begin = chunks.begin;
    request.end = chunks.end;
    request.first_chunk = chunks.first;
    request.chunk_tokens = chunks.tokens;
    request.chunks = chunks.count;
    requests_.push_back(request);
    work_ += length_of(request) * kv_heads_;
  }
  // The longest items first, so that no thread has a long one at the end.
  std::sort(requests_.begin(), requests_.end(), [](const DecodeRequest& x, const DecodeRequest& y) {
    const int64_t of_x = longest_chunk(x);
    const int64_t of_y = longest_chunk(y);
    return of_x != of_y ? of_x > of_y : x.b < y.b;
  });
  const int64_t useful_threads =
      std::min<int64_t>(num_threads, 1 + work_ * shape.bytes_per_token / kMinBytesPerThread);
  int64_t done = 0;
  for (DecodeRequest& request : requests_) {
    const int64_t length = length_of(request);
    const int64_t most = std::max<int64_t>(1, (work_ - done) / (useful_threads * kItemsPerThread));
    const int64_t ranges = divide_up(longest_chunk(request) * kv_heads_, most);
    request.heads_per_item =
        useful_threads > 1 ? divide_up(kv_heads_, std::min(ranges, kv_heads_)) : kv_heads_;
    request.head_ranges = divide_up(kv_heads_, request.heads_per_item);
    request.items_before = items_;
    request.work_before = done;
    request.head_ranges_before = head_ranges_;
    request.partial_heads_before = partial_heads_;
    items_ += request.chunks * request.head_ranges;
    done += length * kv_heads_;
    head_ranges_ += request.head_ranges;
    const int64_t head_rows = request.heads_per_item * request.rows;
    if (request.chunks > 1) partial_heads_ += request.chunks * request.head_ranges * head_rows;
    most_heads_per_item_ = std::max(most_heads_per_item_, request.heads_per_item);
    most_head_rows_ = std::max(most_head_rows_, head_rows);
  }
  threads_ = static_cast<int>(std::min(useful_threads, items_));
}

DecodeSchedule::Batch DecodeSchedule::take() {
  int64_t next = next_item_.load(std::memory_order_relaxed);
  int64_t end;
  do {
    if (next >= items_) return {items_, items_};
    const int64_t before = work_up_to(next);
    end = std::max(next + 1, item_with(before + (work_ - before) / (threads_ * kBatchesPerThread)));
    if (end < items_) {
      const int64_t first_chunk = end - item(end).chunk;
      if (first_chunk > next) end = first_chunk;
    }
  } while (!next_item_.compare_exchange_weak(next, end, std::memory_order_relaxed));
  return {next, end};
}

DecodeItem DecodeSchedule::item(int64_t number) const {
  const DecodeRequest& request = last_that_begins(&DecodeRequest::items_before, number);
  const int64_t index = number - request.items_before;
  const int64_t chunk = index % request.chunks;
  const int64_t range = index / request.chunks;
  const int64_t head = range * request.heads_per_item;
  const int64_t first = request.first_chunk + chunk * request.chunk_tokens;
  return {&request,
          chunk,
          range,
          head,
          static_cast<int>(std::min(request.heads_per_item, kv_heads_ - head)),
          std::max(first, request.begin),
          std::min(first + request.chunk_tokens, request.end)};
}

// Total work of the items before this one.
int64_t DecodeSchedule::work_up_to(int64_t item) const {
  const DecodeRequest& request = last_that_begins(&DecodeRequest::items_before, item);
  const int64_t index = item - request.items_before;
  const int64_t length = length_of(request);
  const int64_t tokens = index / request.chunks * length + tokens_before(request, index % request.chunks);
  return request.work_before + tokens * request.heads_per_item;
}

// The item at which the cumulative work of the items, in order, reaches `work`.
int64_t DecodeSchedule::item_with(int64_t work) const {
  const DecodeRequest& request = last_that_begins(&DecodeRequest::work_before, work);
  const int64_t length = length_of(request);
  const int64_t tokens = (work - request.work_before) / request.heads_per_item;
  return request.items_before + tokens / length * request.chunks + chunk_after(request, tokens % length);
}

// The last request whose `beginning`, an item or an amount of work, is at most `at`.
const DecodeRequest& DecodeSchedule::last_that_begins(int64_t DecodeRequest::* beginning, int64_t at) const {
  const auto after = std::upper_bound(requests_.begin(), requests_.end(), at,
                                      [=](int64_t i, const DecodeRequest& r) { return i < r.*beginning; });
  return *(after - 1);
}

}  // namespace neo_desktop
