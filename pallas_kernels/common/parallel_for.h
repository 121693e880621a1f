// A loop over units of work on XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace pallas_kernels {

// Runs unit(0..count-1) on the pool and on this thread; returns when all are done. Tasks that start late find nothing
// left and touch only the shared counter, so that this never waits for a thread that is waiting itself.
template <typename Unit>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, int64_t num_threads, const Unit& unit) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto shared = std::make_shared<Shared>();
  const Unit* work = &unit;
  const auto run = [shared, count, work] {
    for (int64_t i; (i = shared->next.fetch_add(1)) < count;) {
      (*work)(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(num_threads, count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([run] { run(); });
  run();
  while (shared->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

}  // namespace pallas_kernels
