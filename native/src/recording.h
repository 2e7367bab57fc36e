// Native calls of a thread, recorded while they run, to be repeated in one call.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace neo_desktop {

// Calls in order. They keep addresses, but no memory alive.
class Recording {
 public:
  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }

  // False: a call depends on more than the contents of its tensors, so a repetition may be wrong.
  bool is_complete = true;

  void append(const Recording& later) {
    calls_.insert(calls_.end(), later.calls_.begin(), later.calls_.end());
  }

  void run() const {
    for (const auto& call : calls_) call();
  }

 private:
  std::vector<std::function<void()>> calls_;
};

// Receives this thread's calls; null: they are not recorded.
inline thread_local std::shared_ptr<Recording> recording;

// Wraps a function for Python: the call is recorded if the thread records.
template <class... Arguments>
auto recorded(void (*function)(Arguments...)) {
  return [function](Arguments... arguments) {
    function(arguments...);
    if (recording) recording->add([=] { function(arguments...); });
  };
}

// The same for a function whose result or effect a repetition would not have.
template <class Result, class... Arguments>
auto not_recorded(Result (*function)(Arguments...)) {
  return [function](Arguments... arguments) {
    if (recording) recording->is_complete = false;
    return function(arguments...);
  };
}

}  // namespace neo_desktop
