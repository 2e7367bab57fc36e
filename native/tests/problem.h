// Random paged caches, and random calls of decode attention on them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "neo_desktop/cpu.h"
#include "neo_desktop/paged_attention.h"
#include "random.h"
#include "tensor.h"

namespace neo_desktop::testing {

struct CacheShape {
  DType dtype;
  bool pairs;  // K in pairs of dimensions
  int64_t num_pages;
  int64_t kv_heads;
  int64_t page_tokens;
  int64_t head_dim;

  int64_t num_slots() const { return num_pages * page_tokens; }
};

// Pages and heads are in either order, with or without gaps. Initially everything is NaN.
struct Cache {
  Cache(const CacheShape& shape, Random& random);

  CacheShape shape;
  Tensor k;
  Tensor v;
  std::optional<Tensor> k_scale;  // int8 only
  std::optional<Tensor> v_scale;

  const TensorView* k_scale_view() const { return k_scale ? &k_scale->view() : nullptr; }
  const TensorView* v_scale_view() const { return v_scale ? &v_scale->view() : nullptr; }

  int64_t k_at(int64_t slot, int64_t head, int64_t i) const;
  int64_t v_at(int64_t slot, int64_t head, int64_t i) const;
  int64_t scale_at(int64_t slot, int64_t head) const;

  // Scale of a row's elements.
  double scale_of(const std::optional<Tensor>& scale, int64_t slot, int64_t head) const;

  // Makes this slot's key and value NaN again, for all heads.
  void erase(int64_t slot) const;

  // All memory of the cache.
  std::string bytes() const;

  std::string text() const;
};

enum class Kind {
  kOrdinary,
  kLargeLogits,
  kEqualLogits,   // every token has the same key
  kOneDominates,  // one token has nearly all the weight: all other weights vanish
  kDenormals,     // of fp16
  kNotANumber,    // one element of a key, value or query
};

struct DecodePlan;

struct DecodeProblem {
  // `filled`: an ordinary problem whose whole cache holds numbers and whose whole block table is valid,
  // beyond the attended range.
  DecodeProblem(Random& random, bool filled);

  Kind kind;
  int64_t block_tokens;     // a divisor of the cache's page_tokens
  bool default_block_size;  // they are equal, and the call omits the block size
  Cache cache;
  Tensor q;
  Tensor out;
  Tensor block_tables;
  Tensor context_lens;
  std::optional<Tensor> new_k;  // the newest tokens' rows, if the call writes them
  std::optional<Tensor> new_v;
  std::optional<Tensor> sinks;
  float scale;
  float softcap;  // 0: none
  int64_t window;
  int num_threads;

  int64_t batch() const { return q.view().shape[0]; }
  int64_t heads() const { return q.view().shape[1]; }
  int64_t first_token(int64_t b) const;
  int64_t context_len(int64_t b) const { return context_lens.as<int32_t>()[b]; }

  int64_t num_blocks() const { return cache.shape.num_slots() / block_tokens; }

  // Entry of the request's block table.
  int64_t block(int64_t b, int64_t index) const {
    return block_tables.as<int32_t>()[block_tables.at({b, index})];
  }

  // Slot of the request's token.
  int64_t slot(int64_t b, int64_t token) const {
    return block(b, token / block_tokens) * block_tokens + token % block_tokens;
  }

  const TensorView* sinks_view() const { return sinks ? &sinks->view() : nullptr; }
  DecodeArguments arguments() const;
  void call(Isa isa, int threads) const;

  // Sets the slots that the call will write to NaN.
  void erase_new_tokens() const;
  std::string text() const;

 private:
  DecodeProblem(const DecodePlan& plan, Random& random, bool filled);
  void write_new_rows(Random& random);
};

}  // namespace neo_desktop::testing
