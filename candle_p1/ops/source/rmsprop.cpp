// CandleP1Rmsprop: RMSprop without momentum, in one pass over memory.
//
// TensorFlow's own operation keeps a momentum and takes three passes, which read and write twice as
// much.

#include <cmath>
#include <cstring>

#include "loops.h"
#include "tensorflow.h"

namespace tensorflow_c {
namespace {

struct Settings {
  float decay;
  float epsilon;        // added under the root, as in Keras 3
  float outer_epsilon;  // added to the root, as in Keras 2
  int32_t threads;
};

void* create(Construction* construction) {
  auto* settings = new Settings();
  Outcome outcome;
  tf.get_float(construction, "decay", &settings->decay, outcome);
  if (outcome.ok()) tf.get_float(construction, "epsilon", &settings->epsilon, outcome);
  if (outcome.ok()) {
    tf.get_float(construction, "outer_epsilon", &settings->outer_epsilon, outcome);
  }
  if (outcome.ok()) tf.get_int(construction, "threads", &settings->threads, outcome);
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

FOR_EVERY_PROCESSOR void update(float* __restrict variable, float* __restrict mean_square,
                                const float* __restrict gradient, std::size_t num, float rate,
                                float decay, float epsilon, float outer_epsilon) {
  for (std::size_t i = 0; i < num; ++i) {
    const float g = gradient[i];
    const float square = decay * mean_square[i] + (1 - decay) * (g * g);
    mean_square[i] = square;
    variable[i] -= rate * g / (std::sqrt(square + epsilon) + outer_epsilon);
  }
}

void compute(void* kernel, Context* context) {
  const auto& settings = *static_cast<Settings*>(kernel);
  Outcome outcome;
  Held gradient, rate, variable, mean_square;
  tf.get_input(context, 2, gradient.out(), outcome);
  if (outcome.ok()) tf.get_input(context, 3, rate.out(), outcome);
  if (!outcome.ok()) return tf.fail(context, outcome);

  const int variables[] = {0, 1};
  LockHolder* lock = nullptr;
  tf.lock_variables(context, false, false, variables, 2, copy, &lock, outcome);
  if (outcome.ok()) {
    tf.get_variable(context, 0, false, false, false, copy, variable.out(), outcome);
  }
  if (outcome.ok()) {
    tf.get_variable(context, 1, false, false, false, copy, mean_square.out(), outcome);
  }
  if (outcome.ok() && !(variable.is_float() && mean_square.is_float() &&
                        variable.num_bytes() == gradient.num_bytes() &&
                        mean_square.num_bytes() == gradient.num_bytes())) {
    tf.set_status(outcome, 3 /* invalid argument */, "CandleP1Rmsprop: unequal shapes or dtypes");
  }
  if (outcome.ok()) {
    const float step = *rate.floats();
    in_parts(gradient.num_bytes() / sizeof(float), settings.threads,
             [&](std::size_t begin, std::size_t end) {
               update(variable.floats() + begin, mean_square.floats() + begin,
                      gradient.floats() + begin, end - begin, step, settings.decay,
                      settings.epsilon, settings.outer_epsilon);
             });
  } else {
    tf.fail(context, outcome);
  }
  if (lock != nullptr) tf.release(lock);
}

}  // namespace

void register_rmsprop(Status* status) {
  OpBuilder* operation = tf.new_op("CandleP1Rmsprop");
  tf.add_input(operation, "variable: resource");
  tf.add_input(operation, "mean_square: resource");
  tf.add_input(operation, "gradient: float");
  tf.add_input(operation, "rate: float");
  tf.add_attr(operation, "decay: float");
  tf.add_attr(operation, "epsilon: float");
  tf.add_attr(operation, "outer_epsilon: float = 0.0");
  tf.add_attr(operation, "threads: int");
  tf.set_stateful(operation, true);
  tf.register_op(operation, status);
  if (tf.code(status) != 0) return;
  KernelBuilder* kernel = tf.new_kernel("CandleP1Rmsprop", "CPU", create, compute, destroy);
  tf.register_kernel("CandleP1Rmsprop", kernel, status);
}

}  // namespace tensorflow_c
