// What operations have in common in which the ranks of a node work together.

#pragma once

#include <algorithm>
#include <cstdio>
#include <vector>

#include "loops.h"
#include "node_memory.h"
#include "tensorflow.h"

namespace tensorflow_c::on_node {

struct Settings {
  int64_t memory;  // the address of what all ranks have mapped
  int64_t tag;     // the same on all ranks, another one for everything that they exchange
  int32_t rank;
  int32_t num_ranks;
  int32_t threads;
  float timeout_s;
};

inline void add_attributes(OpBuilder* operation) {
  tf.add_attr(operation, "memory: int = 0");
  tf.add_attr(operation, "tag: int = 0");
  tf.add_attr(operation, "rank: int = 0");
  tf.add_attr(operation, "num_ranks: int = 1");
  tf.add_attr(operation, "threads: int");
  tf.add_attr(operation, "timeout_s: float = 0.0");
}

inline void get_settings(Construction* construction, Settings* settings, Status* status) {
  tf.get_int64(construction, "memory", &settings->memory, status);
  if (tf.code(status) == 0) tf.get_int64(construction, "tag", &settings->tag, status);
  if (tf.code(status) == 0) tf.get_int(construction, "rank", &settings->rank, status);
  if (tf.code(status) == 0) tf.get_int(construction, "num_ranks", &settings->num_ranks, status);
  if (tf.code(status) == 0) tf.get_int(construction, "threads", &settings->threads, status);
  if (tf.code(status) == 0) tf.get_float(construction, "timeout_s", &settings->timeout_s, status);
}

inline void describe(const node_memory::Outcome& outcome, const Settings& settings,
                     Status* status) {
  char message[256];
  if (outcome.result == node_memory::Result::kOtherTag) {
    std::snprintf(message, sizeof message,
                  "ranks %d and %d of a node average different gradients at the same time: build"
                  " the same model on every rank, with one optimizer; or choose"
                  " --averaging horovod",
                  settings.rank, outcome.rank);
  } else {
    std::snprintf(message, sizeof message,
                  "rank %d of this node did not reach the collective within %.0f s"
                  " (--stall_shutdown_s)",
                  outcome.rank, static_cast<double>(settings.timeout_s));
  }
  tf.set_status(status, 10 /* aborted */, message);
}

// Meets the other ranks, calls prepare(thread), then work(thread, number) in threads, each of which
// works with that of the same number on the other ranks. Both return a node_memory::Outcome.
template <typename Prepare, typename Work>
void together(const Settings& settings, std::size_t num_threads, Status* status, Prepare prepare,
              Work work) {
  const auto thread_of = [&](std::size_t number) {
    return node_memory::Thread(reinterpret_cast<void*>(settings.memory), settings.rank,
                               settings.num_ranks, settings.threads, static_cast<int>(number),
                               settings.timeout_s);
  };
  node_memory::Thread first = thread_of(0);
  node_memory::Outcome met = first.meet(settings.tag);
  if (met.result == node_memory::Result::kDone) met = prepare(first);
  if (met.result != node_memory::Result::kDone) return describe(met, settings, status);
  std::vector<node_memory::Outcome> outcomes(num_threads);
  in_threads(num_threads, [&](std::size_t number) {
    node_memory::Thread thread = thread_of(number);
    outcomes[number] = work(thread, number);
  });
  for (const node_memory::Outcome& each : outcomes) {
    if (each.result != node_memory::Result::kDone) return describe(each, settings, status);
  }
}

// The same without preparing anything.
template <typename Work>
void together(const Settings& settings, std::size_t num_threads, Status* status, Work work) {
  const auto nothing = [](node_memory::Thread&) { return node_memory::Outcome(); };
  together(settings, num_threads, status, nothing, work);
}

}  // namespace tensorflow_c::on_node
