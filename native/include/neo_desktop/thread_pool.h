// Threads that help with one call at a time and sleep in between.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace neo_desktop {

// Re-entrant: several threads may call run() at once; each call has its own job on its caller's stack, and
// the workers serve them in order. Each worker stays on one CPU, and those of other CPUs than the caller's
// are woken: the system's scheduler likes to put a woken thread where its waker runs, and moves it away long
// after a short job is done. A worker without a job looks for the next one for a moment, then sleeps. Workers
// are started on first need and live until the process ends. A forked child starts with an empty pool.
class ThreadPool {
 public:
  static ThreadPool& shared();

  // Calls body(0) on this thread and body(1) .. body(participants - 1) on workers, and returns when every
  // call that began has ended. A worker that comes too late to help is not waited for: the body must share
  // out its work by itself and be complete when body(0) has returned and the others that began have too.
  // The body must not throw. Throws std::system_error when the system refuses a new thread.
  void run(int participants, const std::function<void(int participant)>& body);

  // Decides whether workers that begin from now on, and threads that keep the pool awake, stay on one CPU
  // each; they do unless told otherwise. Returns whether they will: not where the system refuses.
  static bool bind(bool wanted);

  // For a thread that is about to make many short calls. While it exists, workers that have begun do not
  // sleep: a call finds them in less than a microsecond. The thread is kept on the pool's first CPU from now
  // on, and that CPU's worker is the only one to sleep: thread and helpers take as many CPUs as there are
  // participants.
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

  const std::vector<int> cpus_;    // those that this process may use
  std::atomic<int> num_awake_{0};  // who keeps the pool awake

  std::mutex mutex_;        // guards everything below, and the members of every Job and Worker
  std::vector<Job*> jobs_;  // those that still want workers, oldest first
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<int> num_jobs_{0};  // the size of jobs_; atomic only so that workers can spin on it
};

}  // namespace neo_desktop
