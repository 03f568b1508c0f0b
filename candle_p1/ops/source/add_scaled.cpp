// CandleP1AddScaled: sum = values + factor * others, in one pass, and in the memory of `values` if
// nothing else needs it.
//
// TensorFlow's product and sum take five passes over memory, this takes three.

#include "loops.h"
#include "tensorflow.h"

namespace tensorflow_c {
namespace {

void* create(Construction* construction) {
  auto* threads = new int32_t();
  Outcome outcome;
  tf.get_int(construction, "threads", threads, outcome);
  if (!outcome.ok()) tf.fail_construction(construction, outcome);
  return threads;
}

void destroy(void* threads) { delete static_cast<int32_t*>(threads); }

// Without __restrict, because `sum` may be `values`.
FOR_EVERY_PROCESSOR void add(float* sum, const float* values, const float* __restrict others,
                             std::size_t num, float factor) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < num; ++i) sum[i] = values[i] + factor * others[i];
}

void compute(void* threads, Context* context) {
  Outcome outcome;
  Held values, others, factor, sum;
  reuse_first_input(context, values, sum, outcome);
  if (outcome.ok()) tf.get_input(context, 1, others.out(), outcome);
  if (outcome.ok()) tf.get_input(context, 2, factor.out(), outcome);
  if (outcome.ok() && others.num_bytes() != sum.num_bytes()) {
    tf.set_status(outcome, 3 /* invalid argument */, "CandleP1AddScaled: unequal shapes");
  }
  if (!outcome.ok()) return tf.fail(context, outcome);
  in_parts(sum.num_bytes() / sizeof(float), *static_cast<int32_t*>(threads),
           [&](std::size_t begin, std::size_t end) {
             add(sum.floats() + begin, values.floats() + begin, others.floats() + begin,
                 end - begin, *factor.floats());
           });
}

}  // namespace

void register_add_scaled(Status* status) {
  OpBuilder* operation = tf.new_op("CandleP1AddScaled");
  tf.add_input(operation, "values: float");
  tf.add_input(operation, "others: float");
  tf.add_input(operation, "factor: float");
  tf.add_output(operation, "sum: float");
  tf.add_attr(operation, "threads: int");
  tf.set_shape_function(operation, shape_of_first_input);
  tf.register_op(operation, status);
  if (tf.code(status) != 0) return;
  KernelBuilder* kernel = tf.new_kernel("CandleP1AddScaled", "CPU", create, compute, destroy);
  tf.register_kernel("CandleP1AddScaled", kernel, status);
}

}  // namespace tensorflow_c
