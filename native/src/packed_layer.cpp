#include "neo_desktop/packed_layer.h"

#include <algorithm>
#include <deque>

#include "neo_desktop/kernels.h"
#include "packed_product.h"
#include "steps.h"

namespace neo_desktop {
namespace {

uint8_t* row_of(const TensorView& tensor, int64_t row) {
  return static_cast<uint8_t*>(tensor.data) + row * tensor.stride(0) * size_of(tensor.dtype);
}

class Advance {
 public:
  Advance(const PackedLayer* finished, const PackedLayer* begun, const LayerState& state, int threads,
          Isa isa)
      : finished_(finished),
        begun_(begun),
        state_(state),
        isa_(isa),
        operators_(kernels_for(isa).operators),
        dtype_(static_cast<int>(state.x.dtype)),
        rows_(state.x.size(0)) {
    if (finished) {
      add(state.attention, finished->output, state.x);
      add(state.normed, finished->gate_up, state.gate_up);
      add(state.gated, finished->down, state.x);
    }
    if (begun) add(state.normed, begun->qkv, state.qkv);
    int64_t bytes = 0, tiles = 0, columns = 0, row_bytes = 0;
    for (const PackedProduct& product : products_) {
      bytes += product.weight_bytes();
      tiles = std::max(tiles, product.tiles());
      columns = std::max(columns, product.columns());
      row_bytes = std::max(row_bytes, product.row_bytes());
    }
    columns_ = columns;
    threads_ = useful_threads(bytes, tiles, threads);
    memory_ = own_memory(rows_ * row_bytes + threads_ * columns * 4);
    floats_ = reinterpret_cast<float*>(memory_ + rows_ * row_bytes);
    for (PackedProduct& product : products_) product.begin(0, rows_, memory_);
  }

  void run() {
    Steps steps;
    auto product = products_.begin();
    if (finished_) {
      multiply(steps, *product++, [](int64_t) {});
      multiply(steps, *product++, [this](int64_t row) { normalise(row, finished_->post_attention_norm); });
      multiply(steps, *product++, [this](int64_t row) {
        operators_.silu_mul[dtype_](row_of(state_.gate_up, row), row_of(state_.gated, row),
                                    static_cast<int>(state_.gated.size(1)));
      });
    }
    if (begun_) {
      multiply(steps, *product++, [this](int64_t row) { normalise(row, begun_->input_norm); });
      steps.add(rows_, 1, [this](int64_t row, int) {
        operators_.rope[dtype_](row_of(state_.rotated, row), static_cast<int>(state_.rotated.size(1)),
                                static_cast<int>(state_.rotated.size(2)),
                                reinterpret_cast<const float*>(row_of(state_.cos, row)),
                                reinterpret_cast<const float*>(row_of(state_.sin, row)),
                                begun_->qk_norm ? begun_->qk_norm->data : nullptr, begun_->eps);
      });
    }
    steps.run(threads_);
  }

 private:
  void add(const TensorView& x, const PackedMatrix& matrix, const TensorView& out) {
    products_.emplace_back(x, matrix.parts, matrix.bias, out, isa_);
  }

  // Of rows that `prepare` makes first.
  template <class Prepare>
  void multiply(Steps& steps, const PackedProduct& product, Prepare prepare) {
    steps.add(rows_, 1, [this, &product, prepare](int64_t row, int participant) {
      prepare(row);
      product.prepare(row, floats_ + participant * columns_);
    });
    steps.add(product.tiles(), tiles_at_a_time(product.tiles(), threads_),
              [&product](int64_t tile, int) { product.multiply(tile); });
  }

  void normalise(int64_t row, const TensorView& weight) {
    operators_.add_rms_norm[dtype_](row_of(state_.x, row), row_of(state_.residual, row), weight.data,
                                    row_of(state_.normed, row), static_cast<int>(state_.x.size(1)),
                                    (finished_ ? finished_ : begun_)->eps);
  }

  const PackedLayer* const finished_;
  const PackedLayer* const begun_;
  const LayerState& state_;
  const Isa isa_;
  const RowOperators& operators_;
  const int dtype_;
  const int64_t rows_;
  std::deque<PackedProduct> products_;
  int threads_;
  int64_t columns_;  // the most of all products
  uint8_t* memory_;
  float* floats_;  // [threads, columns]
};

// What no product checks.
void check(const PackedLayer* finished, const PackedLayer* begun, const LayerState& state) {
  const int64_t n = state.x.size(0);
  const DType dtype = state.x.dtype;
  const auto like = [&](const TensorView& tensor, int64_t columns) {
    check_shape(tensor, "[n, columns]", {n, columns});
    check_dtype(tensor, {dtype});
    check_packed(tensor, 1);
  };
  const auto weight = [&](const TensorView& tensor) {
    check_shape(tensor, "[hidden]", {state.x.size(1)});
    check_dtype(tensor, {dtype});
    check_packed(tensor, 1);
  };
  check_dims(state.x, "[n, hidden]", 2);
  like(state.residual, state.x.size(1));
  like(state.normed, state.x.size(1));
  check_dims(state.gated, "[n, intermediate]", 2);
  like(state.gate_up, 2 * state.gated.size(1));
  check_dims(state.rotated, "[n, heads, head_dim]", 3);
  check_packed(state.rotated, 2);
  check_dtype(state.rotated, {dtype});
  const int64_t heads = state.rotated.size(1), head_dim = state.rotated.size(2);
  check_shape(state.rotated, "[n, heads, head_dim]", {n, heads, head_dim});
  if (head_dim % 2 != 0) fail("heads have ", head_dim, " dimensions; expected an even number");
  for (const TensorView* angles : {&state.cos, &state.sin}) {
    check_shape(*angles, "[n, head_dim]", {n, head_dim});
    check_dtype(*angles, {DType::kFloat32});
    check_packed(*angles, 1);
  }
  if (finished) weight(finished->post_attention_norm);
  if (begun) {
    weight(begun->input_norm);
    if (begun->qk_norm) {
      check_shape(*begun->qk_norm, "[heads, head_dim]", {heads, head_dim});
      check_dtype(*begun->qk_norm, {dtype});
      check_packed(*begun->qk_norm, 2);
    }
  }
}

}  // namespace

void advance(const PackedLayer* finished, const PackedLayer* begun, const LayerState& state, int num_threads,
             Isa isa) {
  check(finished, begun, state);
  if (state.x.size(0) > 0) Advance(finished, begun, state, check_num_threads(num_threads), isa).run();
}

}  // namespace neo_desktop
