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

}  // namespace

class Relay::State {
 public:
  State(int num_threads, Isa isa) : num_threads_(check_num_threads(num_threads)), isa_(isa) {}
  void start(HostTasks tasks, std::chrono::nanoseconds timeout);
  std::vector<RelayStep> finish();
  void cancel();
  bool end();  // true if the relay's thread has ended
  void work();
  void guard();

 private:
  // The relay's thread switches between waiting and working; the guard switches to given up. The first switch
  // wins: after a timeout while waiting, no step starts.
  enum class Doing : int { kWaiting, kWorking, kGivenUp };

  void serve();
  bool step(size_t turn, size_t index);
  bool goes_on(size_t turn, size_t index, Doing doing);
  std::string where(Doing doing) const;
  std::chrono::nanoseconds look() const { return std::clamp(timeout_ / kLooks, kShortestLook, kLongestLook); }
  bool wait_until_ready(const HostTask& task, size_t turn) const;
  void release_all();

  const int num_threads_;
  const Isa isa_;

  // State of the iteration. `start` writes it before it sets `running_`, the relay's thread afterwards.
  HostTasks tasks_;
  bool rests_ = false;  // sleep between two polls of a flag
  std::vector<RelayStep> steps_;
  std::exception_ptr error_;
  std::chrono::nanoseconds timeout_{};
  std::atomic<bool> cancelled_{false};

  // State that the guard reads.
  std::atomic<uint64_t> progress_{0};  // grows with every started step
  std::atomic<size_t> turn_{0};
  std::atomic<size_t> task_{0};
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

Relay::Relay(int num_threads, Isa isa) : Relay(std::make_shared<State>(num_threads, isa)) {}

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

void Relay::start(HostTasks tasks, std::chrono::nanoseconds timeout) {
  state_->start(std::move(tasks), timeout);
}

std::vector<RelayStep> Relay::finish() { return state_->finish(); }

void Relay::cancel() { state_->cancel(); }

bool Relay::close() {
  state_->cancel();
  return state_->end();
}

bool Relay::State::end() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  guard_changed_.notify_one();
  return changed_.wait_for(lock, kEndPatience, [this] { return ended_; });
}

void Relay::State::start(HostTasks tasks, std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  if (closed_) throw std::logic_error("the relay is closed");
  if (running_) throw std::logic_error("the relay's last iteration has not ended");
  tasks_ = std::move(tasks);
  rests_ = std::none_of(tasks_.begin(), tasks_.end(), [](const auto& task) { return task->is_urgent(); });
  steps_.clear();
  error_ = nullptr;
  cancelled_ = false;
  timeout_ = timeout;
  stalled_.clear();
  doing_ = Doing::kWaiting;
  goes_on(0, 0, Doing::kWaiting);
  for (const auto& task : tasks_) {
    for (size_t turn = 0; turn < task->turns(); ++turn) {
      task->flag(kReady, turn) = 0;
      task->flag(kDone, turn) = 0;
    }
  }
  running_ = !tasks_.empty();
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
  size_t turns = 0;
  for (const auto& task : tasks_) turns = std::max(turns, task->turns());
  try {
    for (size_t now = 0; now <= turns; ++now) {
      for (const bool behind : {false, true}) {
        if (behind && now == 0) continue;
        const size_t turn = now - (behind ? 1 : 0);
        for (size_t i = 0; i < tasks_.size(); ++i) {
          const HostTask& task = *tasks_[i];
          if (task.is_behind() != behind || turn >= task.turns()) continue;
          if (task.takes_part(turn) && !step(turn, i)) return;
        }
      }
    }
  } catch (...) {
    error_ = std::current_exception();
    release_all();
  }
}

// Returns false if the iteration timed out or was cancelled before the step.
bool Relay::State::step(size_t turn, size_t index) {
  const HostTask& task = *tasks_[index];
  if (!goes_on(turn, index, Doing::kWaiting) || !wait_until_ready(task, turn)) return false;
  const int64_t start_ns = now_ns();
  if (!goes_on(turn, index, Doing::kWorking)) return false;
  task.run(turn, num_threads_, isa_);
  task.flag(kDone, turn).store(1, std::memory_order_release);
  steps_.push_back({static_cast<int>(turn), static_cast<int>(index), start_ns, now_ns()});
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
bool Relay::State::goes_on(size_t turn, size_t index, Doing doing) {
  Doing before = doing_;
  if (before == Doing::kGivenUp || !doing_.compare_exchange_strong(before, doing)) return false;
  turn_.store(turn, std::memory_order_relaxed);
  task_.store(index, std::memory_order_relaxed);
  progress_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

std::string Relay::State::where(Doing doing) const {
  const HostTask& task = *tasks_[task_];
  const bool is_waiting = doing == Doing::kWaiting && task.is_awaited(turn_);
  const std::string seconds = std::to_string(timeout_.count() / 1'000'000'000.0);
  return task.words(turn_, is_waiting) + " within " + seconds.substr(0, seconds.find('.') + 2) + " s";
}

bool Relay::State::wait_until_ready(const HostTask& task, size_t turn) const {
  if (!task.is_awaited(turn)) return !cancelled_.load(std::memory_order_relaxed);
  const auto ready = task.flag(kReady, turn);
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
  for (const auto& task : tasks_) {
    for (size_t turn = 0; turn < task->turns(); ++turn) {
      task->flag(kDone, turn).store(1, std::memory_order_release);
    }
  }
}

}  // namespace neo_desktop
