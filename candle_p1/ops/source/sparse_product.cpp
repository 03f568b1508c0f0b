// CandleP1SparseProduct: the product of a sparse matrix of few rows and a dense one, and the sum of
// the dense one's squares.
//
// The dense matrix is read once, row by row; a row is multiplied by all values of one column.

#include <vector>

#include "factors.h"
#include "loops.h"
#include "tensorflow.h"

namespace tensorflow_c {
namespace {

struct Settings {
  int32_t adds_squares;  // or 0 is returned, and rows that are not multiplied are not read
  int32_t threads;
};

void* create(Construction* construction) {
  auto* settings = new Settings();
  Outcome outcome;
  tf.get_int(construction, "adds_squares", &settings->adds_squares, outcome);
  if (outcome.ok()) tf.get_int(construction, "threads", &settings->threads, outcome);
  if (!outcome.ok()) tf.fail_construction(construction, outcome);
  return settings;
}

void destroy(void* settings) { delete static_cast<Settings*>(settings); }

constexpr std::size_t kSums = 16;  // that are added to in turn

FOR_EVERY_PROCESSOR double square_sum(const float* values, std::size_t num) {
  float sums[kSums] = {};
  std::size_t i = 0;
  for (; i + kSums <= num; i += kSums) {
    for (std::size_t k = 0; k < kSums; ++k) sums[k] += values[i + k] * values[i + k];
  }
  for (; i < num; ++i) sums[0] += values[i] * values[i];
  double total = 0;
  for (float sum : sums) total += sum;
  return total;
}

// Returns the sum of squares; writes the product, shape (rows of the inputs, units).
double multiply(const Columns& inputs, const float* weights, std::size_t units, float* product,
                std::size_t num, const Settings& settings) {
  const std::size_t num_parts = parts_of(inputs.num_columns() * units, settings.threads);
  std::vector<std::vector<float>> others(num_parts);
  std::vector<double> squares(num_parts);
  in_threads(num_parts, [&](std::size_t part) {
    if (part > 0) others[part].resize(num);
    float* mine = part > 0 ? others[part].data() : product;
    if (part == 0) std::fill_n(product, num, 0.0f);
    double total = 0;
    const std::size_t end = inputs.bound(part + 1, num_parts);
    for (std::size_t column = inputs.bound(part, num_parts); column < end; ++column) {
      const float* row = weights + column * units;
      if (settings.adds_squares) total += square_sum(row, units);
      for (const auto* each = inputs.begin(column); each != inputs.end(column); ++each) {
        add_multiple(mine + each->row * units, row, each->value, units);
      }
    }
    squares[part] = total;
  });
  in_parts(num, settings.threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t part = 1; part < num_parts; ++part) {
      add_multiple(product + begin, others[part].data() + begin, 1.0f, end - begin);
    }
  });
  double total = 0;
  for (double each : squares) total += each;
  return total;
}

void compute(void* kernel, Context* context) {
  const auto& settings = *static_cast<Settings*>(kernel);
  Outcome outcome;
  Held inputs[4], product, squares;
  for (int i = 0; i < 4 && outcome.ok(); ++i) tf.get_input(context, i, inputs[i].out(), outcome);
  if (!outcome.ok()) return tf.fail(context, outcome);
  const Held &weights = inputs[0], &places = inputs[1], &values = inputs[2], &shape = inputs[3];
  const SparseInputs sparse{static_cast<const int64_t*>(places.any()), values.floats(),
                            values.num_bytes() / sizeof(float)};
  bool fits = tf.num_dims(weights.get()) == 2 && shape.num_bytes() == 2 * sizeof(int64_t) &&
              places.num_bytes() == sparse.num * 2 * sizeof(int64_t);
  const int64_t num_rows = fits ? static_cast<const int64_t*>(shape.any())[0] : 0;
  Columns columns(fits ? tf.dim(weights.get(), 0) : 0);
  fits = fits && num_rows >= 0 && columns.count(sparse, num_rows);
  if (!fits) {
    tf.set_status(outcome, 3 /* invalid argument */, "CandleP1SparseProduct: unequal shapes");
    return tf.fail(context, outcome);
  }
  columns.add(sparse, 0, 1.0f);
  const int64_t units = tf.dim(weights.get(), 1), dims[] = {num_rows, units};
  const std::size_t num = num_rows * units;
  *product.out() =
      tf.allocate_output(context, 0, kFloat, dims, 2, num * sizeof(float), outcome);
  if (outcome.ok()) {
    *squares.out() = tf.allocate_output(context, 1, kFloat, nullptr, 0, sizeof(float), outcome);
  }
  if (!outcome.ok()) return tf.fail(context, outcome);
  *squares.floats() = static_cast<float>(
      multiply(columns, weights.floats(), units, product.floats(), num, settings));
}

}  // namespace

void register_sparse_product(Status* status) {
  OpBuilder* operation = tf.new_op("CandleP1SparseProduct");
  tf.add_input(operation, "weights: float");
  tf.add_input(operation, "places: int64");
  tf.add_input(operation, "values: float");
  tf.add_input(operation, "shape: int64");
  tf.add_output(operation, "product: float");
  tf.add_output(operation, "squares: float");
  tf.add_attr(operation, "adds_squares: int");
  tf.add_attr(operation, "threads: int");
  tf.set_shape_function(operation, tf.unknown_shapes);
  tf.register_op(operation, status);
  if (tf.code(status) != 0) return;
  KernelBuilder* kernel =
      tf.new_kernel("CandleP1SparseProduct", "CPU", create, compute, destroy);
  tf.register_kernel("CandleP1SparseProduct", kernel, status);
}

}  // namespace tensorflow_c
