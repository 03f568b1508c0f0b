// CandleP1Update: updates weights and the state of their optimizer, in one pass over memory.
//
// With several ranks, by the average of their gradients, through memory that the ranks of a node
// share. An execution then waits until that of every rank has begun, so all ranks must execute these
// operations in the same order.

#include <cstring>
#include <vector>

#include "on_node.h"
#include "tensorflow.h"
#include "updates.h"

namespace tensorflow_c {
namespace {

static_assert(kMaxArrays == node_memory::kMaxArrays);

struct Settings {
  on_node::Settings ranks;
  int32_t rule;
  int32_t num_weights;
  int32_t num_states;  // of all weights together
};

void* create(Construction* construction) {
  auto* settings = new Settings();
  Outcome outcome;
  on_node::get_settings(construction, &settings->ranks, outcome);
  if (outcome.ok()) tf.get_int(construction, "rule", &settings->rule, outcome);
  if (outcome.ok()) tf.get_int(construction, "num_weights", &settings->num_weights, outcome);
  if (outcome.ok()) tf.get_int(construction, "num_states", &settings->num_states, outcome);
  if (outcome.ok() && (settings->rule < 0 || settings->rule >= kNumRules ||
                       settings->num_states !=
                           (kRules[settings->rule].num_arrays - 1) * settings->num_weights)) {
    tf.set_status(outcome, 3 /* invalid argument */, "CandleP1Update: not the state of this rule");
  }
  if (!outcome.ok()) tf.fail_construction(construction, outcome);
  return settings;
}

void destroy(void* settings) { delete static_cast<Settings*>(settings); }

// For a variable whose memory another tensor still uses.
void copy(Context*, Tensor* source, Tensor* destination) {
  std::memcpy(tf.data(destination), tf.data(source), tf.num_bytes(source));
  tf.delete_tensor(source);
  tf.delete_tensor(destination);
}

// The variables and the gradients that an execution works on, and their locks.
class Inputs {
 public:
  Inputs(Context* context, const Settings& settings, Status* status)
      : tensors_(settings.num_states + 2 * settings.num_weights + 1) {
    const int num_variables = settings.num_states + settings.num_weights;
    std::vector<int> variables(num_variables);
    for (int i = 0; i < num_variables; ++i) variables[i] = i;
    for (std::size_t i = num_variables; i < tensors_.size(); ++i) {
      tf.get_input(context, static_cast<int>(i), tensors_[i].out(), status);
      if (tf.code(status) != 0) return;
    }
    tf.lock_variables(context, false, false, variables.data(), variables.size(), copy, &lock_,
                      status);
    for (int i : variables) {
      if (tf.code(status) != 0) return;
      tf.get_variable(context, i, false, false, false, copy, tensors_[i].out(), status);
    }
  }
  ~Inputs() {
    if (lock_ != nullptr) tf.release(lock_);
  }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  const Held& operator[](std::size_t i) const { return tensors_[i]; }

 private:
  std::vector<Held> tensors_;
  LockHolder* lock_ = nullptr;
};

// Returns the arrays of each weight; none, and an error, if their sizes do not match.
std::vector<node_memory::Updated> arrays_of(const Inputs& inputs, const Settings& settings,
                                            Status* status) {
  const int num_weights = settings.num_weights, num_variables = num_weights + settings.num_states;
  const Rule& rule = kRules[settings.rule];
  bool fits = static_cast<int>(inputs[num_variables + num_weights].num_bytes() / sizeof(float)) ==
              rule.num_constants;
  std::vector<node_memory::Updated> all;
  for (int i = 0; i < num_weights; ++i) {
    const Held& gradient = inputs[num_variables + i];
    node_memory::Updated each{gradient.floats(), {}, rule.num_arrays,
                              gradient.num_bytes() / sizeof(float)};
    for (int array = 0; array < rule.num_arrays; ++array) {
      const Held& variable = inputs[array * num_weights + i];
      fits = fits && variable.is_float() && variable.num_bytes() == gradient.num_bytes();
      each.arrays[array] = variable.floats();
    }
    all.push_back(each);
  }
  if (fits) return all;
  tf.set_status(status, 3 /* invalid argument */, "CandleP1Update: unequal shapes or dtypes");
  return {};
}

// Returns the time in which the first thread updated, in s.
double update(const Settings& settings, const std::vector<node_memory::Updated>& all,
              const float* constants, Status* status) {
  const Rule& rule = kRules[settings.rule];
  const auto apply = [&](float* const* arrays, const float* gradient, std::size_t num) {
    rule.apply(arrays, gradient, num, constants);
  };
  std::size_t total = 0;
  for (const node_memory::Updated& each : all) total += each.num;
  const std::size_t num_parts = parts_of(total, settings.ranks.threads);
  const auto part_of = [&](std::size_t number) {
    std::vector<node_memory::Updated> part;
    for (const node_memory::Updated& each : all) {
      const std::size_t begin = node_memory::bound(each.num, number, num_parts);
      const std::size_t end = node_memory::bound(each.num, number + 1, num_parts);
      part.push_back(node_memory::part_of(each, begin, end - begin));
    }
    return part;
  };
  if (total == 0) return 0;  // without the barrier that ends a meeting
  if (settings.ranks.num_ranks == 1) {
    in_threads(num_parts, [&](std::size_t number) {
      for (const node_memory::Updated& each : part_of(number)) {
        apply(each.arrays, each.gradient, each.num);
      }
    });
    return 0;
  }
  std::vector<double> apart_s(num_parts);
  on_node::together(settings.ranks, num_parts, status,
                    [&](node_memory::Thread& thread, std::size_t number) {
                      return thread.update(part_of(number), apply, apart_s[number]);
                    });
  return apart_s[0];
}

void compute(void* kernel, Context* context) {
  const auto& settings = *static_cast<Settings*>(kernel);
  Outcome outcome;
  Held apart_s;
  const Inputs inputs(context, settings, outcome);
  if (outcome.ok()) {
    *apart_s.out() =
        tf.allocate_output(context, 0, kDouble, nullptr, 0, sizeof(double), outcome);
  }
  std::vector<node_memory::Updated> all;
  if (outcome.ok()) all = arrays_of(inputs, settings, outcome);
  if (outcome.ok()) {
    const float* constants = inputs[2 * settings.num_weights + settings.num_states].floats();
    *static_cast<double*>(apart_s.any()) = update(settings, all, constants, outcome);
  }
  if (!outcome.ok()) tf.fail(context, outcome);
}

}  // namespace

void register_update(Status* status) {
  OpBuilder* operation = tf.new_op("CandleP1Update");
  tf.add_attr(operation, "num_weights: int >= 1");
  tf.add_attr(operation, "num_states: int >= 0");
  tf.add_input(operation, "weights: num_weights * resource");
  tf.add_input(operation, "states: num_states * resource");
  tf.add_input(operation, "gradients: num_weights * float");
  tf.add_input(operation, "constants: float");
  tf.add_output(operation, "apart_s: double");
  tf.add_attr(operation, "rule: int");
  on_node::add_attributes(operation);
  tf.set_stateful(operation, true);
  tf.set_shape_function(operation, scalar_output);
  tf.register_op(operation, status);
  if (tf.code(status) != 0) return;
  KernelBuilder* kernel = tf.new_kernel("CandleP1Update", "CPU", create, compute, destroy);
  tf.register_kernel("CandleP1Update", kernel, status);
}

}  // namespace tensorflow_c
