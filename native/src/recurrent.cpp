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

float* floats(const TensorView& tensor) { return static_cast<float*>(tensor.data); }

struct Span {
  int32_t first, end, source, target;
};

// Returns the spans; `num_slots` of the states.
std::vector<Span> check_spans(const TensorView& spans, int64_t tokens, int64_t num_slots) {
  check_dims(spans, "[spans, 4]", 2);
  const int64_t count = spans.size(0);
  check_like(spans, "[spans, 4]", {count, 4}, DType::kInt32, 2);
  const int32_t* numbers = static_cast<const int32_t*>(spans.data);
  std::vector<Span> checked;
  std::vector<int64_t> reader(num_slots, -1), writer(num_slots, -1);
  for (int64_t i = 0; i < count; ++i, numbers += 4) {
    const Span span{numbers[0], numbers[1], numbers[2], numbers[3]};
    if (span.first < 0 || span.first > span.end || span.end > tokens)
      fail("spans: ", span.first, " to ", span.end, " is not a span of ", tokens, " tokens");
    for (const int32_t slot : {span.source, span.target}) {
      if (slot < -1 || slot >= num_slots) fail("spans: ", slot, " is not one of ", num_slots, " slots");
    }
    if (span.source >= 0) reader[span.source] = i;
    if (span.target >= 0) {
      if (writer[span.target] >= 0) fail("spans: slot ", span.target, " is the target of two spans");
      writer[span.target] = i;
    }
    checked.push_back(span);
  }
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (reader[slot] >= 0 && writer[slot] >= 0 && reader[slot] != writer[slot])
      fail("spans: slot ", slot, " is the source of one span and the target of another");
  }
  return checked;
}

// Returns where a span's state is updated: its target, or `scratch`, with the `size` numbers of the source.
float* begin_state(float* states, const Span& span, int64_t slot_size, int64_t offset, int64_t size,
                   float* scratch) {
  float* state = span.target < 0 ? scratch : states + span.target * slot_size + offset;
  if (span.source < 0) {
    std::fill_n(state, size, 0.0F);
  } else if (span.source != span.target) {
    std::copy_n(states + span.source * slot_size + offset, size, state);
  }
  return state;
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
                const TensorView& beta, bool is_delta, const TensorView& state, const TensorView& spans,
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
  check_like(beta, "[tokens, heads]", {tokens, heads}, DType::kFloat32);
  check_dims(state, "[slots, heads, key_dim, value_dim]", 4);
  check_like(state, "[slots, heads, key_dim, value_dim]", {state.size(0), heads, key_dim, value_dim},
             DType::kFloat32, 4);
  if (key_heads == 0 || heads % key_heads != 0) fail(heads, " heads cannot share ", key_heads, " keys");
  const std::vector<Span> checked = check_spans(spans, tokens, state.size(0));
  const Kernels& kernels = kernels_for(isa);
  const auto widen = kernels.operators.convert[static_cast<int>(DType::kFloat32)][static_cast<int>(v.dtype)];
  const auto narrow = kernels.operators.convert[static_cast<int>(v.dtype)][static_cast<int>(DType::kFloat32)];

  const int64_t head_size = key_dim * value_dim;
  for_items(static_cast<int64_t>(checked.size()) * heads, num_threads, [&](int64_t item) {
    const Span span = checked[item / heads];
    const int64_t head = item % heads, key_head = head / (heads / key_heads);
    thread_local ScratchFloats scratch;
    float* tile_q = scratch.take(kTileTokens * (2 * key_dim + value_dim + 2) + head_size);
    float* tile_k = tile_q + kTileTokens * key_dim;
    float* tile_v = tile_k + kTileTokens * key_dim;
    float* tile_decay = tile_v + kTileTokens * value_dim;
    float* tile_beta = tile_decay + kTileTokens;
    const auto state_in = [&](int32_t slot) { return floats(state) + (slot * heads + head) * head_size; };
    float* own = span.target < 0 ? tile_beta + kTileTokens : state_in(span.target);
    const float* before = span.source < 0 ? own : state_in(span.source);
    if (span.source < 0) std::fill_n(own, head_size, 0.0F);
    if (span.first == span.end && own != before) std::copy_n(before, head_size, own);
    for (int64_t first = span.first; first < span.end; first += kTileTokens) {
      const int count = static_cast<int>(std::min<int64_t>(span.end - first, kTileTokens));
      for (int i = 0; i < count; ++i) {
        const int64_t token = first + i;
        widen(row_of(q, token, key_head), tile_q + i * key_dim, static_cast<int>(key_dim));
        widen(row_of(k, token, key_head), tile_k + i * key_dim, static_cast<int>(key_dim));
        widen(row_of(v, token, head), tile_v + i * value_dim, static_cast<int>(value_dim));
        tile_decay[i] = std::exp(floats(decay)[token * decay.stride(0) + head]);
        tile_beta[i] = floats(beta)[token * beta.stride(0) + head];
        if (is_delta) continue;
        for (int64_t c = i * value_dim; c < (i + 1) * value_dim; ++c) tile_v[c] *= tile_beta[i];
      }
      kernels.states.scan({tile_q, tile_k, tile_v, tile_decay, is_delta ? tile_beta : nullptr, before, own,
                           count, static_cast<int>(key_dim), static_cast<int>(value_dim)});
      before = own;
      for (int i = 0; i < count; ++i) {
        narrow(tile_v + i * value_dim, const_cast<uint8_t*>(row_of(out, first + i, head)),
               static_cast<int>(value_dim));
      }
    }
  });
}

void short_convolution(const TensorView& x, const TensorView& weight, const std::optional<TensorView>& bias,
                       bool has_silu, const TensorView& state, const TensorView& spans, const TensorView& out,
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
  const std::vector<Span> checked = check_spans(spans, tokens, state.size(0));
  const auto convolve = kernels_for(isa).states.convolve[static_cast<int>(x.dtype)];
  const int64_t parts = (channels + kChannelsAtOnce - 1) / kChannelsAtOnce;
  const auto at = [](const TensorView& tensor, int64_t row, int64_t column) {
    return static_cast<uint8_t*>(tensor.data) + (row * tensor.stride(0) + column) * size_of(tensor.dtype);
  };

  for_items(static_cast<int64_t>(checked.size()) * parts, num_threads, [&](int64_t item) {
    const Span span = checked[item / parts];
    const int64_t first = item % parts * kChannelsAtOnce, some = std::min(channels - first, kChannelsAtOnce);
    thread_local ScratchFloats scratch;
    float* dropped = scratch.take((width - 1) * channels);
    float* past = span.target < 0 ? dropped : floats(state) + span.target * (width - 1) * channels;
    for (int64_t i = 0; i + 1 < width; ++i) {
      begin_state(floats(state), span, (width - 1) * channels, i * channels + first, some,
                  dropped + i * channels + first);
    }
    convolve({at(x, span.first, first), at(out, span.first, first), floats(weight) + first,
              bias ? floats(*bias) + first : nullptr, past + first, x.stride(0), out.stride(0), channels,
              span.end - span.first, static_cast<int>(some), static_cast<int>(width), has_silu});
  });
}

}  // namespace neo_desktop
