// Threads that help with one call at a time and sleep in between.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

namespace neo_desktop {

// Re-entrant: several threads may call run() at once; each call has its own job on its caller's stack, and
// the workers serve them in order. Workers sleep on a condition variable while there is no job. They are
// started on first need and live until the process ends. A forked child starts with an empty pool.
class ThreadPool {
 public:
  static ThreadPool& shared();

  // Calls body(0) on this thread and body(1) .. body(participants - 1) on workers, and returns when every
  // call that began has ended. A worker that comes too late to help is not waited for: the body must share
  // out its work by itself and be complete when body(0) has returned and the others that began have too.
  // The body must not throw. Throws std::system_error when the system refuses a new thread.
  void run(int participants, const std::function<void(int participant)>& body);

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

 private:
  struct Job;
  ThreadPool() = default;
  void work();

  std::mutex mutex_;  // guards everything below, and the members of every Job
  std::condition_variable job_arrived_;
  std::vector<Job*> jobs_;  // those that still want workers, oldest first
  int workers_ = 0;
};

}  // namespace neo_desktop
