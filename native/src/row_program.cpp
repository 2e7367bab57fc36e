#include "neo_desktop/row_program.h"

#include <algorithm>
#include <deque>
#include <iterator>

#include "neo_desktop/kernels.h"
#include "packed_product.h"
#include "steps.h"

namespace neo_desktop {
namespace {

constexpr int64_t kAlignment = 64;            // of buffers: a cache line
constexpr int64_t kSerialElements = 1 << 15;  // one thread processes them before others wake
constexpr int64_t kRowsAtOnce = 512;          // rows with buffers in memory; more rows are processed in parts
constexpr int64_t kTakesPerThread = 8;        // of rows, so that others can do the work of a delayed thread

struct OpTraits {
  const char* name;
  size_t sources;
};

// In the order of RowOp.
constexpr OpTraits kTraits[] = {
    {"multiply", 1},   {"add_rms_norm", 2}, {"rms_norm", 1},  {"layer_norm", 1}, {"silu_mul", 1},
    {"rope", 2},       {"copy", 1},         {"add", 2},       {"subtract", 2},   {"times", 2},
    {"add_number", 1}, {"times_number", 1}, {"silu", 1},      {"sigmoid", 1},    {"tanh", 1},
    {"relu", 1},       {"gelu", 1},         {"gelu_tanh", 1}, {"softplus", 1},
};
static_assert(std::size(kTraits) == static_cast<size_t>(RowOp::kSoftplus) + 1);

OpTraits traits_of(RowOp op) {
  const auto index = static_cast<size_t>(op);
  if (index >= std::size(kTraits)) fail("there is no such step");
  return kTraits[index];
}

bool is_binary(RowOp op) { return op == RowOp::kAdd || op == RowOp::kSubtract || op == RowOp::kTimes; }

int offset_in(RowOp op, RowOp first) { return static_cast<int>(op) - static_cast<int>(first); }

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Columns [first, first + length) of a buffer.
TensorView part_of(const TensorView& buffer, int64_t first, int64_t length) {
  void* data = static_cast<uint8_t*>(buffer.data) + first * size_of(buffer.dtype);
  return {buffer.name, data, buffer.dtype, {buffer.size(0), length}, {buffer.stride(0), 1}};
}

// One call of a program.
class Run {
 public:
  // buffers: with their memory, or without; `run` then provides it.
  Run(const std::vector<RowStep>& program, std::vector<TensorView> buffers, int64_t rows, int num_threads,
      Isa isa)
      : program_(program), buffers_(std::move(buffers)), rows_(rows), operators_(kernels_for(isa).operators) {
    int64_t elements = 0, weight_bytes = 0, tiles = 1;
    for (const RowStep& step : program_) {
      elements += rows_ * step.groups * step.length;
      if (step.matrices.empty()) continue;
      const auto heads = static_cast<int64_t>(step.matrices.size());
      for (int64_t head = 0; head < heads; ++head) {
        const TensorView& x = views_.emplace_back(source_of(step, head));
        const TensorView& out = views_.emplace_back(result_of(step, head));
        products_.emplace_back(x, step.matrices[head].parts, step.matrices[head].bias, out, isa);
      }
      const PackedProduct& product = products_.back();
      const int64_t passes = (rows_ + product.rows_at_once() - 1) / product.rows_at_once();
      weight_bytes += heads * passes * product.weight_bytes();
      tiles = std::max(tiles, heads * product.tiles());
      columns_ = std::max(columns_, product.columns());
      product_bytes_ = std::max(product_bytes_, heads * head_bytes(product));
    }
    const int64_t most = std::min<int64_t>(rows_, num_threads);
    const int64_t useful = std::clamp<int64_t>(elements / kSerialElements, 1, most);
    threads_ = std::max(useful_threads(weight_bytes, tiles, num_threads), static_cast<int>(useful));
  }

  // Bytes of the matmuls' scratch memory.
  int64_t memory_bytes() const {
    return product_bytes_ + threads_ * columns_ * static_cast<int64_t>(sizeof(float));
  }

  // Receives the matmuls' scratch memory, and the addresses of buffers that were not given, by buffer.
  void run(uint8_t* memory, const std::vector<uint8_t*>& own) {
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i]) buffers_[i].data = own[i];
    }
    auto* floats = reinterpret_cast<float*>(memory + product_bytes_);
    Steps steps;
    std::deque<PackedProduct> chunks;    // of matmuls
    std::vector<const RowStep*> by_row;  // elementwise steps that are not divided among threads yet
    auto view = views_.begin();
    auto product = products_.begin();
    for (const RowStep& step : program_) {
      if (step.matrices.empty()) {
        by_row.push_back(&step);
        continue;
      }
      const auto heads = static_cast<int64_t>(step.matrices.size());
      for (int64_t head = 0; head < heads; ++head) {
        (view++)->data = source_of(step, head).data;
        (view++)->data = result_of(step, head).data;
      }
      const int64_t chunk = product->chunk(), tiles = product->tiles();
      if (chunk < rows_) share_rows(steps, by_row);
      for (int64_t first = 0; first < rows_; first += chunk) {
        const size_t own = chunks.size();  // the heads' chunks begin there
        const int64_t count = std::min(chunk, rows_ - first);
        for (int64_t head = 0; head < heads; ++head) {
          chunks.emplace_back(product[head]).begin(first, count, memory + head * head_bytes(*product));
        }
        steps.add(count, take_of(count), [=, this, &chunks](int64_t row, int participant) {
          for (const RowStep* each : by_row) compute(*each, first + row);
          for (int64_t head = 0; head < heads; ++head) {
            chunks[own + head].prepare(row, floats + participant * columns_);
          }
        });
        by_row.clear();
        steps.add(heads * tiles, tiles_at_a_time(heads * tiles, threads_),
                  [=, &chunks](int64_t item, int) { chunks[own + item / tiles].multiply(item % tiles); });
      }
      product += heads;
    }
    share_rows(steps, by_row);
    steps.run(threads_);
  }

 private:
  TensorView source_of(const RowStep& step, int64_t head) const {
    const RowColumns& from = step.sources[0];
    return part_of(buffers_[from.buffer], from.first + head * from.stride, step.groups);
  }
  TensorView result_of(const RowStep& step, int64_t head) const {
    return part_of(buffers_[step.into.buffer], step.into.first + head * step.into.stride, step.length);
  }

  // Bytes of scratch memory for a head's rows.
  int64_t head_bytes(const PackedProduct& product) const {
    return aligned(std::min(rows_, product.chunk()) * product.row_bytes());
  }

  int64_t take_of(int64_t rows) const { return std::max<int64_t>(rows / (threads_ * kTakesPerThread), 1); }

  void share_rows(Steps& steps, std::vector<const RowStep*>& by_row) {
    if (by_row.empty()) return;
    steps.add(rows_, take_of(rows_), [this, by_row](int64_t row, int) {
      for (const RowStep* each : by_row) compute(*each, row);
    });
    by_row.clear();
  }

  uint8_t* at(const RowColumns& columns, int64_t row, int64_t group) const {
    const TensorView& buffer = buffers_[columns.buffer];
    const int64_t element = row * buffer.stride(0) + columns.first + group * columns.stride;
    return static_cast<uint8_t*>(buffer.data) + element * size_of(buffer.dtype);
  }

  void compute(const RowStep& step, int64_t row) const {
    const int dtype = static_cast<int>(buffers_[step.into.buffer].dtype);
    const int length = static_cast<int>(step.length);
    const auto weight = [&](size_t i) { return i < step.weights.size() ? step.weights[i].data : nullptr; };
    if (step.op == RowOp::kRope) {
      return operators_.rope[dtype](at(step.into, row, 0), static_cast<int>(step.groups), length,
                                    reinterpret_cast<const float*>(at(step.sources[0], row, 0)),
                                    reinterpret_cast<const float*>(at(step.sources[1], row, 0)), weight(0),
                                    step.number);
    }
    for (int64_t group = 0; group < step.groups; ++group) {
      const void* a = at(step.sources[0], row, group);
      uint8_t* out = at(step.into, row, group);
      switch (step.op) {
        case RowOp::kAddRmsNorm:
          operators_.add_rms_norm[dtype](at(step.sources[1], row, group), const_cast<void*>(a), weight(0),
                                         out, length, step.number);
          break;
        case RowOp::kRmsNorm: {
          const bool is_wide = step.weights[0].dtype == DType::kFloat32;
          const auto norm = is_wide ? operators_.wide_rms_norm[dtype] : operators_.rms_norm[dtype];
          norm(a, weight(0), out, length, step.number);
          break;
        }
        case RowOp::kLayerNorm:
          operators_.layer_norm[dtype](a, weight(0), weight(1), out, length, step.number);
          break;
        case RowOp::kSiluMul:
          operators_.silu_mul[dtype](a, out, length);
          break;
        case RowOp::kCopy:
          operators_.convert[dtype][static_cast<int>(buffers_[step.sources[0].buffer].dtype)](a, out, length);
          break;
        case RowOp::kAdd:
        case RowOp::kSubtract:
        case RowOp::kTimes: {
          const void* b = step.weights.empty() ? at(step.sources[1], row, group)
                                               : static_cast<const uint8_t*>(weight(0)) +
                                                     group * step.length * size_of(step.weights[0].dtype);
          operators_.binary[offset_in(step.op, RowOp::kAdd)][dtype](a, b, out, length);
          break;
        }
        case RowOp::kAddNumber:
          operators_.scale[dtype](a, out, length, 1.0f, step.number);
          break;
        case RowOp::kTimesNumber:
          operators_.scale[dtype](a, out, length, step.number, 0.0f);
          break;
        default:
          operators_.unary[offset_in(step.op, RowOp::kSilu)][dtype](a, out, length);
      }
    }
  }

  const std::vector<RowStep>& program_;
  std::vector<TensorView> buffers_;
  const int64_t rows_;
  const RowOperators& operators_;
  std::deque<TensorView> views_;  // per matmul: its input and output
  std::deque<PackedProduct> products_;
  int threads_;
  int64_t columns_ = 0;  // largest width of the matmuls
  int64_t product_bytes_ = 0;
};

}  // namespace

RowProgram::RowProgram(std::vector<RowBuffer> buffers, std::vector<RowStep> steps)
    : buffers_(std::move(buffers)), steps_(std::move(steps)), offsets_(buffers_.size(), 0) {
  for (const RowBuffer& buffer : buffers_) {
    if (buffer.width < 1) fail("a buffer has ", buffer.width, " columns; expected at least one");
    if (static_cast<int>(buffer.dtype) >= kFloatTypes) fail("a buffer is not of fp32, fp16 or bf16");
    num_given_ += buffer.is_given;
  }
  for (const RowStep& step : steps_) check(step);
  place_buffers();
}

void RowProgram::check_columns(const RowColumns& columns, int64_t groups, int64_t length) const {
  const auto& [buffer, first, stride] = columns;
  if (buffer < 0 || buffer >= static_cast<int64_t>(buffers_.size())) fail("there is no buffer ", buffer);
  const int64_t last = first + (groups - 1) * stride + length;
  if (first < 0 || stride < 0 || groups < 1 || length < 1 || last > buffers_[buffer].width) {
    fail("columns ", first, " to ", last, " lie outside a buffer of ", buffers_[buffer].width);
  }
}

void RowProgram::check(const RowStep& step) const {
  const auto [name, sources] = traits_of(step.op);
  const bool has_constant = is_binary(step.op) && !step.weights.empty();
  if (step.sources.size() != sources - has_constant) fail(name, " has ", step.sources.size(), " sources");
  if (step.matrices.empty() == (step.op == RowOp::kMultiply)) fail(name, " and a matrix do not go together");
  const auto weight = [&](size_t i, const std::vector<int64_t>& shape, std::initializer_list<DType> dtypes) {
    if (step.weights.size() <= i) fail(name, " has no weights");
    check_shape(step.weights[i], "weights", shape);
    check_dtype(step.weights[i], dtypes);
    check_packed(step.weights[i], static_cast<int>(shape.size()));
  };
  if (step.op == RowOp::kMultiply) {  // its groups are the input columns
    const auto heads = static_cast<int64_t>(step.matrices.size());
    check_columns(step.sources[0], heads, step.groups);
    check_columns(step.into, heads, step.length);
    if (heads > 1 && step.into.stride < step.length) fail("products of heads overlap");
    if (step.sources[0].buffer == step.into.buffer) fail("a product lies where its input does");
    const auto view = [&](const RowColumns& columns, int64_t width) {
      return TensorView{"rows", nullptr, buffers_[columns.buffer].dtype, {1, width}, {width, 1}};
    };
    for (const PackedMatrix& matrix : step.matrices) {
      check_packed_linear(view(step.sources[0], step.groups), matrix.parts, matrix.bias,
                          view(step.into, step.length));
    }
    return;
  }
  check_columns(step.into, step.groups, step.length);
  const DType dtype = buffers_[step.into.buffer].dtype;
  for (const RowColumns& columns : step.sources) {
    const int64_t length = step.op == RowOp::kSiluMul ? 2 * step.length : step.length;
    const bool is_rope = step.op == RowOp::kRope;
    check_columns(columns, is_rope ? 1 : step.groups, length);
    const DType expected = is_rope ? DType::kFloat32 : dtype;
    const DType found = buffers_[columns.buffer].dtype;
    if (step.op != RowOp::kCopy && found != expected) fail(name, " is given rows of another dtype");
  }
  if (has_constant) return weight(0, {step.groups * step.length}, {dtype});
  if (step.op == RowOp::kAddRmsNorm) weight(0, {step.length}, {dtype});
  if (step.op == RowOp::kRmsNorm) weight(0, {step.length}, {dtype, DType::kFloat32});
  if (step.op == RowOp::kLayerNorm) weight(0, {step.length}, {dtype});
  if (step.op == RowOp::kLayerNorm && step.weights.size() > 1) weight(1, {step.length}, {dtype});
  if (step.op != RowOp::kRope) return;
  if (step.length % 2 != 0) fail("heads have ", step.length, " dimensions; expected an even number");
  if (step.into.stride != step.length) fail("heads do not follow each other");
  if (!step.weights.empty()) weight(0, {step.groups, step.length}, {dtype});
}

// Buffers may reuse the memory of buffers that are no longer read. Between two matmuls, rows are at different
// steps, and each buffer has a different place for a row: so only a matmul separates lifetimes.
void RowProgram::place_buffers() {
  struct Use {
    int64_t first = -1, last = -1;  // in matmuls: the number before, and the matmul itself
  };
  std::vector<Use> uses(buffers_.size());
  int64_t time = 0;
  for (const RowStep& step : steps_) {
    const auto use = [&](const RowColumns& columns, int64_t when) {
      Use& of = uses[columns.buffer];
      if (of.first < 0) of.first = when;
      of.last = when;
    };
    const bool is_product = step.op == RowOp::kMultiply;
    for (const RowColumns& columns : step.sources) {
      use(columns, time);
      use(columns, time + is_product);  // many rows are multiplied in parts
    }
    use(step.into, time + is_product);
    if (is_product) time += 2;
  }
  std::vector<size_t> placed;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].is_given || uses[i].first < 0) continue;
    const auto size_in_row = [&](size_t of) {
      return aligned(buffers_[of].width * size_of(buffers_[of].dtype));
    };
    const int64_t size = size_in_row(i);
    int64_t offset = 0;
    std::sort(placed.begin(), placed.end(), [&](size_t a, size_t b) { return offsets_[a] < offsets_[b]; });
    for (const size_t other : placed) {
      const bool together = uses[other].first <= uses[i].last && uses[i].first <= uses[other].last;
      const bool touch = offsets_[other] < offset + size && offset < offsets_[other] + size_in_row(other);
      if (together && touch) offset = offsets_[other] + size_in_row(other);
    }
    offsets_[i] = offset;
    placed.push_back(i);
    row_bytes_ = std::max(row_bytes_, offset + size);
  }
}

void RowProgram::run(const std::vector<TensorView>& given, int num_threads, Isa isa) const {
  if (given.size() != num_given_) fail("there are ", given.size(), " tensors; expected ", num_given_);
  const int64_t rows = given.empty() ? 0 : given[0].size(0);
  size_t next = 0;
  for (const RowBuffer& buffer : buffers_) {
    if (!buffer.is_given) continue;
    const TensorView& tensor = given[next++];
    check_dims(tensor, "[n, width]", 2);
    check_shape(tensor, "[n, width]", {rows, buffer.width});
    check_dtype(tensor, {buffer.dtype});
    check_packed(tensor, 1);
    check_no_overlap(tensor, 1);
  }
  num_threads = check_num_threads(num_threads);
  for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
    run_some(given, first, std::min(rows - first, kRowsAtOnce), num_threads, isa);
  }
}

void RowProgram::run_some(const std::vector<TensorView>& given, int64_t first, int64_t rows, int num_threads,
                          Isa isa) const {
  std::vector<TensorView> buffers;
  size_t next = 0;
  for (const RowBuffer& buffer : buffers_) {
    if (buffer.is_given) {
      TensorView& rows_of = buffers.emplace_back(given[next++]);
      rows_of.data = static_cast<uint8_t*>(rows_of.data) + first * rows_of.stride(0) * size_of(buffer.dtype);
      rows_of.shape[0] = rows;
    } else {
      buffers.push_back({"rows", nullptr, buffer.dtype, {rows, buffer.width}, {buffer.width, 1}});
    }
  }
  Run run(steps_, std::move(buffers), rows, num_threads, isa);
  const int64_t bytes = aligned(run.memory_bytes());
  uint8_t* memory = own_memory(bytes + rows * row_bytes_);
  std::vector<uint8_t*> own(buffers_.size(), nullptr);
  for (size_t i = 0; i < own.size(); ++i) {
    if (!buffers_[i].is_given) own[i] = memory + bytes + rows * offsets_[i];
  }
  run.run(memory, own);
}

}  // namespace neo_desktop
