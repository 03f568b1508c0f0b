// CandleP1AddScaled: sum = values + factor * others, in one pass, and in the memory of `values` if
// nothing else needs it.
//
// TensorFlow's product and sum take five passes over memory, this takes three.

#include <vector>

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

void infer_shape(ShapeContext* context, Status* status) {
  ShapeHandle* shape = tf.new_shape();
  tf.get_shape(context, 0, shape, status);
  if (tf.code(status) == 0) tf.set_shape(context, 0, shape, status);
  tf.delete_shape(shape);
}

// Without __restrict, because `sum` may be `values`.
FOR_EVERY_PROCESSOR void add(float* sum, const float* values, const float* __restrict others,
                             std::size_t num, float factor) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < num; ++i) sum[i] = values[i] + factor * others[i];
}

// The memory of an input can only be reused while nothing here refers to it.
std::vector<int64_t> shape_of_values(Context* context, Status* status) {
  Held values;
  tf.get_input(context, 0, values.out(), status);
  if (tf.code(status) != 0) return {};
  std::vector<int64_t> shape(static_cast<std::size_t>(tf.num_dims(values.get())));
  for (std::size_t i = 0; i < shape.size(); ++i) {
    shape[i] = tf.dim(values.get(), static_cast<int>(i));
  }
  return shape;
}

void compute(void* threads, Context* context) {
  Outcome outcome;
  const std::vector<int64_t> shape = shape_of_values(context, outcome);
  Held values, others, factor, sum;
  int taken_over = -1;
  if (outcome.ok()) {
    const int candidates[] = {0};
    *sum.out() =
        tf.take_over_or_allocate(context, candidates, 1, 0, shape.data(),
                                 static_cast<int>(shape.size()), &taken_over, outcome);
  }
  if (outcome.ok()) tf.get_input(context, 0, values.out(), outcome);
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
  tf.set_shape_function(operation, infer_shape);
  tf.register_op(operation, status);
  if (tf.code(status) != 0) return;
  KernelBuilder* kernel = tf.new_kernel("CandleP1AddScaled", "CPU", create, compute, destroy);
  tf.register_kernel("CandleP1AddScaled", kernel, status);
}

}  // namespace tensorflow_c
