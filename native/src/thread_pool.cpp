#include "neo_desktop/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace neo_desktop {
namespace {

// Never destroyed: workers may outlive every static object of the process.
std::atomic<ThreadPool*> shared_pool{nullptr};

// Waiting for the last worker's last piece is short; a sleep and a wake-up would cost more.
constexpr int kSpins = 4000;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

struct ThreadPool::Job {
  const std::function<void(int)>* body;
  int participants;
  int joined = 1;               // the caller
  std::atomic<int> running{0};  // workers inside body; atomic only so that the caller can spin on it
  std::condition_variable done{};
};

ThreadPool& ThreadPool::shared() {
  // A forked child has none of its parent's threads, and the pool's mutex may be held by one of them: the
  // child forgets the pool and makes its own.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { shared_pool = nullptr; });
  (void)registered;
  ThreadPool* pool = shared_pool.load(std::memory_order_acquire);
  if (pool == nullptr) {
    auto* fresh = new ThreadPool;
    if (shared_pool.compare_exchange_strong(pool, fresh)) return *fresh;
    delete fresh;  // another thread was faster
  }
  return *pool;
}

void ThreadPool::run(int participants, const std::function<void(int)>& body) {
  if (participants <= 1) {
    body(0);
    return;
  }
  Job job{&body, participants};
  {
    std::lock_guard lock(mutex_);
    while (workers_ < participants - 1) {
      std::thread([this] { work(); }).detach();
      ++workers_;
    }
    jobs_.push_back(&job);
  }
  for (int helper = 1; helper < participants; ++helper) job_arrived_.notify_one();

  body(0);

  {
    std::lock_guard lock(mutex_);
    std::erase(jobs_, &job);  // nobody joins from here on
  }
  for (int spin = 0; spin < kSpins && job.running.load(std::memory_order_acquire) > 0; ++spin) pause_cpu();
  std::unique_lock lock(mutex_);
  job.done.wait(lock, [&] { return job.running == 0; });
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    job_arrived_.wait(lock, [this] { return !jobs_.empty(); });
    Job& job = *jobs_.front();
    const int participant = job.joined++;
    if (job.joined == job.participants) jobs_.erase(jobs_.begin());
    ++job.running;
    lock.unlock();
    (*job.body)(participant);
    lock.lock();
    // Still under the lock when notifying: the job lives on the caller's stack and ends with the wait.
    if (--job.running == 0) job.done.notify_one();
  }
}

}  // namespace neo_desktop
