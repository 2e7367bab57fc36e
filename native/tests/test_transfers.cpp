#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "neo_desktop/paged_attention.h"
#include "neo_desktop/relay.h"
#include "problem.h"
#include "suites.h"

namespace neo_desktop::testing {
namespace {

// Keys and values of some slots, without NaN.
struct Rows {
  Rows(int64_t n, const CacheShape& shape, DType dtype, Random& random)
      : k("k", dtype, {n, shape.kv_heads, shape.head_dim},
          packed_strides({n, shape.kv_heads, shape.head_dim}), random),
        v("v", dtype, {n, shape.kv_heads, shape.head_dim},
          packed_strides({n, shape.kv_heads, shape.head_dim}), random) {}

  void fill(Random& random) {
    for (Tensor* tensor : {&k, &v}) {
      const int64_t row = tensor->view().shape[2];
      const int64_t rows = tensor->view().shape[0] * tensor->view().shape[1];
      for (int64_t i = 0; i < rows; ++i) {
        const double* noise = random.noise(row);
        for (int64_t j = 0; j < row; ++j) tensor->set(i * row + j, noise[j]);
      }
    }
  }
  void copy_from(const Rows& other) const {
    for (const auto& [to, from] : {std::pair(&k, &other.k), std::pair(&v, &other.v)}) {
      const std::string bytes = from->bytes();
      std::copy(bytes.begin(), bytes.end(), to->as<char>());
    }
  }
  std::string bytes() const { return k.bytes() + v.bytes(); }

  Tensor k;
  Tensor v;
};

void write(const Cache& cache, const Rows& rows, const TensorView& slots, Isa isa) {
  paged_kv_write(rows.k.view(), rows.v.view(), cache.k.view(), cache.v.view(), cache.k_scale_view(),
                 cache.v_scale_view(), slots, 2, isa);
}

void read(const Cache& cache, const Rows& rows, const TensorView& slots, Isa isa) {
  paged_kv_read(cache.k.view(), cache.v.view(), cache.k_scale_view(), cache.v_scale_view(), slots,
                rows.k.view(), rows.v.view(), 2, isa);
}

// One transfer, and a thread that imitates the GPU: it fills buffers or reads them.
class Gpu {
 public:
  Gpu(std::vector<int64_t> slots, const std::vector<Cache>& caches, Isa isa, Random& random)
      : layers_(static_cast<int64_t>(caches.size())),
        to_host_(random.chance(0.5)),
        is_behind_(random.chance(0.5)),
        slots_("slots", DType::kInt64, {static_cast<int64_t>(slots.size())}, {1}, random),
        flags_("flags", DType::kInt32, {2, layers_, kFlagInts}, packed_strides({2, layers_, kFlagInts}),
               random) {
    std::copy(slots.begin(), slots.end(), slots_.as<int64_t>());
    const DType dtype = random.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
    const int64_t n = static_cast<int64_t>(slots.size());
    for (int i = 0; i < 2; ++i) buffers_.emplace_back(n, caches.front().shape, dtype, random);
    for (const Cache& cache : caches) {
      rows_.emplace_back(n, cache.shape, dtype, random);
      if (to_host_) {
        rows_.back().fill(random);
      } else {
        read(cache, rows_.back(), slots_.view(), isa);  // the expected rows
      }
    }
  }

  std::shared_ptr<HostTask> task(const std::shared_ptr<HostCaches>& caches) const {
    const auto rows = [this](int i) {
      return KVRows{buffers_[i].k.view(), buffers_[i].v.view(), slots_.view()};
    };
    return rows_task(caches, "rows", to_host_, is_behind_, {rows(0), rows(1)}, flags_.view());
  }

  // Runs all layers. With `checks`, verifies the rows that arrive. Without, it does not touch buffers,
  // because a step of a cancelled iteration may still use them.
  void run(bool checks) {
    for (int64_t layer = 0; layer < layers_; ++layer) {
      const Rows& buffer = buffers_[layer % 2];
      if (to_host_) {
        if (layer >= 2) wait(layer - 2);
        if (checks) buffer.copy_from(rows_[layer]);
        flag(0, layer).store(1, std::memory_order_release);
      } else {
        wait(layer);
        if (checks && buffer.bytes() != rows_[layer].bytes()) wrong_ = "what was fetched is not in the cache";
        if (checks) buffer.copy_from(rows_[0]);  // no other thread uses it
        if (layer + 2 < layers_) flag(0, layer + 2).store(1, std::memory_order_release);
      }
    }
    for (int64_t layer = 0; layer < layers_; ++layer) wait(layer);
  }

  // Does to a cache what the relay is expected to do to the layer's.
  void expect(const Cache& cache, int64_t layer, Isa isa) const {
    if (to_host_) write(cache, rows_[layer], slots_.view(), isa);
  }

  bool is_behind() const { return is_behind_; }
  const std::string& wrong() const { return wrong_; }

 private:
  std::atomic_ref<int32_t> flag(int64_t kind, int64_t layer) const {
    return std::atomic_ref<int32_t>(flags_.as<int32_t>()[flags_.at({kind, layer, 0})]);
  }
  void wait(int64_t layer) const {
    while (flag(1, layer).load(std::memory_order_acquire) == 0) std::this_thread::yield();
  }

  int64_t layers_;
  bool to_host_;
  bool is_behind_;
  Tensor slots_;
  Tensor flags_;
  std::vector<Rows> buffers_;  // two
  std::vector<Rows> rows_;     // by layer: rows to send, or expected rows
  std::string wrong_;
};

// Checks the promised order.
bool in_order(const std::vector<RelayStep>& steps, const std::vector<Gpu>& gpus, int layers) {
  size_t next = 0;
  for (int turn = 0; turn <= layers; ++turn) {
    for (const bool behind : {false, true}) {
      const int layer = behind ? turn - 1 : turn;
      if (layer < 0 || layer == layers) continue;
      for (size_t i = 0; i < gpus.size(); ++i) {
        if (gpus[i].is_behind() != behind) continue;
        if (next == steps.size() || steps[next].turn != layer || steps[next].task != static_cast<int>(i)) {
          return false;
        }
        ++next;
      }
    }
  }
  return next == steps.size();
}

}  // namespace

void test_transfers(Random& random, Report& report) {
  const bool pairs = random.chance(0.7);
  const DType dtype =
      random.pick({DType::kFloat32, DType::kBFloat16, pairs ? DType::kInt8 : DType::kFloat16});
  const CacheShape shape{dtype,
                         pairs,
                         random.between(1, 4),
                         random.between(1, 3),
                         16 * random.between(1, 4),
                         8 * random.between(1, 8)};
  const int layers = static_cast<int>(random.between(1, 5));
  const auto isas = available_isas();
  const Isa isa = isas[random.between(0, static_cast<int64_t>(isas.size()) - 1)];
  Tensor all("slots", DType::kInt64, {shape.num_slots()}, {1}, random);
  std::iota(all.as<int64_t>(), all.as<int64_t>() + shape.num_slots(), 0);
  std::vector<Cache> caches, expected;
  std::vector<LayerCache> views;
  for (int layer = 0; layer < layers; ++layer) {
    Rows rows(shape.num_slots(), shape, DType::kFloat32, random);
    rows.fill(random);
    for (std::vector<Cache>* each : {&caches, &expected}) {
      each->emplace_back(shape, random);
      write(each->back(), rows, all.view(), isa);
    }
  }
  for (const Cache& cache : caches) {
    views.push_back({cache.k.view(), cache.v.view(), std::nullopt, std::nullopt, 0});
    if (cache.k_scale) views.back().k_scale = cache.k_scale->view();
    if (cache.v_scale) views.back().v_scale = cache.v_scale->view();
  }
  report.describe(isa_name(isa) + ("; " + std::to_string(layers) + " layers; " + caches.front().text()));

  const auto host_caches = std::make_shared<HostCaches>(views);
  Relay relay(static_cast<int>(random.between(1, 4)), isa);
  for (int iteration = 0; iteration < 3; ++iteration) {
    std::vector<int64_t> slots(all.as<int64_t>(), all.as<int64_t>() + shape.num_slots());
    std::shuffle(slots.begin(), slots.end(), random.engine());
    std::vector<Gpu> gpus;
    for (int64_t left = random.between(0, 3); left > 0; --left) {
      const int64_t count = random.between(0, static_cast<int64_t>(slots.size()));
      gpus.emplace_back(std::vector<int64_t>(slots.end() - count, slots.end()), caches, isa, random);
      slots.resize(slots.size() - count);  // transfers do not share slots
    }
    const bool cancels = random.chance(0.2);
    HostTasks tasks;
    for (const Gpu& gpu : gpus) tasks.push_back(gpu.task(host_caches));
    relay.start(tasks, random.chance(0.5) ? std::chrono::seconds(60) : std::chrono::seconds(0));
    std::vector<std::thread> streams;
    for (Gpu& gpu : gpus) streams.emplace_back([&gpu, cancels] { gpu.run(!cancels); });
    if (cancels) relay.cancel();
    try {
      const std::vector<RelayStep> steps = relay.finish();
      if (!in_order(steps, gpus, layers)) report.fail("not everything was done, or not in its order");
    } catch (const std::runtime_error& error) {
      if (!cancels) report.fail(error.what());
    }
    for (std::thread& stream : streams) stream.join();  // a hang here is a failed test
    if (cancels) break;                                 // some rows were stored, some were not
    for (const Gpu& gpu : gpus) {
      if (!gpu.wrong().empty()) report.fail(gpu.wrong());
      for (int layer = 0; layer < layers; ++layer) gpu.expect(expected[layer], layer, isa);
    }
    const Rows got(shape.num_slots(), shape, DType::kFloat32, random);
    const Rows right(shape.num_slots(), shape, DType::kFloat32, random);
    for (int layer = 0; layer < layers; ++layer) {
      read(caches[layer], got, all.view(), isa);
      read(expected[layer], right, all.view(), isa);
      if (got.bytes() != right.bytes()) report.fail("layer " + std::to_string(layer) + " holds other rows");
    }
  }
}

}  // namespace neo_desktop::testing
