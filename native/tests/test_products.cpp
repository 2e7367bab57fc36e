// Matmuls that the relay computes for several sub-batches, and a GPU that waits for them in order.
#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "neo_desktop/relay.h"
#include "suites.h"
#include "tensor.h"

namespace neo_desktop::testing {
namespace {

Tensor noise(const char* name, std::vector<int64_t> shape, Random& random) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  Tensor tensor(name, DType::kFloat32, shape, packed_strides(shape), random);
  for (int64_t i = 0; i < count; ++i) tensor.set(i, *random.noise(1));
  return tensor;
}

// One task: matrices with a different height in every turn, and turns without a matrix.
struct Problem {
  Problem(int64_t turns, Random& random)
      : rows(random.between(1, 5)),
        columns(2 * random.between(1, 20)),
        x("x", DType::kFloat32, {rows, columns}, {columns, 1}, random),
        out("out", DType::kFloat32, {rows * kMostHeight}, {1}, random),
        flags("flags", DType::kInt32, {2, turns, kFlagInts}, packed_strides({2, turns, kFlagInts}), random) {
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t height = random.between(1, kMostHeight), tiles = (height + kTileRows - 1) / kTileRows;
      weights.push_back(noise("weights", {tiles, columns, kTileRows}, random));
      inputs.push_back(noise("inputs", {rows, columns}, random));
      const PackedPart part{dense_type(DType::kFloat32), weights.back().as<uint8_t>(),
                            tiles * kTileRows * columns * 4, height};
      matrices.push_back(random.chance(0.8) ? std::optional(PackedMatrix{{part}, std::nullopt})
                                            : std::nullopt);
    }
  }

  std::shared_ptr<HostTask> task() const {
    return matmul_task({"down", 1, matrices, x.view(), out.view()}, flags.view(), 0);
  }

  std::atomic_ref<int32_t> flag(int64_t kind, int64_t turn) const {
    return std::atomic_ref<int32_t>(flags.as<int32_t>()[flags.at({kind, turn, 0})]);
  }

  // Imitates the GPU in a turn. Without checks it writes nothing, as after a cancelled iteration, whose step
  // may still be running.
  void run(int64_t turn, bool checks, Isa isa, Random& random, std::string& wrong) const {
    if (!matrices[turn]) return;
    for (int64_t i = 0; checks && i < rows * columns; ++i) x.as<float>()[i] = inputs[turn].as<float>()[i];
    flag(0, turn).store(1, std::memory_order_release);
    while (flag(1, turn).load(std::memory_order_acquire) == 0) std::this_thread::yield();
    if (!checks) return;
    const int64_t height = matrices[turn]->rows();
    const Tensor expected("expected", DType::kFloat32, {rows, height}, {height, 1}, random);
    packed_linear(inputs[turn].view(), matrices[turn]->parts, std::nullopt, expected.view(), 1, isa);
    for (int64_t i = 0; i < rows * height; ++i) {
      if (out.as<float>()[i] != expected.as<float>()[i]) wrong = "a product is wrong";
    }
  }

  static constexpr int64_t kMostHeight = 60;
  int64_t rows;
  int64_t columns;
  Tensor x, out, flags;
  std::vector<Tensor> weights, inputs;
  std::vector<std::optional<PackedMatrix>> matrices;
};

}  // namespace

void test_products(Random& random, Report& report) {
  const int64_t layers = random.between(1, 4), turns = layers + 1;
  const Isa isa = available_isas().back();
  const int threads = static_cast<int>(random.between(1, 3));
  report.describe(std::to_string(layers) + " layers; " + std::to_string(threads) + " threads");
  std::vector<Problem> problems;
  HostTasks tasks;
  size_t expected_steps = 0;
  for (int64_t i = random.between(1, 3); i > 0; --i) problems.emplace_back(turns, random);
  for (const Problem& problem : problems) {
    tasks.push_back(problem.task());
    for (const auto& matrix : problem.matrices) expected_steps += matrix.has_value();
  }
  Relay relay(threads, isa);
  for (int iteration = 0; iteration < 3; ++iteration) {
    const bool cancels = random.chance(0.3);
    relay.start(tasks, random.chance(0.5) ? std::chrono::seconds(60) : std::chrono::seconds(0));
    std::string wrong;
    std::thread gpu([&, own = random]() mutable {
      for (int64_t turn = 0; turn < turns; ++turn) {
        for (const Problem& problem : problems) problem.run(turn, !cancels, isa, own, wrong);
      }
    });
    if (cancels) relay.cancel();
    bool cancelled = false;
    size_t steps = 0;
    try {
      steps = relay.finish().size();
    } catch (const std::runtime_error&) {
      cancelled = true;
    }
    gpu.join();  // a hang here is a failed test
    if (cancelled && !cancels) report.fail("cancelled, but nobody asked for it");
    if (!cancelled && steps != expected_steps) report.fail("not every product is reported");
    if (!wrong.empty()) report.fail(wrong);
  }
}

}  // namespace neo_desktop::testing
