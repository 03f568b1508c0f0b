// CandleP1AverageOnNode: the average of a tensor over the ranks of a node, or the tensor of one of
// them, in the memory of the rank's own tensor if nothing else needs it.
//
// An execution waits until that of every rank has begun, so all ranks must execute these operations
// in the same order.

#include <cstring>
#include <vector>

#include "node_memory.h"
#include "tensorflow.h"

namespace tensorflow_c {
namespace {

struct Settings {
  int64_t memory;  // the address of what all ranks have mapped
  int64_t tag;     // the same on all ranks, another one for every tensor
  int32_t rank;
  int32_t num_ranks;
  int32_t threads;
  int32_t root;  // whose tensor all ranks get; -1: the average
  float patience_s;
};

void* create(Construction* construction) {
  auto* settings = new Settings();
  Outcome outcome;
  tf.get_int64(construction, "memory", &settings->memory, outcome);
  if (outcome.ok()) tf.get_int64(construction, "tag", &settings->tag, outcome);
  if (outcome.ok()) tf.get_int(construction, "rank", &settings->rank, outcome);
  if (outcome.ok()) tf.get_int(construction, "num_ranks", &settings->num_ranks, outcome);
  if (outcome.ok()) tf.get_int(construction, "threads", &settings->threads, outcome);
  if (outcome.ok()) tf.get_int(construction, "root", &settings->root, outcome);
  if (outcome.ok()) tf.get_float(construction, "patience_s", &settings->patience_s, outcome);
  if (!outcome.ok()) tf.fail_construction(construction, outcome);
  return settings;
}

void destroy(void* settings) { delete static_cast<Settings*>(settings); }

node_memory::Thread make_thread(const Settings& settings, int number) {
  return {reinterpret_cast<void*>(settings.memory),
          settings.rank,
          settings.num_ranks,
          settings.threads,
          number,
          settings.patience_s};
}

// Works in several threads, of which the first one has met those of the other ranks.
template <typename Value>
node_memory::Outcome exchange(const Settings& settings, const Held& values, const Held& results) {
  const std::size_t num = results.num_bytes() / sizeof(Value);
  if (num == 0) return {};  // without the barrier that ends a meeting
  const node_memory::Outcome outcome = make_thread(settings, 0).meet(settings.tag);
  if (outcome.result != node_memory::Result::kDone) return outcome;
  const auto* from = static_cast<const Value*>(values.any());
  auto* to = static_cast<Value*>(results.any());
  const std::size_t num_parts = parts_of(num, settings.threads);
  std::vector<node_memory::Outcome> outcomes(num_parts);
  in_threads(num_parts, [&](std::size_t number) {
    const std::size_t begin = num * number / num_parts, size = num * (number + 1) / num_parts - begin;
    node_memory::Thread thread = make_thread(settings, static_cast<int>(number));
    if (settings.root < 0) {
      outcomes[number] = thread.average(from + begin, to + begin, size);
      return;
    }
    if (settings.root == settings.rank && from != to) {
      std::memcpy(to + begin, from + begin, size * sizeof(Value));
    }
    outcomes[number] = thread.broadcast(to + begin, size, settings.root);
  });
  for (const node_memory::Outcome& each : outcomes) {
    if (each.result != node_memory::Result::kDone) return each;
  }
  return {};
}

void describe(const node_memory::Outcome& outcome, const Settings& settings, Status* status) {
  char message[256];
  if (outcome.result == node_memory::Result::kOtherTag) {
    std::snprintf(message, sizeof message,
                  "ranks %d and %d of a node average different gradients at the same time: build"
                  " the same model on every rank, with one optimizer; or choose"
                  " --averaging horovod",
                  settings.rank, outcome.rank);
  } else {
    std::snprintf(message, sizeof message,
                  "rank %d of this node has not come to average its gradients within %.0f s"
                  " (--stall_shutdown_s)",
                  outcome.rank, static_cast<double>(settings.patience_s));
  }
  tf.set_status(status, 10 /* aborted */, message);
}

void compute(void* kernel, Context* context) {
  const auto& settings = *static_cast<Settings*>(kernel);
  Outcome outcome;
  Held values, results;
  reuse_first_input(context, values, results, outcome);
  if (outcome.ok()) {
    const node_memory::Outcome result = values.is_float()
                                            ? exchange<float>(settings, values, results)
                                            : exchange<double>(settings, values, results);
    if (result.result != node_memory::Result::kDone) describe(result, settings, outcome);
  }
  if (!outcome.ok()) tf.fail(context, outcome);
}

}  // namespace

void register_average_on_node(Status* status) {
  OpBuilder* operation = tf.new_op("CandleP1AverageOnNode");
  tf.add_input(operation, "value: T");
  tf.add_output(operation, "result: T");
  tf.add_attr(operation, "T: {float, double}");
  tf.add_attr(operation, "memory: int");
  tf.add_attr(operation, "tag: int");
  tf.add_attr(operation, "rank: int");
  tf.add_attr(operation, "num_ranks: int");
  tf.add_attr(operation, "threads: int");
  tf.add_attr(operation, "root: int = -1");
  tf.add_attr(operation, "patience_s: float");
  tf.set_stateful(operation, true);
  tf.set_shape_function(operation, shape_of_first_input);
  tf.register_op(operation, status);
  if (tf.code(status) != 0) return;
  KernelBuilder* kernel =
      tf.new_kernel("CandleP1AverageOnNode", "CPU", create, compute, destroy);
  tf.register_kernel("CandleP1AverageOnNode", kernel, status);
}

}  // namespace tensorflow_c

// Returns the size of the memory that the ranks of a node share, which begins as zeros.
extern "C" __attribute__((visibility("default"))) std::size_t candle_p1_node_memory_bytes(
    int num_ranks, int num_threads) {
  return node_memory::num_bytes(num_ranks, num_threads);
}
