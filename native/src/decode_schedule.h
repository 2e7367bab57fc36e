// The order in which threads process the parts of a call of decode attention.
//
// The work is cut into items: a chunk of one request's context, for some of the KV heads. Chunks depend only
// on the request's length and on the model, so a result never depends on the batch or on the number of
// threads. Items take all KV heads while much work is left, and fewer heads near the end. The heads of a page
// are adjacent in memory, and sequential reads are faster, but threads should finish together.
//
//   request 0, 1300 tokens    [0,1024) heads 0-7   [1024,1300) heads 0-7
//   request 1,   90 tokens    [0,90)   heads 0-3   [0,90)      heads 4-7
//
// Threads take runs of adjacent items, long at first and shorter near the end (guided self-scheduling), so
// that one thread processes most chunks of a request. Data that another core has just written arrives slowly:
// with threads on different dies, distribution one item at a time was a fifth slower.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace neo_desktop {

struct DecodeRequest {
  int64_t b;  // row of the batch, the first one
  int64_t
      rows;  // of one sequence, consecutive in the batch; each attends to a token more than the one before
  int64_t begin;        // first token attended to
  int64_t end;          // of the last row
  int64_t first_chunk;  // first token of the first chunk, a multiple of chunk_tokens
  int64_t chunk_tokens;
  int64_t chunks;
  int64_t heads_per_item;
  int64_t head_ranges;
  // Totals of the requests before this one:
  int64_t items_before;
  int64_t work_before;  // tokens times KV heads
  int64_t head_ranges_before;
  int64_t partial_heads_before;  // KV heads, times rows, of items whose results must be merged
};

struct DecodeItem {
  const DecodeRequest* request;
  int64_t chunk;
  int64_t range;
  int64_t head;  // the first one
  int heads;
  int64_t begin;  // tokens attended to
  int64_t end;
};

class DecodeSchedule {
 public:
  // Costs per token and KV head.
  struct Shape {
    int64_t kv_heads;
    int64_t group;            // query heads per KV head
    int64_t bytes_per_token;  // keys and values of one KV head
  };

  // Requests of these lengths, which attend to their last `window` tokens only unless it is 0. Requests of
  // length 0 are skipped. `requests` is working memory, and must live as long as the schedule.
  //
  // `continues[b]` says that b is a row of the same sequence as b - 1, one token longer. Rows of a sequence
  // become one request, so that they share a reading of its keys and values.
  DecodeSchedule(const int32_t* context_lens, const std::vector<char>& continues, int64_t batch,
                 int64_t window, const Shape& shape, int num_threads, std::vector<DecodeRequest>& requests);

  int threads() const { return threads_; }  // number of threads with work
  const std::vector<DecodeRequest>& requests() const { return requests_; }
  int64_t head_ranges() const { return head_ranges_; }                  // total of the requests
  int64_t partial_heads() const { return partial_heads_; }              // see DecodeRequest
  int64_t most_heads_per_item() const { return most_heads_per_item_; }  // KV heads
  int64_t most_head_rows() const { return most_head_rows_; }            // KV heads of an item, times its rows

  // Items [next, end).
  struct Batch {
    int64_t next;
    int64_t end;
  };

  // The next items, a thread's share of the rest: all chunks of a request's heads or, if these are too many,
  // some. Empty at the end.
  Batch take();

  // True if enough items are left for a thread to reserve some before it starts them.
  bool many_left() const { return next_item_.load(std::memory_order_relaxed) < items_ - 2 * threads_; }

  DecodeItem item(int64_t number) const;

 private:
  int64_t work_up_to(int64_t item) const;
  int64_t item_with(int64_t work) const;
  const DecodeRequest& last_that_begins(int64_t DecodeRequest::* beginning, int64_t at) const;

  std::vector<DecodeRequest>& requests_;
  int64_t kv_heads_;
  int threads_;
  int64_t items_ = 0;
  int64_t work_ = 0;
  int64_t head_ranges_ = 0;
  int64_t partial_heads_ = 0;
  int64_t most_heads_per_item_ = 0;
  int64_t most_head_rows_ = 0;
  alignas(64) std::atomic<int64_t> next_item_{0};  // separate from the read-only members
};

}  // namespace neo_desktop
