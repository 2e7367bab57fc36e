#include "neo_desktop/packed_experts.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "neo_desktop/thread_pool.h"
#include "packed_product.h"
#include "steps.h"

namespace neo_desktop {
namespace {

constexpr int64_t kLine = 64;          // bytes
constexpr int64_t kSumColumns = 1024;  // that a thread sums at a time

uint8_t* row_of(const TensorView& tensor, int64_t row) {
  return static_cast<uint8_t*>(tensor.data) + row * tensor.stride(0) * size_of(tensor.dtype);
}

TensorView rows_of(const TensorView& tensor, int64_t first, int64_t count) {
  TensorView view = tensor;
  view.data = row_of(tensor, first);
  view.shape[0] = count;
  return view;
}

TensorView columns_of(const TensorView& tensor, int64_t first, int64_t count) {
  TensorView view = tensor;
  view.data = static_cast<uint8_t*>(tensor.data) + first * size_of(tensor.dtype);
  view.shape[1] = count;
  return view;
}

// Rows that are routed to one expert, consecutive in the grouped tensors.
struct Group {
  Group(const PackedExperts& experts, int64_t expert, const ExpertRows& rows, int64_t first, int64_t count,
        Isa isa)
      : first(first),
        count(count),
        x(rows_of(rows.products, first, count)),
        gates(columns_of(rows_of(rows.gate_up, first, count), 0, rows.gated.size(1))),
        ups(columns_of(rows_of(rows.gate_up, first, count), rows.gated.size(1), rows.gated.size(1))),
        gated(rows_of(rows.gated, first, count)),
        gate(x, experts.gate[expert].parts, experts.gate[expert].bias, gates, isa),
        up(x, experts.up[expert].parts, experts.up[expert].bias, ups, isa),
        down(gated, experts.down[expert].parts, experts.down[expert].bias, x, isa) {}

  const int64_t first, count;
  const TensorView x, gates, ups, gated;
  PackedProduct gate, up, down;
};

int64_t num_pairs(const ExpertRows& rows) {
  const auto* ids = static_cast<const int32_t*>(rows.ids.data);
  return std::count_if(ids, ids + rows.ids.size(0) * rows.ids.size(1), [](int32_t id) { return id >= 0; });
}

class Experts {
 public:
  Experts(const PackedExperts& experts, const ExpertRows& rows, int threads, Isa isa)
      : rows_(rows),
        alike_(experts.alike),
        clamped_(experts.clamped),
        is_one_(experts.is_one),
        gate_by_(static_cast<int>(experts.gate_by)),
        kernels_(kernels_for(isa)),
        dtype_(static_cast<int>(rows.x.dtype)),
        per_row_(rows.ids.size(1)),
        pairs_(num_pairs(rows)) {
    group(experts, isa);
    int64_t bytes = 0, memory = 0;
    const Group& any = groups_.front();
    columns_ = std::max({any.gate.columns(), any.down.columns(), 2 * kSumColumns});
    const int64_t both_bytes = any.gate.row_bytes() + (alike_ ? 0 : any.up.row_bytes());
    const int64_t row_bytes = std::max(both_bytes, any.down.row_bytes()) + kLine;
    for (const Group& each : groups_) {
      bytes += each.gate.weight_bytes() + each.down.weight_bytes();
      if (!is_one_) bytes += each.up.weight_bytes();
      memory += (each.count * row_bytes + kLine - 1) / kLine * kLine;
    }
    const int64_t tiles = static_cast<int64_t>(groups_.size()) * any.down.tiles();
    threads_ = useful_threads(bytes, tiles, threads);
    uint8_t* own = own_memory(memory + threads_ * columns_ * 4);
    floats_ = reinterpret_cast<float*>(own + memory);
    for (Group& each : groups_) {
      each.gate.begin(0, each.count, own);
      const int64_t gate_bytes = (each.count * each.gate.row_bytes() + kLine - 1) / kLine * kLine;
      each.up.begin(0, each.count, alike_ ? own : own + gate_bytes);
      each.down.begin(0, each.count, own);
      own += (each.count * row_bytes + kLine - 1) / kLine * kLine;
    }
  }

  void run() {
    Steps steps;
    steps.add(pairs_, 1, [this](int64_t pair, int participant) {
      const Group& of = *group_of_[pair];
      std::memcpy(row_of(rows_.products, pair), row_of(rows_.x, source_[pair]),
                  rows_.x.size(1) * size_of(rows_.x.dtype));
      of.gate.prepare(pair - of.first, floats_ + participant * columns_);
      if (!alike_) of.up.prepare(pair - of.first, floats_ + participant * columns_);
    });
    const int64_t gates = groups_.front().gate.tiles();
    const int64_t both = gates + (is_one_ ? 0 : groups_.front().up.tiles());
    add_tiles(steps, both, [gates](const Group& of, int64_t tile) {
      tile < gates ? of.gate.multiply(tile) : of.up.multiply(tile - gates);
    });
    steps.add(pairs_, 1, [this](int64_t pair, int participant) {
      const Group& of = *group_of_[pair];
      const auto length = static_cast<int>(rows_.gated.size(1));
      const uint8_t* gate_up = row_of(rows_.gate_up, pair);
      uint8_t* gated = row_of(rows_.gated, pair);
      if (clamped_) {
        kernels_.operators.clamped_mul[dtype_](gate_up, gated, length, clamped_->alpha, clamped_->limit);
      } else if (gate_by_ != static_cast<int>(Unary::kSilu) || is_one_) {
        const uint8_t* up = gate_up + (is_one_ ? 0 : length * size_of(rows_.x.dtype));
        kernels_.operators.unary[gate_by_][dtype_](gate_up, gated, length);
        kernels_.operators.binary[static_cast<int>(Binary::kTimes)][dtype_](gated, up, gated, length);
      } else {
        kernels_.operators.silu_mul[dtype_](gate_up, gated, length);
      }
      of.down.prepare(pair - of.first, floats_ + participant * columns_);
    });
    add_tiles(steps, groups_.front().down.tiles(),
              [](const Group& of, int64_t tile) { of.down.multiply(tile); });
    const int64_t pieces = (rows_.x.size(1) + kSumColumns - 1) / kSumColumns;
    steps.add(rows_.x.size(0) * pieces, 1, [this, pieces](int64_t item, int participant) {
      add_up(item / pieces, item % pieces * kSumColumns, floats_ + participant * columns_);
    });
    steps.run(threads_);
  }

 private:
  // Groups rows by expert; rows of one expert keep their order.
  void group(const PackedExperts& experts, Isa isa) {
    const int64_t count = static_cast<int64_t>(experts.gate.size());
    const auto* ids = static_cast<const int32_t*>(rows_.ids.data);
    std::vector<int64_t> next(count + 1);
    const int64_t all = rows_.x.size(0) * per_row_;
    for (int64_t pair = 0; pair < all; ++pair) {
      if (ids[pair] >= 0) ++next[ids[pair] + 1];
    }
    for (int64_t expert = 0; expert < count; ++expert) next[expert + 1] += next[expert];
    group_of_.resize(pairs_);
    for (int64_t expert = 0; expert < count; ++expert) {
      const int64_t first = next[expert], of_it = next[expert + 1] - first;
      if (of_it == 0) continue;
      groups_.emplace_back(experts, expert, rows_, first, of_it, isa);
      std::fill_n(group_of_.begin() + first, of_it, &groups_.back());
    }
    source_.resize(pairs_);
    place_.resize(all, -1);
    for (int64_t pair = 0; pair < all; ++pair) {
      if (ids[pair] < 0) continue;
      const int64_t place = next[ids[pair]]++;
      place_[pair] = place;
      source_[place] = pair / per_row_;
    }
  }

  template <class Multiply>
  void add_tiles(Steps& steps, int64_t tiles, Multiply multiply) {
    const int64_t all = static_cast<int64_t>(groups_.size()) * tiles;
    steps.add(all, tiles_at_a_time(all, threads_),
              [this, tiles, multiply](int64_t item, int) { multiply(groups_[item / tiles], item % tiles); });
  }

  void add_up(int64_t row, int64_t first, float* floats) const {
    const int64_t count = std::min(kSumColumns, rows_.x.size(1) - first), size = size_of(rows_.x.dtype);
    const auto* weights = reinterpret_cast<const float*>(row_of(rows_.weights, row));
    float* sums = floats + kSumColumns;
    std::fill_n(sums, count, 0.0f);
    for (int64_t i = 0; i < per_row_; ++i) {
      if (place_[row * per_row_ + i] < 0) continue;
      const uint8_t* product = row_of(rows_.products, place_[row * per_row_ + i]) + first * size;
      kernels_.widen[dtype_](product, floats, static_cast<int>(count), weights[i]);
      for (int64_t j = 0; j < count; ++j) sums[j] += floats[j];
    }
    kernels_.narrow[dtype_](sums, row_of(rows_.out, row) + first * size, static_cast<int>(count), 1.0f);
  }

  const ExpertRows& rows_;
  const bool alike_;  // gates and ups share prepared rows
  const std::optional<ClampedGate> clamped_;
  const bool is_one_;
  const int gate_by_;
  const Kernels& kernels_;
  const int dtype_;
  const int64_t per_row_;
  const int64_t pairs_;           // (row, expert) pairs
  std::deque<Group> groups_;      // of experts with rows
  std::vector<Group*> group_of_;  // by place
  std::vector<int64_t> source_;   // place -> row
  std::vector<int64_t> place_;    // [n, k]; -1: no expert
  int threads_;
  int64_t columns_;
  float* floats_;  // [threads, columns]
};

void check_ids(const ExpertRows& rows, int64_t count) {
  const auto* ids = static_cast<const int32_t*>(rows.ids.data);
  for (int64_t i = 0; i < rows.ids.size(0) * rows.ids.size(1); ++i) {
    if (ids[i] < -1 || ids[i] >= count) fail("ids has ", ids[i], "; there are ", count, " experts");
  }
}

}  // namespace

ExpertRows ExpertRows::part(int64_t first, int64_t count) const {
  const int64_t pairs = count * ids.size(1);
  return {rows_of(x, first, count),   rows_of(ids, first, count), rows_of(weights, first, count),
          rows_of(gate_up, 0, pairs), rows_of(gated, 0, pairs),   rows_of(products, 0, pairs),
          rows_of(out, first, count)};
}

// Checks everything except the arguments of the individual matmuls.
void check_experts(const ExpertRows& rows) {
  check_dims(rows.x, "[n, hidden]", 2);
  check_dtype(rows.x, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(rows.x, 1);
  check_dims(rows.ids, "[n, k]", 2);
  check_dims(rows.gated, "[n * k, intermediate]", 2);
  const int64_t n = rows.x.size(0), k = rows.ids.size(1), hidden = rows.x.size(1);
  const int64_t intermediate = rows.gated.size(1);
  if (hidden % 8 != 0) fail("x has ", hidden, " columns; expected a multiple of 8");
  if (k < 1) fail("rows have no experts");
  check_shape(rows.ids, "[n, k]", {n, k});
  check_dtype(rows.ids, {DType::kInt32});
  check_packed(rows.ids, 2);
  check_shape(rows.weights, "[n, k]", {n, k});
  check_dtype(rows.weights, {DType::kFloat32});
  check_packed(rows.weights, 1);
  const auto room = [&](const TensorView& tensor, int64_t count, int64_t columns) {
    check_shape(tensor, "[rows, columns]", {count, columns});
    check_dtype(tensor, {rows.x.dtype});
    check_packed(tensor, 1);
    check_no_overlap(tensor, 1);
  };
  room(rows.gate_up, n * k, 2 * intermediate);
  room(rows.gated, n * k, intermediate);
  room(rows.products, n * k, hidden);
  room(rows.out, n, hidden);
}

PackedExperts packed_experts(int64_t count, const PackedMatrix& gate, const PackedMatrix& up,
                             const PackedMatrix& down, std::optional<ClampedGate> clamped, Unary gate_by) {
  if (clamped && !(clamped->alpha > 0 && clamped->limit > 0))
    fail("alpha and limit of gates must be above 0");
  bool alike = true;
  for (const PackedPart& one : gate.parts) {
    for (const PackedPart& other : up.parts) {
      alike = alike && (one.type == other.type || (!is_dense(one.type) && !is_dense(other.type)));
    }
  }
  const bool is_one = !clamped && !gate.parts.empty() && !up.parts.empty() &&
                      gate.parts.front().packed == up.parts.front().packed;
  return {divided(gate, count), divided(up, count), divided(down, count), alike, clamped, gate_by, is_one};
}

void multiply_experts(const PackedExperts& experts, const ExpertRows& rows, int num_threads, Isa isa) {
  check_experts(rows);
  check_ids(rows, static_cast<int64_t>(experts.gate.size()));
  if (num_pairs(rows) == 0) {
    for (int64_t row = 0; row < rows.out.size(0); ++row) {
      std::memset(row_of(rows.out, row), 0, rows.out.size(1) * size_of(rows.out.dtype));
    }
    return;
  }
  if (rows.x.size(0) > 0) Experts(experts, rows, check_num_threads(num_threads), isa).run();
}

}  // namespace neo_desktop
