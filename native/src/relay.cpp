#include "neo_desktop/relay.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "neo_desktop/thread_pool.h"
#include "pause.h"
#include "relay_items.h"

namespace neo_desktop {
namespace {

constexpr unsigned kPausesPerYield = 4096;  // about 50 us; matters only with fewer CPUs than threads

// Time to wait for a running step when the relay closes; the longest steps take some milliseconds.
constexpr std::chrono::seconds kEndPatience{5};

// Least number of times that the guard wakes per timeout.
constexpr int kLooks = 8;
constexpr std::chrono::nanoseconds kShortestLook = std::chrono::microseconds(100);
constexpr std::chrono::nanoseconds kLongestLook = std::chrono::seconds(1);

// Sleep between two polls of a flag that is not urgent.
constexpr std::chrono::microseconds kRest{20};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

const TensorView* pointer(const std::optional<TensorView>& view) { return view ? &*view : nullptr; }

bool alike(const PagedCache& a, const PagedCache& b) {
  return a.dtype == b.dtype && a.k_pairs == b.k_pairs && a.num_pages == b.num_pages &&
         a.kv_heads == b.kv_heads && a.page_tokens == b.page_tokens && a.head_dim == b.head_dim;
}

}  // namespace

class Relay::State {
 public:
  State(const std::vector<RelayLayer>& layers, int64_t num_layers, int num_threads, Isa isa);
  void start(std::vector<RelayItem> items, std::chrono::nanoseconds timeout);
  std::vector<RelayStep> finish();
  void cancel();
  bool end();  // true if the relay's thread has ended
  void work();
  void guard();

 private:
  struct Layer {
    PagedCache cache;
    int64_t window;
    std::optional<TensorView> sinks;
  };

  // The relay's thread switches between waiting and working; the guard switches to given up. The first switch
  // wins: after a timeout while waiting, no step starts.
  enum class Doing : int { kWaiting, kWorking, kGivenUp };

  void serve();
  bool step(size_t layer, size_t index);
  bool goes_on(size_t layer, size_t index, Doing doing);
  std::string where(Doing doing) const;
  std::chrono::nanoseconds look() const { return std::clamp(timeout_ / kLooks, kShortestLook, kLongestLook); }
  bool wait_until_ready(const RelayItem& item, size_t layer) const;
  void release_all();

  std::vector<Layer> layers_;  // empty: no KV
  const size_t num_layers_;
  const int num_threads_;
  const Isa isa_;

  // State of the iteration. `start` writes it before it sets `running_`, the relay's thread afterwards.
  std::vector<RelayItem> items_;
  bool rests_ = false;  // sleep between two polls of a flag
  std::vector<RelayStep> steps_;
  std::exception_ptr error_;
  std::chrono::nanoseconds timeout_{};
  std::atomic<bool> cancelled_{false};

  // State that the guard reads.
  std::atomic<uint64_t> progress_{0};  // grows with every started step
  std::atomic<size_t> layer_{0};
  std::atomic<size_t> item_{0};
  std::atomic<Doing> doing_{Doing::kWaiting};

  std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  bool running_ = false;
  bool closed_ = false;
  bool ended_ = false;    // the relay's thread has ended
  std::string stalled_;   // the step at which the iteration timed out
  bool in_step_ = false;  // the timeout hit inside a step, which may never end
  std::condition_variable guard_changed_;
  int64_t guard_wakes_ns_ = 0;  // next time at which the guard checks
};

Relay::Relay(const std::vector<RelayLayer>& layers, int num_threads, Isa isa)
    : Relay(std::make_shared<State>(layers, layers.size(), num_threads, isa)) {}

Relay::Relay(int64_t num_layers, int num_threads, Isa isa)
    : Relay(std::make_shared<State>(std::vector<RelayLayer>{}, num_layers, num_threads, isa)) {}

Relay::Relay(std::shared_ptr<State> made) : state_(std::move(made)) {
  // Detached, because a stuck step cannot be joined. The guard handles timeouts; back-to-back iterations do
  // not wake it.
  std::thread([state = state_] { state->work(); }).detach();
  try {
    std::thread([state = state_] { state->guard(); }).detach();
  } catch (...) {
    close();
    throw;
  }
}

Relay::~Relay() { close(); }

void Relay::start(std::vector<RelayItem> items, std::chrono::nanoseconds timeout) {
  state_->start(std::move(items), timeout);
}

std::vector<RelayStep> Relay::finish() { return state_->finish(); }

void Relay::cancel() { state_->cancel(); }

bool Relay::close() {
  state_->cancel();
  return state_->end();
}

Relay::State::State(const std::vector<RelayLayer>& layers, int64_t num_layers, int num_threads, Isa isa)
    : num_layers_(num_layers), num_threads_(check_num_threads(num_threads)), isa_(isa) {
  if (num_layers < 1) fail("a relay needs at least one layer");
  for (const RelayLayer& layer : layers) {
    if (layer.window < 0) fail("window is ", layer.window, "; expected 0 (all tokens) or a number of tokens");
    check_no_overlap(layer.k_cache, 2);
    check_no_overlap(layer.v_cache, 2);
    layers_.push_back(
        {check_cache(layer.k_cache, layer.v_cache, pointer(layer.k_scale), pointer(layer.v_scale)),
         layer.window, layer.sinks});
    const auto heads = [](const auto& sinks) { return sinks ? sinks->shape : std::vector<int64_t>{}; };
    if (heads(layer.sinks) != heads(layers.front().sinks)) fail("all layers must have as many sinks");
    if (!alike(layers_.back().cache, layers_.front().cache)) fail("the caches of all layers must be alike");
  }
}

bool Relay::State::end() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  guard_changed_.notify_one();
  return changed_.wait_for(lock, kEndPatience, [this] { return ended_; });
}

void Relay::State::start(std::vector<RelayItem> items, std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  if (closed_) throw std::logic_error("the relay is closed");
  if (running_) throw std::logic_error("the relay's last iteration has not ended");
  const Layer* first = layers_.empty() ? nullptr : &layers_.front();
  for (const RelayItem& item : items) {
    check(item, first ? &first->cache : nullptr, first ? pointer(first->sinks) : nullptr, num_layers_);
  }
  items_ = std::move(items);
  rests_ = std::none_of(items_.begin(), items_.end(), is_urgent);
  steps_.clear();
  error_ = nullptr;
  cancelled_ = false;
  timeout_ = timeout;
  stalled_.clear();
  doing_ = Doing::kWaiting;
  goes_on(0, 0, Doing::kWaiting);
  for (const RelayItem& item : items_) {
    for (size_t layer = 0; layer < turns_of(item, num_layers_); ++layer) {
      flag(item, kReady, layer) = 0;
      flag(item, kDone, layer) = 0;
    }
  }
  running_ = !items_.empty();
  const bool wakes_guard = timeout.count() > 0 && now_ns() + look().count() < guard_wakes_ns_;
  lock.unlock();
  changed_.notify_all();
  if (wakes_guard) guard_changed_.notify_one();
}

std::vector<RelayStep> Relay::State::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !running_ || !stalled_.empty(); });
  if (!stalled_.empty()) {
    // Outside a step the thread notices the timeout and starts no step.
    if (!in_step_) changed_.wait(lock, [this] { return !running_; });
    throw RelayStalledError(stalled_);
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  if (cancelled_) throw std::runtime_error("the iteration was cancelled");
  return std::exchange(steps_, {});
}

void Relay::State::cancel() {
  std::lock_guard lock(mutex_);
  if (!running_) return;
  cancelled_ = true;
  release_all();
}

void Relay::State::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return running_ || closed_; });
    if (!running_) {
      ended_ = true;
      changed_.notify_all();
      return;
    }
    lock.unlock();
    serve();
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

void Relay::State::serve() {
  std::optional<ThreadPool::Awake> awake;
  if (!rests_) awake.emplace(ThreadPool::shared());
  try {
    for (size_t turn = 0; turn <= num_layers_; ++turn) {
      for (const bool behind : {false, true}) {
        if (behind && turn == 0) continue;
        const size_t layer = turn - (behind ? 1 : 0);
        for (size_t i = 0; i < items_.size(); ++i) {
          const RelayItem& item = items_[i];
          if (is_behind(item) != behind || layer >= turns_of(item, num_layers_)) continue;
          if (takes_part(item, layer) && !step(layer, i)) return;
        }
      }
    }
  } catch (...) {
    error_ = std::current_exception();
    release_all();
  }
}

// Returns false if the iteration timed out or was cancelled before the step.
bool Relay::State::step(size_t layer, size_t index) {
  const RelayItem& item = items_[index];
  if (!goes_on(layer, index, Doing::kWaiting) || !wait_until_ready(item, layer)) return false;
  const int64_t start_ns = now_ns();
  if (!goes_on(layer, index, Doing::kWorking)) return false;
  const Layer* of = layer < layers_.size() ? &layers_[layer] : nullptr;
  run(item, of ? &of->cache : nullptr, of ? of->window : 0, of ? pointer(of->sinks) : nullptr, layer,
      num_threads_, isa_);
  flag(item, kDone, layer).store(1, std::memory_order_release);
  steps_.push_back({static_cast<int>(layer), static_cast<int>(index), start_ns, now_ns()});
  return true;
}

void Relay::State::guard() {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  uint64_t seen = 0;
  int looks = 0;  // checks without progress
  std::unique_lock lock(mutex_);
  while (!closed_) {
    if (!running_ || timeout_.count() == 0 || !stalled_.empty()) {
      guard_wakes_ns_ = kNever;
      guard_changed_.wait(lock);
      looks = 0;
      continue;
    }
    // The guard counts checks, not time: time also passes while the process is stopped or the machine is
    // suspended.
    const int64_t begun_ns = now_ns();
    guard_wakes_ns_ = begun_ns + look().count();
    guard_changed_.wait_for(lock, look());
    if (now_ns() < guard_wakes_ns_) continue;  // woken early
    if (const uint64_t now = progress_.load(std::memory_order_relaxed); now != seen) {
      seen = now;
      looks = 0;
    } else if (++looks * look() >= timeout_ && running_ && stalled_.empty()) {
      const Doing doing = doing_.exchange(Doing::kGivenUp);
      stalled_ = where(doing);
      in_step_ = doing == Doing::kWorking;
      cancelled_ = true;
      release_all();
      changed_.notify_all();
    }
  }
}

// Returns false, and changes nothing, after the guard has given the iteration up.
bool Relay::State::goes_on(size_t layer, size_t index, Doing doing) {
  Doing before = doing_;
  if (before == Doing::kGivenUp || !doing_.compare_exchange_strong(before, doing)) return false;
  layer_.store(layer, std::memory_order_relaxed);
  item_.store(index, std::memory_order_relaxed);
  progress_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

std::string Relay::State::where(Doing doing) const {
  const RelayItem& item = items_[item_];
  const bool is_waiting = doing == Doing::kWaiting && is_awaited(item, layer_);
  const std::string seconds = std::to_string(timeout_.count() / 1'000'000'000.0);
  return words(item, layer_, is_waiting) + " within " + seconds.substr(0, seconds.find('.') + 2) + " s";
}

bool Relay::State::wait_until_ready(const RelayItem& item, size_t layer) const {
  if (!is_awaited(item, layer)) return !cancelled_.load(std::memory_order_relaxed);
  const auto ready = flag(item, kReady, layer);
  for (unsigned pauses = 1; ready.load(std::memory_order_acquire) == 0; ++pauses) {
    if (cancelled_.load(std::memory_order_relaxed)) return false;
    if (rests_ && pauses > kPausesPerYield) {
      std::this_thread::sleep_for(kRest);
      continue;
    }
    pause_cpu();
    if (pauses % kPausesPerYield == 0) std::this_thread::yield();
  }
  return true;
}

void Relay::State::release_all() {
  for (const RelayItem& item : items_) {
    for (size_t layer = 0; layer < turns_of(item, num_layers_); ++layer) {
      flag(item, kDone, layer).store(1, std::memory_order_release);
    }
  }
}

}  // namespace neo_desktop
