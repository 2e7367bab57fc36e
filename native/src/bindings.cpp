// Python bindings. Tensors arrive as (name, address, dtype code, shape, strides): this file does not know
// torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "neo_desktop/arithmetic.h"
#include "neo_desktop/cpu.h"
#include "neo_desktop/host_task.h"
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
#include "recording.h"

namespace py = pybind11;
using namespace neo_desktop;

namespace pybind11::detail {

template <>
struct type_caster<TensorView> {
  PYBIND11_TYPE_CASTER(TensorView, const_name("Tensor"));

  bool load(handle source, bool convert) {
    using Parts = std::tuple<std::string, uintptr_t, int, std::vector<int64_t>, std::vector<int64_t>>;
    make_caster<Parts> loaded;
    if (!loaded.load(source, convert)) return false;
    auto [name, address, dtype, shape, strides] = cast_op<Parts&&>(std::move(loaded));
    value = {std::move(name), reinterpret_cast<void*>(address), static_cast<DType>(dtype), std::move(shape),
             std::move(strides)};
    return true;
  }
};

template <>
struct type_caster<Isa> {
  PYBIND11_TYPE_CASTER(Isa, const_name("str"));

  bool load(handle source, bool) {
    value = isa_from_name(py::cast<std::string>(source));
    return true;
  }
};

}  // namespace pybind11::detail

namespace {

using MaybeTensor = std::optional<TensorView>;

const TensorView* pointer(const MaybeTensor& view) { return view ? &*view : nullptr; }

// q, out, block_tables, context_lens, k and v of the new tokens or neither, block_size, scale, softcap
using Decode = std::tuple<TensorView, TensorView, TensorView, TensorView, MaybeTensor, MaybeTensor, int64_t,
                          float, float>;

DecodeArguments arguments(const Decode& decode) {
  const auto& [q, out, block_tables, context_lens, k, v, block_size, scale, softcap] = decode;
  std::optional<NewRows> new_rows;
  if (k && v) new_rows = {*k, *v};
  return {q, out, block_tables, context_lens, new_rows, block_size, scale, softcap};
}

StoredType stored_type(int type) {
  if (type < 0 || type >= kStoredTypes) throw std::invalid_argument("there is no such type of weights");
  return static_cast<StoredType>(type);
}

// type, address, bytes, rows
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

using Matrix = std::pair<std::vector<Part>, MaybeTensor>;

PackedMatrix quantised_matrix(const Matrix& matrix) { return {quantised_parts(matrix.first), matrix.second}; }

// k_cache, v_cache, k_scale, v_scale, window, sinks
using Layer = std::tuple<TensorView, TensorView, MaybeTensor, MaybeTensor, int64_t, MaybeTensor>;

std::shared_ptr<HostCaches> host_caches(const std::vector<Layer>& layers) {
  std::vector<LayerCache> views;
  for (const auto& [k_cache, v_cache, k_scale, v_scale, window, sinks] : layers) {
    views.push_back({k_cache, v_cache, k_scale, v_scale, window, sinks});
  }
  return std::make_shared<HostCaches>(views);
}

using Caches = std::shared_ptr<HostCaches>;
using KVTensors = std::pair<TensorView, TensorView>;
using ExpertTensors = std::array<TensorView, 7>;

std::shared_ptr<HostTask> decode_task_of(const Caches& caches, const Decode& decode, const TensorView& flags,
                                         int index) {
  return decode_task(caches, arguments(decode), flags, index);
}

// even, odd: k and v of even and of odd layers
std::shared_ptr<HostTask> rows_task_of(const Caches& caches, std::string what, bool to_host, bool is_behind,
                                       const TensorView& slots, const KVTensors& even, const KVTensors& odd,
                                       const TensorView& flags) {
  const auto rows = [&](const KVTensors& kv) { return KVRows{kv.first, kv.second, slots}; };
  return rows_task(caches, std::move(what), to_host, is_behind, {rows(even), rows(odd)}, flags);
}

std::shared_ptr<HostTask> matmul_task_of(std::string what, int lag,
                                         const std::vector<std::optional<Matrix>>& matrices,
                                         const TensorView& x, const TensorView& out, const TensorView& flags,
                                         int index) {
  TurnMatmuls matmuls{std::move(what), lag, {}, x, out};
  for (const auto& matrix : matrices) {
    matmuls.matrices.push_back(matrix ? std::optional(quantised_matrix(*matrix)) : std::nullopt);
  }
  return matmul_task(std::move(matmuls), flags, index);
}

ExpertRows expert_rows(const ExpertTensors& tensors) {
  return {tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5], tensors[6]};
}

std::shared_ptr<HostTask> experts_task_of(const std::vector<const PackedExperts*>& experts,
                                          const ExpertTensors& tensors, const TensorView& flags, int index) {
  return experts_task(experts, expert_rows(tensors), flags, index);
}

// (address, bytes) of the turns' pieces, and of the buffers
using Pieces = std::vector<std::pair<uintptr_t, int64_t>>;

std::shared_ptr<HostTask> copy_task_of(std::string what, const Pieces& sources, const Pieces& buffers,
                                       const TensorView& flags) {
  const auto bytes = [](const Pieces& pieces) {
    std::vector<Bytes> views;
    for (const auto& [address, size] : pieces) views.push_back({reinterpret_cast<char*>(address), size});
    return views;
  };
  return copy_task(std::move(what), bytes(sources), bytes(buffers), flags);
}

void start(Relay& relay, const std::vector<std::shared_ptr<HostTask>>& tasks, double timeout_s) {
  relay.start({tasks.begin(), tasks.end()}, std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9)));
}

// [(turn, task, start, end)], times in nanoseconds of the monotonic clock.
std::vector<std::tuple<int, int, int64_t, int64_t>> finish(Relay& relay) {
  std::vector<std::tuple<int, int, int64_t, int64_t>> steps;
  for (const RelayStep& step : relay.finish()) {
    steps.emplace_back(step.turn, step.task, step.start_ns, step.end_ns);
  }
  return steps;
}

void multiply_quantised(const TensorView& x, const std::vector<Part>& parts, const MaybeTensor& bias,
                        const TensorView& out, int num_threads, Isa isa) {
  packed_linear(x, quantised_parts(parts), bias, out, num_threads, isa);
}

// Buffers: width, dtype, is_given. Steps: op, sources, target, groups, length, number, weights, matrix.
using Columns = std::tuple<int64_t, int64_t, int64_t>;
using Step = std::tuple<int, std::vector<Columns>, Columns, int64_t, int64_t, float, std::vector<TensorView>,
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
    RowStep step{static_cast<RowOp>(op), {}, columns_of(into), groups, length, number, weights, {}};
    for (const Columns& source : sources) step.sources.push_back(columns_of(source));
    if (matrix) {
      const PackedMatrix whole = quantised_matrix(*matrix);
      const int64_t heads = length < 1 ? 1 : std::max<int64_t>(whole.rows() / length, 1);
      step.matrices = divided(whole, heads);
    }
    of_program.push_back(std::move(step));
  }
  return {std::move(of_rows), std::move(of_program)};
}

void run_rows(const std::shared_ptr<RowProgram>& program, const std::vector<TensorView>& given,
              int num_threads, Isa isa) {
  program->run(given, num_threads, isa);
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

void choose_experts_of(const TensorView& logits, const std::tuple<bool, bool, float>& kind,
                       const std::optional<TensorView>& bias, const std::optional<TensorView>& factors,
                       const TensorView& ids, const TensorView& weights, int num_threads) {
  const auto [is_sigmoid, normalises, epsilon] = kind;
  choose_experts(logits, {is_sigmoid, normalises, epsilon, bias, factors}, ids, weights, num_threads);
}

void multiply_experts_of(const std::shared_ptr<PackedExperts>& experts, const ExpertTensors& tensors,
                         int num_threads, Isa isa) {
  multiply_experts(*experts, expert_rows(tensors), num_threads, isa);
}

void attend_decodes(const Decode& decode, const TensorView& k_cache, const TensorView& v_cache,
                    const MaybeTensor& k_scale, const MaybeTensor& v_scale, int64_t window,
                    const MaybeTensor& sinks, int num_threads, Isa isa) {
  paged_attention_decode(arguments(decode), k_cache, v_cache, pointer(k_scale), pointer(v_scale), window,
                         pointer(sinks), num_threads, isa);
}

void attend_prompts(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& ends,
                    const TensorView& out, int64_t window, const MaybeTensor& sinks, float scale,
                    float softcap, int num_threads, Isa isa) {
  prompt_attention({q, k, v, ends, out, window, pointer(sinks), scale, softcap}, num_threads, isa);
}

void write_kv(const TensorView& k, const TensorView& v, const TensorView& k_cache, const TensorView& v_cache,
              const MaybeTensor& k_scale, const MaybeTensor& v_scale, const TensorView& slots,
              int num_threads, Isa isa) {
  paged_kv_write(k, v, k_cache, v_cache, pointer(k_scale), pointer(v_scale), slots, num_threads, isa);
}

void read_kv(const TensorView& k_cache, const TensorView& v_cache, const MaybeTensor& k_scale,
             const MaybeTensor& v_scale, const TensorView& slots, const TensorView& k_out,
             const TensorView& v_out, int num_threads, Isa isa) {
  paged_kv_read(k_cache, v_cache, pointer(k_scale), pointer(v_scale), slots, k_out, v_out, num_threads, isa);
}

void run_task(const HostTask& task, size_t turn, int num_threads, Isa isa) {
  task.run(turn, check_num_threads(num_threads), isa);
}

void begin_recording() { recording = std::make_shared<Recording>(); }

std::shared_ptr<Recording> end_recording() { return std::exchange(recording, nullptr); }

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
  m.def("paged_attention_decode", recorded(&attend_decodes), without_gil);
  m.def("prompt_attention", recorded(&attend_prompts), without_gil);
  m.def("paged_kv_write", recorded(&write_kv), without_gil);
  m.def("paged_kv_read", recorded(&read_kv), without_gil);
  m.def("store_rows", recorded(&store_rows), without_gil);
  m.def("add_rms_norm", recorded(&add_rms_norm), without_gil);
  m.def("silu_mul", recorded(&silu_mul), without_gil);
  m.def("choose_tokens", recorded(&choose_tokens), without_gil);
  m.def("choose_experts", recorded(&choose_experts_of), without_gil);
  m.def("rope", recorded(&rope), without_gil);
  m.def("scan_state", recorded(&scan_state), without_gil);
  m.def("short_convolution", recorded(&short_convolution), without_gil);
  py::class_<RowProgram, std::shared_ptr<RowProgram>>(m, "RowProgram").def(py::init(&row_program));
  m.def("run_rows", recorded(&run_rows), without_gil);
  py::class_<PackedExperts, std::shared_ptr<PackedExperts>>(m, "PackedExperts").def(py::init(&experts_of));
  m.def("multiply_experts", recorded(&multiply_experts_of), without_gil);
  m.def("packed_linear", recorded(&multiply_quantised), without_gil);
  py::class_<Recording, std::shared_ptr<Recording>>(m, "Recording")
      .def_readonly("is_complete", &Recording::is_complete)
      .def("append", &Recording::append)
      .def("__call__", &Recording::run, without_gil);
  m.def("begin_recording", &begin_recording);
  m.def("end_recording", &end_recording);
  m.def("packed_bytes", [](int type, int64_t rows, int64_t columns) {
    return packed_bytes(stored_type(type), rows, columns);
  });
  m.def("stored_block", [](int type) {
    const StoredType stored = stored_type(type);
    return std::pair(stored_columns(stored), stored_bytes(stored, stored_columns(stored)));
  });
  m.def("pack_quantised", not_recorded(&pack_quantised), without_gil);
  m.def("unpack_quantised", not_recorded(&unpack_quantised), without_gil);
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
      [](double seconds, int num_threads, Isa isa, int dtype) {
        return fma_rate(seconds, check_num_threads(num_threads), isa, static_cast<DType>(dtype));
      },
      without_gil);
  m.def("advise_huge_pages", [](uintptr_t address, int64_t bytes) {
    return advise_huge_pages(reinterpret_cast<void*>(address), bytes);
  });
  py::class_<HostCaches, std::shared_ptr<HostCaches>>(m, "HostCaches").def(py::init(&host_caches));
  py::class_<HostTask, std::shared_ptr<HostTask>>(m, "HostTask")
      .def("check", &HostTask::check)
      .def("run", not_recorded(&run_task), without_gil);
  m.def("decode_task", &decode_task_of);
  m.def("rows_task", &rows_task_of);
  m.def("matmul_task", &matmul_task_of);
  m.def("experts_task", &experts_task_of);
  m.def("copy_task", &copy_task_of);
  py::register_exception<RelayStalledError>(m, "RelayStalledError", PyExc_RuntimeError);
  py::class_<Relay>(m, "Relay")
      .def(py::init<int, Isa>())
      .def("start", &start, py::arg("tasks"), py::arg("timeout_s") = 0.0, without_gil)
      .def("finish", &finish, without_gil)
      .def("cancel", &Relay::cancel, without_gil)
      .def("close", &Relay::close, without_gil);
}
