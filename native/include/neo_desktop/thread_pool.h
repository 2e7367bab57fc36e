// Threads that help with one call at a time and sleep in between.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace neo_desktop {

// Re-entrant: several threads may call run() at once; each call has its own job on its caller's stack, and
// the workers serve jobs in order. Each worker stays on one CPU, and a call wakes workers on CPUs other than
// the caller's: the system's scheduler tends to place a woken thread on its waker's CPU, and to move it away
// long after a short job is done. A worker without a job spins for a moment, then sleeps. Workers start on
// first need and live until the process ends. A forked child starts with an empty pool.
class ThreadPool {
 public:
  static ThreadPool& shared();

  // Calls body(0) on this thread and body(1) .. body(participants - 1) on workers, and returns when every
  // started call has ended. It does not wait for workers that come too late: the body must divide its work
  // dynamically, and be complete when body(0) and the other started calls have returned. The body must not
  // throw. Throws std::system_error if the system refuses a new thread.
  void run(int participants, const std::function<void(int participant)>& body);

  // Calls body(first, last) for parts of [0, items), `take` items each; a participant that is free takes the
  // next part. At most one participant: one call on this thread.
  template <class Body>
  void run_parts(int64_t participants, int64_t items, int64_t take, const Body& body) {
    if (participants <= 1) return body(0, items);
    std::atomic<int64_t> next{0};
    run(static_cast<int>(participants), [&](int) {
      for (int64_t first; (first = next.fetch_add(take, std::memory_order_relaxed)) < items;) {
        body(first, std::min(first + take, items));
      }
    });
  }

  // Sets whether new workers, and threads that keep the pool awake, are bound to one CPU each; the default is
  // true. Returns the effective setting: false if the system refuses.
  static bool bind(bool wanted);

  // For a thread that is about to make many short calls. While an Awake exists, running workers do not sleep:
  // a call reaches them in less than a microsecond. The thread is bound to the pool's first CPU from now on,
  // and only that CPU's worker sleeps: thread and helpers take as many CPUs as a call has participants.
  class Awake {
   public:
    explicit Awake(ThreadPool& pool);
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    ThreadPool& pool_;
  };

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

 private:
  struct Job;
  struct Worker;
  ThreadPool();
  void start_workers(int participants);
  void pin_caller() const;
  void work(Worker& self);
  bool stays_awake(const Worker& worker) const;
  Job* take(const Worker& worker);

  const std::vector<int> cpus_;    // CPUs that this process may use
  std::atomic<int> num_awake_{0};  // number of Awake objects

  std::mutex mutex_;        // guards everything below, and the members of every Job and Worker
  std::vector<Job*> jobs_;  // jobs that still accept workers, oldest first
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<int> num_jobs_{0};  // the size of jobs_; atomic only so that workers can spin on it
};

}  // namespace neo_desktop
