// Python's way in. Tensors arrive as (address, dtype code, shape, strides): nothing here knows torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "neo_desktop/arithmetic.h"
#include "neo_desktop/cpu.h"
#include "neo_desktop/memory.h"
#include "neo_desktop/paged_attention.h"

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

const TensorView* pointer(const std::optional<TensorView>& view) { return view ? &*view : nullptr; }

}  // namespace

PYBIND11_MODULE(_native, m) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  m.def("cpu_features", &cpu_features);
  m.def("default_num_threads", &default_num_threads);
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (const Isa isa : available_isas()) names.emplace_back(isa_name(isa));
    return names;
  });
  m.def(
      "paged_attention_decode",
      [](const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const std::optional<Tensor>& k_scale,
         const std::optional<Tensor>& v_scale, const Tensor& block_tables, int64_t block_size,
         const Tensor& context_lens, const Tensor& out, const std::optional<Tensor>& k,
         const std::optional<Tensor>& v, float scale, int64_t window, int num_threads,
         const std::string& isa) {
        const auto k_scale_view = view("k_scale", k_scale);
        const auto v_scale_view = view("v_scale", v_scale);
        std::optional<NewRows> new_rows;
        if (k && v) new_rows = {view("k", *k), view("v", *v)};
        paged_attention_decode(
            view("q", q), view("k_cache", k_cache), view("v_cache", v_cache), pointer(k_scale_view),
            pointer(v_scale_view), view("block_tables", block_tables), block_size,
            view("context_lens", context_lens), view("out", out), new_rows ? &*new_rows : nullptr, scale,
            window, num_threads, isa_from_name(isa));
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
}
