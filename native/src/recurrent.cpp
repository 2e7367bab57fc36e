#include "neo_desktop/recurrent.h"

#include <algorithm>
#include <cmath>

#include "neo_desktop/kernels.h"
#include "neo_desktop/thread_pool.h"
#include "scratch.h"

namespace neo_desktop {
namespace {

constexpr int kTileTokens = 32;  // whose q, k and v are widened at once
constexpr int64_t kChannelsAtOnce = 64;

const int32_t* integers(const TensorView& tensor) { return static_cast<const int32_t*>(tensor.data); }
float* floats(const TensorView& tensor) { return static_cast<float*>(tensor.data); }

// Returns the number of requests.
int64_t check_rows(const StateRows& rows, int64_t tokens, int64_t num_slots) {
  check_dims(rows.slots, "[requests]", 1);
  const int64_t requests = rows.slots.size(0);
  check_like(rows.slots, "[requests]", {requests}, DType::kInt32);
  check_like(rows.starts, "[requests + 1]", {requests + 1}, DType::kInt32);
  const int32_t* starts = integers(rows.starts);
  std::vector<bool> is_used(num_slots);
  for (int64_t i = 0; i < requests; ++i) {
    const int32_t slot = integers(rows.slots)[i];
    if (slot < 0 || slot >= num_slots) fail("slots: ", slot, " is not one of ", num_slots, " slots");
    if (is_used[slot]) fail("slots: ", slot, " is given to two requests");
    is_used[slot] = true;
    if (starts[i] > starts[i + 1]) fail("starts: ", starts[i + 1], " comes after ", starts[i]);
  }
  if (starts[0] != 0 || starts[requests] != tokens) {
    fail("starts go from ", starts[0], " to ", starts[requests], "; expected 0 and ", tokens, " tokens");
  }
  return requests;
}

// Calls body(item) for each item; a thread that is free takes the next one.
template <class Body>
void for_items(int64_t items, int num_threads, const Body& body) {
  const int64_t threads = std::min<int64_t>(check_num_threads(num_threads), items);
  ThreadPool::shared().run_parts(threads, items, 1, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) body(item);
  });
}

const uint8_t* row_of(const TensorView& tensor, int64_t token, int64_t head) {
  return static_cast<const uint8_t*>(tensor.data) +
         (token * tensor.stride(0) + head * tensor.stride(1)) * size_of(tensor.dtype);
}

}  // namespace

void scan_state(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& decay,
                const std::optional<TensorView>& beta, const TensorView& state, const StateRows& rows,
                const TensorView& out, int num_threads, Isa isa) {
  check_dims(v, "[tokens, heads, value_dim]", 3);
  check_dtype(v, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(v, 1);
  check_dims(k, "[tokens, key_heads, key_dim]", 3);
  const int64_t tokens = v.size(0), heads = v.size(1), value_dim = v.size(2);
  const int64_t key_heads = k.size(1), key_dim = k.size(2);
  check_like(k, "[tokens, key_heads, key_dim]", {tokens, key_heads, key_dim}, v.dtype);
  check_like(q, "[tokens, key_heads, key_dim]", {tokens, key_heads, key_dim}, v.dtype);
  check_like(out, "[tokens, heads, value_dim]", {tokens, heads, value_dim}, v.dtype);
  check_like(decay, "[tokens, heads]", {tokens, heads}, DType::kFloat32);
  if (beta) check_like(*beta, "[tokens, heads]", {tokens, heads}, DType::kFloat32);
  check_dims(state, "[slots, heads, key_dim, value_dim]", 4);
  check_like(state, "[slots, heads, key_dim, value_dim]", {state.size(0), heads, key_dim, value_dim},
             DType::kFloat32, 4);
  if (key_heads == 0 || heads % key_heads != 0) fail(heads, " heads cannot share ", key_heads, " keys");
  const int64_t requests = check_rows(rows, tokens, state.size(0));
  const Kernels& kernels = kernels_for(isa);
  const auto widen = kernels.operators.convert[static_cast<int>(DType::kFloat32)][static_cast<int>(v.dtype)];
  const auto narrow = kernels.operators.convert[static_cast<int>(v.dtype)][static_cast<int>(DType::kFloat32)];

  for_items(requests * heads, num_threads, [&](int64_t item) {
    const int64_t request = item / heads, head = item % heads, key_head = head / (heads / key_heads);
    const int64_t begin = integers(rows.starts)[request], end = integers(rows.starts)[request + 1];
    thread_local ScratchFloats scratch;
    float* tile_q = scratch.take(kTileTokens * (2 * key_dim + value_dim + 2));
    float* tile_k = tile_q + kTileTokens * key_dim;
    float* tile_v = tile_k + kTileTokens * key_dim;
    float* tile_decay = tile_v + kTileTokens * value_dim;
    float* tile_beta = tile_decay + kTileTokens;
    const int64_t slot = integers(rows.slots)[request];
    for (int64_t first = begin; first < end; first += kTileTokens) {
      const int count = static_cast<int>(std::min<int64_t>(end - first, kTileTokens));
      for (int i = 0; i < count; ++i) {
        const int64_t token = first + i;
        widen(row_of(q, token, key_head), tile_q + i * key_dim, static_cast<int>(key_dim));
        widen(row_of(k, token, key_head), tile_k + i * key_dim, static_cast<int>(key_dim));
        widen(row_of(v, token, head), tile_v + i * value_dim, static_cast<int>(value_dim));
        tile_decay[i] = std::exp(floats(decay)[token * decay.stride(0) + head]);
        if (beta) tile_beta[i] = floats(*beta)[token * beta->stride(0) + head];
      }
      kernels.states.scan({tile_q, tile_k, tile_v, tile_decay, beta ? tile_beta : nullptr,
                           floats(state) + (slot * heads + head) * key_dim * value_dim, count,
                           static_cast<int>(key_dim), static_cast<int>(value_dim)});
      for (int i = 0; i < count; ++i) {
        narrow(tile_v + i * value_dim, const_cast<uint8_t*>(row_of(out, first + i, head)),
               static_cast<int>(value_dim));
      }
    }
  });
}

void short_convolution(const TensorView& x, const TensorView& weight, const std::optional<TensorView>& bias,
                       bool has_silu, const TensorView& state, const StateRows& rows, const TensorView& out,
                       int num_threads, Isa isa) {
  check_dims(x, "[tokens, channels]", 2);
  check_dtype(x, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(x, 1);
  check_dims(weight, "[width, channels]", 2);
  const int64_t tokens = x.size(0), channels = x.size(1), width = weight.size(0);
  if (width < 2 || width > kMaxConvolution)
    fail("weight has ", width, " taps; expected 2 to ", kMaxConvolution);
  check_like(weight, "[width, channels]", {width, channels}, DType::kFloat32, 2);
  if (bias) check_like(*bias, "[channels]", {channels}, DType::kFloat32);
  check_like(out, "[tokens, channels]", {tokens, channels}, x.dtype);
  check_dims(state, "[slots, width - 1, channels]", 3);
  check_like(state, "[slots, width - 1, channels]", {state.size(0), width - 1, channels}, DType::kFloat32, 3);
  const int64_t requests = check_rows(rows, tokens, state.size(0));
  const auto convolve = kernels_for(isa).states.convolve[static_cast<int>(x.dtype)];
  const int64_t parts = (channels + kChannelsAtOnce - 1) / kChannelsAtOnce;
  const auto at = [](const TensorView& tensor, int64_t row, int64_t column) {
    return static_cast<uint8_t*>(tensor.data) + (row * tensor.stride(0) + column) * size_of(tensor.dtype);
  };

  for_items(requests * parts, num_threads, [&](int64_t item) {
    const int64_t request = item / parts, first = item % parts * kChannelsAtOnce;
    const int64_t begin = integers(rows.starts)[request], end = integers(rows.starts)[request + 1];
    float* past = floats(state) + integers(rows.slots)[request] * (width - 1) * channels;
    convolve({at(x, begin, first), at(out, begin, first), floats(weight) + first,
              bias ? floats(*bias) + first : nullptr, past + first, x.stride(0), out.stride(0), channels,
              end - begin, static_cast<int>(std::min(channels - first, kChannelsAtOnce)),
              static_cast<int>(width), has_silu});
  });
}

}  // namespace neo_desktop
