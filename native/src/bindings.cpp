// Python bindings. Tensors arrive as (address, dtype code, shape, strides): this file does not know torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "neo_desktop/arithmetic.h"
#include "neo_desktop/cpu.h"
#include "neo_desktop/memory.h"
#include "neo_desktop/operators.h"
#include "neo_desktop/packed_experts.h"
#include "neo_desktop/packed_linear.h"
#include "neo_desktop/paged_attention.h"
#include "neo_desktop/prompt_attention.h"
#include "neo_desktop/quantised_pack.h"
#include "neo_desktop/recurrent.h"
#include "neo_desktop/relay.h"
#include "neo_desktop/row_program.h"
#include "neo_desktop/row_store.h"
#include "neo_desktop/thread_pool.h"

namespace py = pybind11;
using namespace neo_desktop;

namespace {

using Tensor = std::tuple<uintptr_t, int, std::vector<int64_t>, std::vector<int64_t>>;

TensorView view(const char* name, const Tensor& tensor) {
  const auto& [address, dtype, shape, strides] = tensor;
  return {name, reinterpret_cast<void*>(address), static_cast<DType>(dtype), shape, strides};
}

std::optional<TensorView> view(const char* name, const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return view(name, *tensor);
}

// q, out, block_tables, context_lens, k and v of the new tokens or neither, block_size, scale, softcap
using Decode = std::tuple<Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>, std::optional<Tensor>,
                          int64_t, float, float>;

DecodeArguments arguments(const Decode& decode) {
  const auto& [q, out, block_tables, context_lens, k, v, block_size, scale, softcap] = decode;
  std::optional<NewRows> new_rows;
  if (k && v) new_rows = {view("k", *k), view("v", *v)};
  return {view("q", q),
          view("out", out),
          view("block_tables", block_tables),
          view("context_lens", context_lens),
          new_rows,
          block_size,
          scale,
          softcap};
}

// type, address, bytes, rows
StoredType stored_type(int type) {
  if (type < 0 || type >= kStoredTypes) throw std::invalid_argument("there is no such type of weights");
  return static_cast<StoredType>(type);
}

using Part = std::tuple<int, uintptr_t, int64_t, int64_t>;

std::vector<PackedPart> quantised_parts(const std::vector<Part>& parts) {
  std::vector<PackedPart> views;
  for (const auto& [type, address, bytes, rows] : parts) {
    const bool is_plain = type >= kStoredTypes && type < kStoredTypes + kFloatTypes;
    const WeightType kept_as =
        is_plain ? dense_type(static_cast<DType>(type - kStoredTypes)) : weight_type_of(stored_type(type));
    views.push_back({kept_as, reinterpret_cast<const uint8_t*>(address), bytes, rows});
  }
  return views;
}

using Matrix = std::pair<std::vector<Part>, std::optional<Tensor>>;

PackedMatrix quantised_matrix(const Matrix& matrix) {
  return {quantised_parts(matrix.first), view("bias", matrix.second)};
}

// k_cache, v_cache, k_scale, v_scale, window, sinks
using Layer =
    std::tuple<Tensor, Tensor, std::optional<Tensor>, std::optional<Tensor>, int64_t, std::optional<Tensor>>;

// num_layers: of a relay without KV, which has no caches.
std::unique_ptr<Relay> make_relay(const std::vector<Layer>& layers, int64_t num_layers, int num_threads,
                                  const std::string& isa) {
  if (layers.empty()) return std::make_unique<Relay>(num_layers, num_threads, isa_from_name(isa));
  std::vector<RelayLayer> views;
  for (const auto& [k_cache, v_cache, k_scale, v_scale, window, sinks] : layers) {
    views.push_back({view("k_cache", k_cache), view("v_cache", v_cache), view("k_scale", k_scale),
                     view("v_scale", v_scale), window, view("sinks", sinks)});
  }
  return std::make_unique<Relay>(views, num_threads, isa_from_name(isa));
}

// Arguments, flags, index. The tensors of decodes by layer have a leading dimension of layers.
using Batch = std::tuple<Decode, Tensor, int>;

// name, is_to_host, is_behind, slots, (k, v) of even and of odd layers, flags
using Rows = std::tuple<Tensor, Tensor>;
using Transfer = std::tuple<std::string, bool, bool, Tensor, Rows, Rows, Tensor>;

// name, lag, matrix per turn, x, out, flags, index
using Product = std::tuple<std::string, int, std::vector<std::optional<Matrix>>, Tensor, Tensor, Tensor, int>;

// experts per turn, tensors of `multiply_experts_of`, flags, index
using ExpertsInTurns = std::tuple<std::vector<const PackedExperts*>, std::array<Tensor, 7>, Tensor, int>;

// name, (address, bytes) of the turns' pieces, (address, bytes) of the buffers, flags
using Copies = std::tuple<std::string, std::vector<std::pair<uintptr_t, int64_t>>,
                          std::vector<std::pair<uintptr_t, int64_t>>, Tensor>;

ExpertRows expert_rows(const std::array<Tensor, 7>& tensors) {
  constexpr const char* kNames[] = {"x", "ids", "weights", "gate_up", "gated", "products", "out"};
  std::array<TensorView, 7> views;
  for (size_t i = 0; i < views.size(); ++i) views[i] = view(kNames[i], tensors[i]);
  return {views[0], views[1], views[2], views[3], views[4], views[5], views[6]};
}

RelayItem relay_item(const Batch& batch) {
  const auto& [decode, flags, index] = batch;
  const DecodeArguments all = arguments(decode);
  if (all.q.shape.size() > 3) return RelayBatch::by_layer(all, view("flags", flags), index);
  return RelayBatch{{all}, view("flags", flags), index};
}

RelayItem relay_item(const Transfer& transfer) {
  const auto& [what, to_host, is_behind, slots, even, odd, flags] = transfer;
  const auto rows = [&](const Rows& buffer) {
    return KVRows{view("k", std::get<0>(buffer)), view("v", std::get<1>(buffer)), view("slots", slots)};
  };
  return RelayTransfer{what, to_host, is_behind, {rows(even), rows(odd)}, view("flags", flags)};
}

RelayItem relay_item(const Product& product) {
  const auto& [what, lag, matrices, x, out, flags, index] = product;
  std::vector<std::optional<PackedMatrix>> views;
  for (const auto& matrix : matrices) {
    views.push_back(matrix ? std::optional(quantised_matrix(*matrix)) : std::nullopt);
  }
  return RelayProduct{what, lag, std::move(views), view("x", x), view("out", out), view("flags", flags),
                      index};
}

RelayItem relay_item(const ExpertsInTurns& item) {
  const auto& [experts, tensors, flags, index] = item;
  return RelayExperts{experts, expert_rows(tensors), view("flags", flags), index};
}

RelayItem relay_item(const Copies& copies) {
  const auto& [what, sources, buffers, flags] = copies;
  const auto bytes = [](const std::vector<std::pair<uintptr_t, int64_t>>& pieces) {
    std::vector<Bytes> views;
    for (const auto& [address, size] : pieces) views.push_back({reinterpret_cast<char*>(address), size});
    return views;
  };
  return RelayCopies{what, bytes(sources), bytes(buffers), view("flags", flags)};
}

void start(Relay& relay,
           const std::vector<std::variant<Batch, Transfer, Product, ExpertsInTurns, Copies>>& items,
           double timeout_s) {
  std::vector<RelayItem> views;
  for (const auto& item : items) {
    views.push_back(std::visit([](const auto& each) { return relay_item(each); }, item));
  }
  relay.start(std::move(views), std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9)));
}

// [(layer, item, start, end)], times in nanoseconds of the monotonic clock.
std::vector<std::tuple<int, int, int64_t, int64_t>> finish(Relay& relay) {
  std::vector<std::tuple<int, int, int64_t, int64_t>> steps;
  for (const RelayStep& step : relay.finish()) {
    steps.emplace_back(step.layer, step.item, step.start_ns, step.end_ns);
  }
  return steps;
}

void multiply_quantised(const Tensor& x, const std::vector<Part>& parts, const std::optional<Tensor>& bias,
                        const Tensor& out, int num_threads, const std::string& isa) {
  packed_linear(view("x", x), quantised_parts(parts), view("bias", bias), view("out", out), num_threads,
                isa_from_name(isa));
}

// Buffers: width, dtype, is_given. Steps: op, sources, target, groups, length, number, weights, matrix.
using Columns = std::tuple<int64_t, int64_t, int64_t>;
using Step = std::tuple<int, std::vector<Columns>, Columns, int64_t, int64_t, float, std::vector<Tensor>,
                        std::optional<Matrix>>;

RowProgram row_program(const std::vector<std::tuple<int64_t, int, bool>>& buffers,
                       const std::vector<Step>& steps) {
  const auto columns_of = [](const Columns& columns) {
    const auto& [buffer, first, stride] = columns;
    return RowColumns{buffer, first, stride};
  };
  std::vector<RowBuffer> of_rows;
  for (const auto& [width, dtype, is_given] : buffers) {
    of_rows.push_back({width, static_cast<DType>(dtype), is_given});
  }
  std::vector<RowStep> of_program;
  for (const auto& [op, sources, into, groups, length, number, weights, matrix] : steps) {
    RowStep step{static_cast<RowOp>(op), {}, columns_of(into), groups, length, number, {}, std::nullopt};
    for (const Columns& source : sources) step.sources.push_back(columns_of(source));
    for (const Tensor& weight : weights) step.weights.push_back(view("weights", weight));
    if (matrix) step.matrix = quantised_matrix(*matrix);
    of_program.push_back(std::move(step));
  }
  return {std::move(of_rows), std::move(of_program)};
}

void run_rows(const RowProgram& program, const std::vector<Tensor>& given, int num_threads,
              const std::string& isa) {
  std::vector<TensorView> views;
  for (const Tensor& tensor : given) views.push_back(view("rows", tensor));
  program.run(views, num_threads, isa_from_name(isa));
}

// clamped: alpha, limit; gate_by: name of a function
PackedExperts experts_of(int64_t count, const Matrix& gate, const Matrix& up, const Matrix& down,
                         const std::optional<std::pair<float, float>>& clamped, const std::string& gate_by) {
  std::optional<ClampedGate> how;
  if (clamped) how = {clamped->first, clamped->second};
  Unary function = Unary::kSilu;
  if (gate_by == "gelu")
    function = Unary::kGeluTanh;
  else if (gate_by == "relu")
    function = Unary::kRelu;
  else if (gate_by != "silu")
    throw std::invalid_argument("gate_by is silu, gelu or relu");
  return packed_experts(count, quantised_matrix(gate), quantised_matrix(up), quantised_matrix(down), how,
                        function);
}

void multiply_experts_of(const PackedExperts& experts, const std::array<Tensor, 7>& tensors, int num_threads,
                         const std::string& isa) {
  multiply_experts(experts, expert_rows(tensors), num_threads, isa_from_name(isa));
}

bool pack_quantised(int type, uintptr_t stored, int64_t first, int64_t count, int64_t columns,
                    uintptr_t packed) {
  return pack_rows(stored_type(type), reinterpret_cast<const uint8_t*>(stored), first, count, columns,
                   reinterpret_cast<uint8_t*>(packed), default_num_threads());
}

void unpack_quantised(int type, uintptr_t packed, const std::vector<int64_t>& rows, int64_t columns,
                      uintptr_t out) {
  unpack_rows(weight_type_of(stored_type(type)), reinterpret_cast<const uint8_t*>(packed), rows.data(),
              static_cast<int64_t>(rows.size()), columns, reinterpret_cast<float*>(out),
              default_num_threads());
}

void add_rms_norm_of(const Tensor& x, const Tensor& residual, const Tensor& weight, float eps,
                     const Tensor& out, int num_threads, const std::string& isa) {
  add_rms_norm(view("x", x), view("residual", residual), view("weight", weight), eps, view("out", out),
               num_threads, isa_from_name(isa));
}

void silu_mul_of(const Tensor& gate_up, const Tensor& out, int num_threads, const std::string& isa) {
  silu_mul(view("gate_up", gate_up), view("out", out), num_threads, isa_from_name(isa));
}

void rope_of(const Tensor& heads, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& norm,
             float eps, int num_threads, const std::string& isa) {
  rope(view("heads", heads), view("cos", cos), view("sin", sin), view("norm", norm), eps, num_threads,
       isa_from_name(isa));
}

void scan_state_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay,
                   const std::optional<Tensor>& beta, const Tensor& state, const Tensor& spans,
                   const Tensor& out, int num_threads, const std::string& isa) {
  scan_state(view("q", q), view("k", k), view("v", v), view("decay", decay), view("beta", beta),
             view("state", state), view("spans", spans), view("out", out), num_threads, isa_from_name(isa));
}

void short_convolution_of(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                          bool has_silu, const Tensor& state, const Tensor& spans, const Tensor& out,
                          int num_threads, const std::string& isa) {
  short_convolution(view("x", x), view("weight", weight), view("bias", bias), has_silu, view("state", state),
                    view("spans", spans), view("out", out), num_threads, isa_from_name(isa));
}

const TensorView* pointer(const std::optional<TensorView>& view) { return view ? &*view : nullptr; }

}  // namespace

PYBIND11_MODULE(_native, m) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  m.def("cpu_features", &cpu_features);
  m.def("num_usable_cpus", &num_usable_cpus);
  m.def("num_threads_beside_gpu", &num_threads_beside_gpu);
  m.def("default_num_threads", &default_num_threads);
  m.def("set_default_num_threads", &set_default_num_threads);
  m.def("bind_threads", &ThreadPool::bind, without_gil);
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (const Isa isa : available_isas()) names.emplace_back(isa_name(isa));
    return names;
  });
  m.def(
      "paged_attention_decode",
      [](const Decode& decode, const Tensor& k_cache, const Tensor& v_cache,
         const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, int64_t window,
         const std::optional<Tensor>& sinks, int num_threads, const std::string& isa) {
        const auto sinks_view = view("sinks", sinks);
        const auto k_scale_view = view("k_scale", k_scale);
        const auto v_scale_view = view("v_scale", v_scale);
        paged_attention_decode(arguments(decode), view("k_cache", k_cache), view("v_cache", v_cache),
                               pointer(k_scale_view), pointer(v_scale_view), window, pointer(sinks_view),
                               num_threads, isa_from_name(isa));
      },
      without_gil);
  m.def(
      "prompt_attention",
      [](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ends, const Tensor& out,
         int64_t window, const std::optional<Tensor>& sinks, float scale, float softcap, int num_threads,
         const std::string& isa) {
        const auto sinks_view = view("sinks", sinks);
        prompt_attention({view("q", q), view("k", k), view("v", v), view("ends", ends), view("out", out),
                          window, pointer(sinks_view), scale, softcap},
                         num_threads, isa_from_name(isa));
      },
      without_gil);
  m.def(
      "paged_kv_write",
      [](const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
         const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, const Tensor& slots,
         int num_threads, const std::string& isa) {
        const auto k_scale_view = view("k_scale", k_scale);
        const auto v_scale_view = view("v_scale", v_scale);
        paged_kv_write(view("k", k), view("v", v), view("k_cache", k_cache), view("v_cache", v_cache),
                       pointer(k_scale_view), pointer(v_scale_view), view("slots", slots), num_threads,
                       isa_from_name(isa));
      },
      without_gil);
  m.def(
      "paged_kv_read",
      [](const Tensor& k_cache, const Tensor& v_cache, const std::optional<Tensor>& k_scale,
         const std::optional<Tensor>& v_scale, const Tensor& slots, const Tensor& k_out, const Tensor& v_out,
         int num_threads, const std::string& isa) {
        const auto k_scale_view = view("k_scale", k_scale);
        const auto v_scale_view = view("v_scale", v_scale);
        paged_kv_read(view("k_cache", k_cache), view("v_cache", v_cache), pointer(k_scale_view),
                      pointer(v_scale_view), view("slots", slots), view("k_out", k_out), view("v_out", v_out),
                      num_threads, isa_from_name(isa));
      },
      without_gil);
  m.def(
      "store_rows",
      [](const Tensor& rows, const Tensor& slots, const Tensor& into, int num_threads) {
        store_rows(view("rows", rows), view("slots", slots), view("into", into), num_threads);
      },
      without_gil);
  m.def("add_rms_norm", &add_rms_norm_of, without_gil);
  m.def("silu_mul", &silu_mul_of, without_gil);
  m.def("rope", &rope_of, without_gil);
  m.def("scan_state", &scan_state_of, without_gil);
  m.def("short_convolution", &short_convolution_of, without_gil);
  py::class_<RowProgram>(m, "RowProgram").def(py::init(&row_program));
  m.def("run_rows", &run_rows, without_gil);
  py::class_<PackedExperts>(m, "PackedExperts").def(py::init(&experts_of));
  m.def("multiply_experts", &multiply_experts_of, without_gil);
  m.def("packed_linear", &multiply_quantised, without_gil);
  m.def("packed_bytes", [](int type, int64_t rows, int64_t columns) {
    return packed_bytes(stored_type(type), rows, columns);
  });
  m.def("stored_block", [](int type) {
    const StoredType stored = stored_type(type);
    return std::pair(stored_columns(stored), stored_bytes(stored, stored_columns(stored)));
  });
  m.def("pack_quantised", &pack_quantised, without_gil);
  m.def("unpack_quantised", &unpack_quantised, without_gil);
  m.def(
      "read_seconds",
      [](uintptr_t address, int64_t bytes, int num_threads) {
        return read_seconds(reinterpret_cast<const void*>(address), bytes, check_num_threads(num_threads));
      },
      without_gil);
  m.def("interleave_numa_nodes", [](uintptr_t address, int64_t bytes) {
    return interleave_numa_nodes(reinterpret_cast<void*>(address), bytes);
  });
  m.def(
      "fma_rate",
      [](double seconds, int num_threads, const std::string& isa, int dtype) {
        return fma_rate(seconds, check_num_threads(num_threads), isa_from_name(isa),
                        static_cast<DType>(dtype));
      },
      without_gil);
  m.def("advise_huge_pages", [](uintptr_t address, int64_t bytes) {
    return advise_huge_pages(reinterpret_cast<void*>(address), bytes);
  });
  py::register_exception<RelayStalledError>(m, "RelayStalledError", PyExc_RuntimeError);
  py::class_<Relay>(m, "Relay")
      .def(py::init(&make_relay))
      .def("start", &start, py::arg("items"), py::arg("timeout_s") = 0.0, without_gil)
      .def("finish", &finish, without_gil)
      .def("cancel", &Relay::cancel, without_gil)
      .def("close", &Relay::close, without_gil);
}
