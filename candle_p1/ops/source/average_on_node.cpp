// CandleP1AverageOnNode: the average of a tensor over the ranks of a node, or the tensor of one of
// them, in the memory of the rank's own tensor if nothing else needs it.
//
// An execution waits until that of every rank has begun, so all ranks must execute these operations
// in the same order.

#include <cstring>

#include "on_node.h"
#include "tensorflow.h"

namespace tensorflow_c {
namespace {

struct Settings {
  on_node::Settings ranks;
  int32_t root;  // whose tensor all ranks get; -1: the average
};

void* create(Construction* construction) {
  auto* settings = new Settings();
  Outcome outcome;
  on_node::get_settings(construction, &settings->ranks, outcome);
  if (outcome.ok()) tf.get_int(construction, "root", &settings->root, outcome);
  if (!outcome.ok()) tf.fail_construction(construction, outcome);
  return settings;
}

void destroy(void* settings) { delete static_cast<Settings*>(settings); }

template <typename Value>
void exchange(const Settings& settings, const Held& values, const Held& results, Status* status) {
  const std::size_t num = results.num_bytes() / sizeof(Value);
  if (num == 0) return;  // without the barrier that ends a meeting
  const auto* from = static_cast<const Value*>(values.any());
  auto* to = static_cast<Value*>(results.any());
  const std::size_t num_parts = parts_of(num, settings.ranks.threads);
  on_node::together(
      settings.ranks, num_parts, status, [&](node_memory::Thread& thread, std::size_t number) {
        const std::size_t begin = num * number / num_parts;
        const std::size_t size = num * (number + 1) / num_parts - begin;
        if (settings.root < 0) return thread.average(from + begin, to + begin, size);
        if (settings.root == settings.ranks.rank && from != to) {
          std::memcpy(to + begin, from + begin, size * sizeof(Value));
        }
        return thread.broadcast(to + begin, size, settings.root);
      });
}

void compute(void* kernel, Context* context) {
  const auto& settings = *static_cast<Settings*>(kernel);
  Outcome outcome;
  Held values, results;
  reuse_first_input(context, values, results, outcome);
  if (outcome.ok()) {
    const auto exchange_all = values.is_float() ? exchange<float> : exchange<double>;
    exchange_all(settings, values, results, outcome);
  }
  if (!outcome.ok()) tf.fail(context, outcome);
}

}  // namespace

void register_average_on_node(Status* status) {
  OpBuilder* operation = tf.new_op("CandleP1AverageOnNode");
  tf.add_input(operation, "value: T");
  tf.add_output(operation, "result: T");
  tf.add_attr(operation, "T: {float, double}");
  tf.add_attr(operation, "root: int = -1");
  on_node::add_attributes(operation);
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
