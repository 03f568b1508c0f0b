// Registers the operations when tf.load_op_library loads this library.

#include "tensorflow.h"

namespace {

using namespace tensorflow_c;

__attribute__((constructor)) void register_operations() {
  if (!tf.find_all()) return;
  Outcome outcome;
  register_add_scaled(outcome);
  if (outcome.ok()) register_average_on_node(outcome);
  if (outcome.ok()) register_clock(outcome);
  if (outcome.ok()) register_convolve(outcome);
  if (outcome.ok()) register_sparse_product(outcome);
  if (outcome.ok()) register_update(outcome);
  if (!outcome.ok()) std::fprintf(stderr, "candle_p1: %s\n", tf.message(outcome));
}

}  // namespace
