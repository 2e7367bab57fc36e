#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "answer.h"
#include "neo_desktop/relay.h"
#include "problem.h"
#include "suites.h"

namespace neo_desktop::testing {
namespace {

// The same memory for all layers, as a tensor with a layer dimension.
TensorView in_all(int64_t layers, TensorView view) {
  view.shape.insert(view.shape.begin(), layers);
  view.strides.insert(view.strides.begin(), 0);
  return view;
}

DecodeArguments in_all(int64_t layers, DecodeArguments arguments) {
  if (auto& rows = arguments.new_rows) rows = {in_all(layers, rows->k), in_all(layers, rows->v)};
  arguments.q = in_all(layers, arguments.q);
  arguments.out = in_all(layers, arguments.out);
  arguments.block_tables = in_all(layers, arguments.block_tables);
  arguments.context_lens = in_all(layers, arguments.context_lens);
  return arguments;
}

// A thread that imitates the GPU: it sets and polls the flags, for one problem in every layer.
class Gpu {
 public:
  Gpu(const DecodeProblem& problem, const Answer& answer, int64_t layers, Random& random)
      : problem_(problem),
        answer_(answer),
        layers_(layers),
        by_layer_(random.chance(0.5)),
        flags_("flags", DType::kInt32, {2, layers, kFlagInts}, packed_strides({2, layers, kFlagInts}),
               random) {}

  std::shared_ptr<HostTask> task(const std::shared_ptr<HostCaches>& caches,
                                 const DecodeArguments& arguments) const {
    return decode_task(caches, by_layer_ ? in_all(layers_, arguments) : arguments, flags_.view(), 0);
  }
  std::shared_ptr<HostTask> task(const std::shared_ptr<HostCaches>& caches) const {
    return task(caches, problem_.arguments());
  }

  // Runs all layers, and checks the results of the layers before `checked`.
  void run(int64_t checked) {
    for (int64_t layer = 0; layer < layers_; ++layer) {
      if (layer < checked) problem_.erase_new_tokens();
      flag(0, layer).store(1, std::memory_order_release);
      while (flag(1, layer).load(std::memory_order_acquire) == 0) std::this_thread::yield();
      if (layer < checked && wrong_.empty()) wrong_ = what_is_wrong(problem_, answer_, largest_error_);
    }
  }

  const std::string& wrong() const { return wrong_; }

 private:
  std::atomic_ref<int32_t> flag(int64_t kind, int64_t layer) const {
    return std::atomic_ref<int32_t>(flags_.as<int32_t>()[flags_.at({kind, layer, 0})]);
  }

  const DecodeProblem& problem_;
  const Answer& answer_;
  const int64_t layers_;
  const bool by_layer_;
  Tensor flags_;
  std::string wrong_;
  double largest_error_ = 0;
};

LayerCache layer_of(const DecodeProblem& problem) {
  const Cache& cache = problem.cache;
  LayerCache layer{cache.k.view(), cache.v.view(), std::nullopt, std::nullopt, problem.window, std::nullopt};
  if (cache.k_scale) layer.k_scale = cache.k_scale->view();
  if (cache.v_scale) layer.v_scale = cache.v_scale->view();
  if (problem.sinks) layer.sinks = problem.sinks->view();
  return layer;
}

}  // namespace

void test_relay(Random& random, Report& report) {
  // Filled: the relay checks all blocks of a context, even with a window.
  const DecodeProblem problem(random, true);
  const Answer answer = right_answer(problem);
  const int64_t layers = random.between(1, 4);
  const auto isas = available_isas();
  const Isa isa = isas[random.between(0, static_cast<int64_t>(isas.size()) - 1)];
  report.describe(isa_name(isa) + ("; " + std::to_string(layers) + " layers; " + problem.text()));

  const auto caches = std::make_shared<HostCaches>(std::vector<LayerCache>(layers, layer_of(problem)));
  auto relay = std::make_unique<Relay>(problem.num_threads, isa);
  for (int iteration = 0; iteration < 3; ++iteration) {
    Gpu gpu(problem, answer, layers, random);
    const bool cancels = random.chance(0.3);
    // Longer than any step here; the guard must ignore the start and end of iterations.
    relay->start({gpu.task(caches)}, random.chance(0.5) ? std::chrono::seconds(60) : std::chrono::seconds(0));
    std::thread stream([&] { gpu.run(cancels ? 0 : layers); });
    if (cancels) relay->cancel();
    bool cancelled = false;
    size_t steps = 0;
    try {
      steps = relay->finish().size();
    } catch (const std::runtime_error&) {
      cancelled = true;
    }
    stream.join();  // a hang here is a failed test
    if (cancelled && !cancels) report.fail("cancelled, but nobody asked for it");
    if (!cancelled && steps != static_cast<size_t>(layers)) report.fail("not every layer is reported");
    if (!gpu.wrong().empty()) report.fail(gpu.wrong());
  }

  // The relay does not wait for a GPU that makes no progress, with or without a later reader of the flags.
  if (random.chance(0.2)) {
    Gpu silent(problem, answer, layers, random);
    relay->start({silent.task(caches)}, std::chrono::milliseconds(1));
    try {
      relay->finish();
      report.fail("a GPU that does nothing was not noticed");
    } catch (const RelayStalledError& stalled) {
      if (std::string(stalled.what()).find("layer 0 of ") == std::string::npos) {
        report.fail("where the iteration stood is not told");
      }
    }
    silent.run(0);  // every flag is raised
  }

  // Invalid tasks are refused.
  Gpu gpu(problem, answer, layers, random);
  DecodeArguments wrong = problem.arguments();
  wrong.block_size = -1;
  try {
    gpu.task(caches, wrong);
    report.fail("a negative block size was not refused");
  } catch (const std::invalid_argument&) {
  }
  relay->start({gpu.task(caches)});
  try {
    relay->start({gpu.task(caches)});
    report.fail("two iterations at once were not refused");
  } catch (const std::logic_error&) {
  }
  if (random.chance(0.5)) {
    relay.reset();  // during an iteration, and before its memory is released
    return;
  }
  gpu.run(layers);
  relay->finish();
  if (!gpu.wrong().empty()) report.fail(gpu.wrong());
}

}  // namespace neo_desktop::testing
