// Hardware queues. A stream's operations enter its queue, a graph's nodes enter any queue. An entry with an
// unfinished wait, for another operation or a word in memory, blocks all later entries of its queue: so CUDA
// may serialise streams.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <map>
#include <random>

#include "device.h"

namespace imitated {

std::mutex& lock = *new std::mutex;

namespace {

constexpr unsigned kMostQueues = 8;
using Clock = std::chrono::steady_clock;

std::condition_variable& something_new = *new std::condition_variable;
std::condition_variable& something_ended = *new std::condition_variable;
auto& queues = *new std::vector<std::deque<OperationPtr>>(kMostQueues);
unsigned num_pending = 0, num_running = 0, num_deadlocks = 0;
double timeout_s = 20.0;

bool is_counting = false;
auto& calls = *new std::map<std::string, long>;

std::mt19937& generator() {
  static auto& made = *new std::mt19937(static_cast<unsigned>(setting("IMITATED_GPU_SEED", 0)));
  return made;
}

// Returns 1 to 8; 0: a random number.
unsigned chosen_queues(double wanted) {
  return wanted > 0 ? static_cast<unsigned>(wanted) : 1 + draw(kMostQueues);
}

unsigned num_queues = 0;  // 0: not chosen yet

bool may_run(const OperationPtr& operation) {
  auto ended = [](const OperationPtr& other) { return other->ended; };
  return std::all_of(operation->after.begin(), operation->after.end(), ended) &&
         (!operation->ready || operation->ready());
}

// Returns a message that names the waits of every queue.
std::string standstill() {
  std::string text = "a deadlock: nothing has been able to run for " + std::to_string(timeout_s) + " s";
  for (unsigned i = 0; i < num_queues; i++) {
    if (queues[i].empty()) continue;
    const auto& head = queues[i].front();
    text +=
        "; queue " + std::to_string(i) + " of " + std::to_string(num_queues) + " holds '" + head->name + "'";
    for (const auto& other : head->after)
      if (!other->ended) text += ", which comes after '" + std::string(other->name) + "'";
    if (std::all_of(head->after.begin(), head->after.end(), [](auto& other) { return other->ended; }))
      text += ", for which nothing has been written";
    text += ", and " + std::to_string(queues[i].size() - 1) + " behind it";
  }
  return text;
}

void work() {
  Guard guard(lock);
  auto last_step = Clock::now();
  while (true) {
    if (!num_pending) {
      something_new.wait(guard, [] { return num_pending > 0; });
      last_step = Clock::now();
    }
    std::vector<unsigned> able;
    for (unsigned i = 0; i < kMostQueues; i++)
      if (!queues[i].empty() && may_run(queues[i].front())) able.push_back(i);
    if (able.empty()) {  // all queues wait for words in memory
      if (Clock::now() - last_step > std::chrono::duration<double>(timeout_s)) {
        num_deadlocks++;
        die(cudaErrorLaunchTimeout, standstill());
        continue;
      }
      guard.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      guard.lock();
      continue;
    }
    auto& queue = queues[able[draw(able.size())]];
    OperationPtr operation = queue.front();
    const Injuries injuries = next_injuries();
    if (injuries.error) {
      die(injuries.error, operation->name);
      continue;
    }
    if (injuries.never_ends) {
      complain(std::string("from now on, '") + operation->name + "' never ends");
      operation->ready = [] { return false; };
      continue;
    }
    queue.pop_front();
    num_pending--;
    num_running++;
    const int us = delay_us();
    guard.unlock();
    if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
    if (operation->run) operation->run();
    guard.lock();
    num_running--;
    operation->ended = true;
    operation->after.clear();
    last_step = Clock::now();
    something_ended.notify_all();
  }
}

}  // namespace

void note_call(const char* name) {
  if (is_counting) calls[name]++;
}

double setting(const char* name, double otherwise) {
  const char* given = std::getenv(name);
  return given ? std::atof(given) : otherwise;
}

unsigned draw(unsigned count) { return generator()() % count; }

void set_up_queues() {
  generator().seed(static_cast<unsigned>(setting("IMITATED_GPU_SEED", 0)));
  num_queues = std::min(chosen_queues(setting("IMITATED_GPU_QUEUES", 0)), kMostQueues);
  timeout_s = setting("IMITATED_GPU_TIMEOUT_S", 20.0);
  num_deadlocks = 0;
}

OperationPtr submit(unsigned queue, const char* name, std::function<void()> run, std::function<bool()> ready,
                    std::vector<OperationPtr> after) {
  static bool is_started = false;
  if (!num_queues) set_up_queues();
  if (!is_started) std::thread(work).detach();
  is_started = true;
  auto operation = std::make_shared<Operation>(Operation{name, std::move(run), std::move(ready), {}});
  for (auto& other : after)
    if (other && !other->ended) operation->after.push_back(other);
  queues[queue % num_queues].push_back(operation);
  num_pending++;
  something_new.notify_all();
  return operation;
}

cudaError_t wait_until_idle(Guard& guard) {
  something_ended.wait(guard, [] { return death() || (num_pending == 0 && num_running == 0); });
  return death();
}

cudaError_t wait_for(Guard& guard, const OperationPtr& operation) {
  something_ended.wait(guard, [&] { return death() || !operation || operation->ended; });
  return death();
}

void drop_all() {
  for (auto& queue : queues) {
    for (auto& operation : queue) {
      operation->ended = true;
      operation->after.clear();
    }
    queue.clear();
  }
  num_pending = 0;
  something_ended.notify_all();
}

}  // namespace imitated

using namespace imitated;

// Sets the number of queues, 1 to 8; 0: a random number. Waits until the device is idle.
EXPORT int imitated_gpu_set_queues(unsigned count, unsigned seed) {
  Guard guard(lock);
  if (count > kMostQueues) return fail(cudaErrorInvalidValue, "there are 8 queues at most");
  if (auto error = wait_until_idle(guard)) return error;
  generator().seed(seed);
  num_queues = chosen_queues(count);
  return cudaSuccess;
}

// Sets the time without runnable work that counts as a deadlock.
EXPORT void imitated_gpu_set_timeout(double seconds) {
  Guard guard(lock);
  timeout_s = seconds;
}

EXPORT unsigned imitated_gpu_num_deadlocks() {
  Guard guard(lock);
  return num_deadlocks;
}

// Starts to count the calls that add work to a stream, by the name of the work; a graph counts once.
EXPORT void imitated_gpu_count_calls() {
  Guard guard(lock);
  calls.clear();
  is_counting = true;
}

// Ends the count, and returns lines "COUNT NAME", valid until the next call.
EXPORT const char* imitated_gpu_counted_calls() {
  static auto& text = *new std::string;
  Guard guard(lock);
  is_counting = false;
  text.clear();
  for (const auto& [name, count] : calls) text += std::to_string(count) + " " + name + "\n";
  return text.c_str();
}
