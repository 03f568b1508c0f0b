// CandleP1Clock: reads the clock when its input is ready.
//
// TensorFlow's own operation, Timestamp, is refused if operations have to be deterministic. This
// one has no state, so TensorFlow does not order two readings.

#include <time.h>

#include "tensorflow.h"

namespace tensorflow_c {
namespace {

// Writes CLOCK_MONOTONIC, as Python's time.perf_counter reads it, in seconds.
void compute(void*, Context* context) {
  Outcome outcome;
  Tensor* output = tf.allocate_output(context, 0, kDouble, nullptr, 0, sizeof(double), outcome);
  if (!outcome.ok()) return tf.fail(context, outcome);
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  *static_cast<double*>(tf.data(output)) = now.tv_sec + 1e-9 * now.tv_nsec;
  tf.delete_tensor(output);
}

}  // namespace

void register_clock(Status* status) {
  OpBuilder* operation = tf.new_op("CandleP1Clock");
  tf.add_attr(operation, "T: type");
  tf.add_input(operation, "after: T");
  tf.add_output(operation, "seconds: double");
  tf.set_shape_function(operation, scalar_output);
  tf.register_op(operation, status);
  if (tf.code(status) != 0) return;
  KernelBuilder* kernel = tf.new_kernel("CandleP1Clock", "CPU", nullptr, compute, nullptr);
  tf.register_kernel("CandleP1Clock", kernel, status);
}

}  // namespace tensorflow_c
