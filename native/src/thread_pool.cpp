#include "neo_desktop/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <thread>

#include "neo_desktop/cpu.h"
#include "pause.h"

namespace neo_desktop {
namespace {

// Never destroyed: workers may outlive every static object of the process.
std::atomic<ThreadPool*> shared_pool{nullptr};

// The wait for the last worker's last piece, or for the next call of the same iteration, is often short:
// sleeping and waking up would cost more.
constexpr std::chrono::microseconds kSpinTime{50};

// Spins until the condition holds, or for a moment only, unless `stay` asks for more.
template <class Condition, class Stay>
void spin_until(Condition condition, Stay stay) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  while (!condition()) {
    for (int i = 0; i < 16; ++i) pause_cpu();
    if (std::chrono::steady_clock::now() < end) continue;
    if (!stay()) return;
    std::this_thread::yield();  // there may be fewer CPUs than threads
  }
}

constexpr int kAnywhere = -1;

std::atomic<bool> binds{true};

// Binds a thread to a CPU; returns false if the system refuses.
bool pin(pthread_t thread, int cpu) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(cpu, &mask);
  return pthread_setaffinity_np(thread, sizeof mask, &mask) == 0;
}

}  // namespace

struct ThreadPool::Job {
  const std::function<void(int)>* body;
  int participants;
  int caller_cpu;               // kAnywhere: workers of any CPU may help
  int joined = 1;               // the caller
  std::atomic<int> running{0};  // workers inside body; atomic only so that the caller can spin on it
  std::condition_variable done{};
};

struct ThreadPool::Worker {
  explicit Worker(int cpu) : cpu(cpu) {}
  int cpu;  // kAnywhere if workers outnumber CPUs or are not bound
  bool asleep = false;
  std::condition_variable wake{};
};

ThreadPool::ThreadPool() : cpus_(usable_cpus()) {}

ThreadPool& ThreadPool::shared() {
  // A forked child has none of its parent's threads, and a lost thread may hold the pool's mutex: the child
  // drops the pool and makes its own.
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

void ThreadPool::start_workers(int participants) {
  // One worker per CPU, the caller's included, because the caller may run elsewhere the next time.
  const int num_cpus = binds ? static_cast<int>(cpus_.size()) : 0;
  const int wanted = participants <= num_cpus ? participants : participants - 1;
  while (static_cast<int>(workers_.size()) < wanted) {
    const int index = static_cast<int>(workers_.size());
    auto worker = std::make_unique<Worker>(index < num_cpus ? cpus_[index] : kAnywhere);
    Worker& self = *worker;
    std::thread thread([this, &self] { work(self); });
    if (self.cpu != kAnywhere && !pin(thread.native_handle(), self.cpu)) self.cpu = kAnywhere;
    thread.detach();
    workers_.push_back(std::move(worker));
  }
}

void ThreadPool::pin_caller() const {
  if (binds && !cpus_.empty()) pin(pthread_self(), cpus_.front());  // a refusal only costs speed
}

bool ThreadPool::bind(bool wanted) {
  bool agreed = wanted;
  if (wanted) {
    for (const int cpu : usable_cpus()) {
      std::thread([&] { agreed = agreed && pin(pthread_self(), cpu); }).join();
    }
  }
  binds = agreed;
  return agreed;
}

ThreadPool::Awake::Awake(ThreadPool& pool) : pool_(pool) {
  pool_.pin_caller();
  pool_.num_awake_.fetch_add(1, std::memory_order_relaxed);
}

ThreadPool::Awake::~Awake() { pool_.num_awake_.fetch_sub(1, std::memory_order_relaxed); }

void ThreadPool::run(int participants, const std::function<void(int)>& body) {
  if (participants <= 1) {
    body(0);
    return;
  }
  const bool one_each = binds && participants <= static_cast<int>(cpus_.size());
  Job job{&body, participants, one_each ? sched_getcpu() : kAnywhere};
  {
    std::lock_guard lock(mutex_);
    start_workers(participants);
    jobs_.push_back(&job);
    ++num_jobs_;
    int helpers = participants - 1;
    for (const auto& worker : workers_) {
      if (helpers == 0) break;
      if (job.caller_cpu != kAnywhere && worker->cpu == job.caller_cpu) continue;
      --helpers;
      if (worker->asleep) worker->wake.notify_one();
    }
  }

  body(0);

  {
    std::lock_guard lock(mutex_);
    if (std::erase(jobs_, &job) > 0) --num_jobs_;  // no worker joins from here on
  }
  spin_until([&] { return job.running.load(std::memory_order_acquire) == 0; }, [] { return false; });
  std::unique_lock lock(mutex_);
  job.done.wait(lock, [&] { return job.running == 0; });
}

// The oldest job that this worker may help with, or null.
ThreadPool::Job* ThreadPool::take(const Worker& worker) {
  for (Job* job : jobs_) {
    if (job->caller_cpu == kAnywhere || job->caller_cpu != worker.cpu) return job;
  }
  return nullptr;
}

bool ThreadPool::stays_awake(const Worker& worker) const {
  return num_awake_.load(std::memory_order_relaxed) > 0 && (cpus_.empty() || worker.cpu != cpus_.front());
}

void ThreadPool::work(Worker& self) {
  std::unique_lock lock(mutex_);
  for (;;) {
    Job* found = take(self);
    if (found == nullptr) {
      lock.unlock();
      spin_until([this] { return num_jobs_.load(std::memory_order_relaxed) > 0; },
                 [&] { return stays_awake(self); });
      lock.lock();
      self.asleep = true;
      self.wake.wait(lock, [&] { return (found = take(self)) != nullptr; });
      self.asleep = false;
    }
    Job& job = *found;
    const int participant = job.joined++;
    if (job.joined == job.participants) {
      std::erase(jobs_, &job);
      --num_jobs_;
    }
    ++job.running;
    lock.unlock();
    (*job.body)(participant);
    lock.lock();
    // Notify under the lock: the job is on the caller's stack and ends with the wait.
    if (--job.running == 0) job.done.notify_one();
  }
}

}  // namespace neo_desktop
