// CandleP1Update: updates weights and the state of their optimizer, in one pass over memory.
//
// Gradients of kernels may be given as their factors: see factors.h.
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
  int32_t num_states;    // of all weights together
  int32_t num_factored;  // how many of the weights, the first ones, have factors
};

void* create(Construction* construction) {
  auto* settings = new Settings();
  Outcome outcome;
  on_node::get_settings(construction, &settings->ranks, outcome);
  if (outcome.ok()) tf.get_int(construction, "rule", &settings->rule, outcome);
  if (outcome.ok()) tf.get_int(construction, "num_weights", &settings->num_weights, outcome);
  if (outcome.ok()) tf.get_int(construction, "num_states", &settings->num_states, outcome);
  if (outcome.ok()) tf.get_int(construction, "num_factored", &settings->num_factored, outcome);
  if (outcome.ok() && (settings->rule < 0 || settings->rule >= kNumRules ||
                       settings->num_factored > settings->num_weights ||
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
      : tensors_(settings.num_states + 2 * settings.num_weights + 1 + 3 * settings.num_factored) {
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

// The factors of a gradient: of this rank's, and of the average of all ranks'.
class Factored {
 public:
  Factored(const Inputs& inputs, const Settings& settings, int weight)
      : upstream_(inputs[settings.num_weights + settings.num_states + weight]) {
    const Held& weights = inputs[weight];
    const int first = 2 * settings.num_weights + settings.num_states + 1 + weight;
    const Held& places = inputs[first];
    const Held& values = inputs[first + settings.num_factored];
    const Held& decay = inputs[first + 2 * settings.num_factored];
    own_ = {static_cast<const int64_t*>(places.any()), values.floats(),
            values.num_bytes() / sizeof(float)};
    fits_ = tf.num_dims(weights.get()) == 2 && tf.num_dims(upstream_.get()) == 2 &&
            tf.dim(weights.get(), 1) == tf.dim(upstream_.get(), 1) &&
            decay.num_bytes() == sizeof(float) &&
            places.num_bytes() == own_.num * 2 * sizeof(int64_t);
    if (!fits_) return;
    factors_.inputs = Columns(tf.dim(weights.get(), 0));
    factors_.units = tf.dim(weights.get(), 1);
    factors_.decay = *decay.floats();
    factors_.weights = weights.floats();
  }

  bool fits() const { return fits_; }
  const Factors* average() const { return &factors_; }

  // Takes those of this rank for the average. Returns false if there is no such input.
  bool take_own() {
    const std::size_t num_rows = tf.dim(upstream_.get(), 0);
    factors_.upstream = upstream_.floats();
    if (!factors_.inputs.count(own_, num_rows)) return false;
    factors_.inputs.add(own_, 0, 1.0f);
    return true;
  }

  node_memory::Outcome gather(node_memory::Thread& thread) {
    node_memory::Outcome outcome =
        thread.gather(own_.places, own_.num * 2 * sizeof(int64_t), places_);
    if (outcome.result == node_memory::Result::kDone) {
      outcome = thread.gather(own_.values, own_.num * sizeof(float), values_);
    }
    if (outcome.result == node_memory::Result::kDone) {
      outcome = thread.gather(upstream_.any(), upstream_.num_bytes(), all_upstream_);
    }
    return outcome;
  }

  // Makes those of the average of what has been gathered, as `take_own`.
  bool take_all(int num_ranks) {
    const std::size_t row_bytes = factors_.units * sizeof(float);
    factors_.upstream = reinterpret_cast<const float*>(all_upstream_.bytes.data());
    const auto part = [&](int rank) {
      const std::size_t first = values_.starts[rank] / sizeof(float);
      return SparseInputs{reinterpret_cast<const int64_t*>(places_.bytes.data()) + 2 * first,
                          reinterpret_cast<const float*>(values_.bytes.data()) + first,
                          values_.starts[rank + 1] / sizeof(float) - first};
    };
    const auto& starts = all_upstream_.starts;
    for (int i = 0; i < num_ranks; ++i) {
      const std::size_t num_rows = (starts[i + 1] - starts[i]) / row_bytes;
      if (!factors_.inputs.count(part(i), num_rows)) return false;
    }
    for (int i = 0; i < num_ranks; ++i) {
      factors_.inputs.add(part(i), starts[i] / row_bytes, 1.0f / static_cast<float>(num_ranks));
    }
    return true;
  }

 private:
  const Held& upstream_;
  SparseInputs own_{};
  bool fits_ = false;
  Factors factors_{Columns(0), nullptr, 0, 0.0f, nullptr};
  node_memory::Gathered places_, values_, all_upstream_;
};

// Returns the arrays of each weight; none, and an error, if their sizes do not match.
std::vector<node_memory::Updated> arrays_of(const Inputs& inputs, const Settings& settings,
                                            const std::vector<Factored>& factored,
                                            Status* status) {
  const int num_weights = settings.num_weights, num_variables = num_weights + settings.num_states;
  const Rule& rule = kRules[settings.rule];
  bool fits = static_cast<int>(inputs[num_variables + num_weights].num_bytes() / sizeof(float)) ==
              rule.num_constants;
  std::vector<node_memory::Updated> all;
  for (int i = 0; i < num_weights; ++i) {
    const Held& gradient = inputs[num_variables + i];
    const bool has_factors = i < settings.num_factored;
    const std::size_t num_bytes = (has_factors ? inputs[i] : gradient).num_bytes();
    node_memory::Updated each{gradient.floats(), nullptr, {}, rule.num_arrays,
                              num_bytes / sizeof(float)};
    if (has_factors) {
      fits = fits && factored[i].fits();
      each.factors = factored[i].average();
    }
    for (int array = 0; array < rule.num_arrays; ++array) {
      const Held& variable = inputs[array * num_weights + i];
      fits = fits && variable.is_float() && variable.num_bytes() == num_bytes;
      each.arrays[array] = variable.floats();
    }
    all.push_back(each);
  }
  if (fits) return all;
  tf.set_status(status, 3 /* invalid argument */, "CandleP1Update: unequal shapes or dtypes");
  return {};
}

double no_such_input(Status* status) {
  tf.set_status(status, 3 /* invalid argument */,
                "CandleP1Update: inputs outside of the batch or the weights");
  return 0;
}

// Returns the time in which the first thread updated, in s.
double update(const Settings& settings, const std::vector<node_memory::Updated>& all,
              std::vector<Factored>& factored, const float* constants, Status* status) {
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
  bool exist = true;
  if (settings.ranks.num_ranks == 1) {
    for (Factored& each : factored) exist = exist && each.take_own();
    if (!exist) return no_such_input(status);
    in_threads(num_parts, [&](std::size_t number) {
      for (const node_memory::Updated& each : part_of(number)) {
        if (each.factors != nullptr) {
          node_memory::update_by_factors(each, apply);
        } else {
          apply(each.arrays, each.gradient, each.num);
        }
      }
    });
    return 0;
  }
  std::vector<double> apart_s(num_parts);
  const auto prepare = [&](node_memory::Thread& thread) {
    node_memory::Outcome outcome;
    for (Factored& each : factored) {
      if (outcome.result == node_memory::Result::kDone) outcome = each.gather(thread);
      if (outcome.result == node_memory::Result::kDone) {
        exist = exist && each.take_all(settings.ranks.num_ranks);
      }
    }
    return outcome;
  };
  on_node::together(settings.ranks, num_parts, status, prepare,
                    [&](node_memory::Thread& thread, std::size_t number) {
                      if (!exist) return node_memory::Outcome();  // as on all other ranks
                      return thread.update(part_of(number), apply, apart_s[number]);
                    });
  return exist ? apart_s[0] : no_such_input(status);
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
  std::vector<Factored> factored;
  for (int i = 0; i < settings.num_factored && outcome.ok(); ++i) {
    factored.emplace_back(inputs, settings, i);
  }
  std::vector<node_memory::Updated> all;
  if (outcome.ok()) all = arrays_of(inputs, settings, factored, outcome);
  if (outcome.ok()) {
    const float* constants = inputs[2 * settings.num_weights + settings.num_states].floats();
    *static_cast<double*>(apart_s.any()) = update(settings, all, factored, constants, outcome);
  }
  if (!outcome.ok()) tf.fail(context, outcome);
}

}  // namespace

void register_update(Status* status) {
  OpBuilder* operation = tf.new_op("CandleP1Update");
  tf.add_attr(operation, "num_weights: int >= 1");
  tf.add_attr(operation, "num_states: int >= 0");
  tf.add_attr(operation, "num_factored: int >= 0");
  tf.add_input(operation, "weights: num_weights * resource");
  tf.add_input(operation, "states: num_states * resource");
  tf.add_input(operation, "gradients: num_weights * float");
  tf.add_input(operation, "constants: float");
  tf.add_input(operation, "places: num_factored * int64");
  tf.add_input(operation, "values: num_factored * float");
  tf.add_input(operation, "decays: num_factored * float");
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
