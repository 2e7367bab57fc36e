// Several parallel steps in a row, with one wake-up of the threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include "neo_desktop/thread_pool.h"
#include "pause.h"

namespace neo_desktop {

// Work in steps: threads share the items of a step, and finish all items before the next step. A late
// thread joins at the current step.
class Steps {
 public:
  using Body = std::function<void(int64_t item, int participant)>;

  void add(int64_t items, int64_t take, Body body) { steps_.emplace_back(items, take, std::move(body)); }

  void run(int threads) {
    ThreadPool::shared().run(threads, [&](int participant) {
      for (Step& step : steps_) step.help(participant);
    });
  }

 private:
  struct Step {
    Step(int64_t items, int64_t take, Body body) : items(items), take(take), body(std::move(body)) {}

    void help(int participant) {
      for (int64_t first; (first = next.fetch_add(take, std::memory_order_relaxed)) < items;) {
        const int64_t last = std::min(first + take, items);
        for (int64_t item = first; item < last; ++item) body(item, participant);
        done.fetch_add(last - first, std::memory_order_acq_rel);
      }
      constexpr int kPauses = 100;  // there may be fewer CPUs than threads
      for (int i = 0; done.load(std::memory_order_acquire) < items; ++i) {
        if (i < kPauses) {
          pause_cpu();
        } else {
          std::this_thread::yield();
        }
      }
    }

    const int64_t items;
    const int64_t take;
    const Body body;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };

  std::deque<Step> steps_;
};

}  // namespace neo_desktop
