// TensorFlow's C interface (tensorflow/c/ops.h, kernels.h, kernels_experimental.h, tf_tensor.h,
// tf_status.h), as far as it is used here. The functions are looked up in the library that the
// process has loaded.

#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace tensorflow_c {

constexpr char kLibrary[] = "libtensorflow_framework.so.2";
constexpr int kFloat = 1;   // TF_FLOAT
constexpr int kDouble = 2;  // TF_DOUBLE
constexpr int kByte = 4;    // TF_UINT8

// Opaque types of the interface.
struct OpBuilder;
struct KernelBuilder;
struct Construction;
struct Context;
struct ShapeContext;
struct ShapeHandle;
struct LockHolder;
struct Status;
struct Tensor;

using Copy = void (*)(Context*, Tensor* source, Tensor* destination);

struct Functions {
  OpBuilder* (*new_op)(const char*);
  void (*add_attr)(OpBuilder*, const char*);
  void (*add_input)(OpBuilder*, const char*);
  void (*add_output)(OpBuilder*, const char*);
  void (*set_stateful)(OpBuilder*, bool);
  void (*set_shape_function)(OpBuilder*, void (*)(ShapeContext*, Status*));
  void (*register_op)(OpBuilder*, Status*);
  ShapeHandle* (*scalar_shape)(ShapeContext*);
  ShapeHandle* (*new_shape)();
  void (*get_shape)(ShapeContext*, int, ShapeHandle*, Status*);
  void (*set_shape)(ShapeContext*, int, ShapeHandle*, Status*);
  void (*delete_shape)(ShapeHandle*);
  void (*unknown_shapes)(ShapeContext*, Status*);

  KernelBuilder* (*new_kernel)(const char*, const char*, void* (*)(Construction*),
                               void (*)(void*, Context*), void (*)(void*));
  void (*register_kernel)(const char*, KernelBuilder*, Status*);
  void (*get_float)(Construction*, const char*, float*, Status*);
  void (*get_int)(Construction*, const char*, int32_t*, Status*);
  void (*get_int64)(Construction*, const char*, int64_t*, Status*);
  void (*fail_construction)(Construction*, Status*);

  void (*get_input)(Context*, int, Tensor**, Status*);
  Tensor* (*allocate_output)(Context*, int, int, const int64_t*, int, std::size_t, Status*);
  Tensor* (*take_over_or_allocate)(Context*, const int*, int, int, const int64_t*, int, int*,
                                   Status*);
  void (*fail)(Context*, Status*);
  void (*lock_variables)(Context*, bool, bool, const int*, std::size_t, Copy, LockHolder**,
                         Status*);
  void (*release)(LockHolder*);
  void (*get_variable)(Context*, int, bool, bool, bool, Copy, Tensor**, Status*);

  void* (*data)(const Tensor*);
  std::size_t (*num_bytes)(const Tensor*);
  int (*type)(const Tensor*);
  int (*num_dims)(const Tensor*);
  int64_t (*dim)(const Tensor*, int);
  void (*delete_tensor)(Tensor*);

  Status* (*new_status)();
  void (*delete_status)(Status*);
  void (*set_status)(Status*, int, const char*);
  int (*code)(const Status*);
  const char* (*message)(const Status*);

  // Returns false if TensorFlow is not loaded, or lacks a function.
  bool find_all() {
    library_ = dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
    return library_ != nullptr && find("TF_NewOpDefinitionBuilder", new_op) &&
           find("TF_OpDefinitionBuilderAddAttr", add_attr) &&
           find("TF_OpDefinitionBuilderAddInput", add_input) &&
           find("TF_OpDefinitionBuilderAddOutput", add_output) &&
           find("TF_OpDefinitionBuilderSetIsStateful", set_stateful) &&
           find("TF_OpDefinitionBuilderSetShapeInferenceFunction", set_shape_function) &&
           find("TF_RegisterOpDefinition", register_op) &&
           find("TF_ShapeInferenceContextScalar", scalar_shape) &&
           find("TF_NewShapeHandle", new_shape) &&
           find("TF_ShapeInferenceContextGetInput", get_shape) &&
           find("TF_ShapeInferenceContextSetOutput", set_shape) &&
           find("TF_DeleteShapeHandle", delete_shape) &&
           find("TF_ShapeInferenceContextSetUnknownShape", unknown_shapes) &&
           find("TF_NewKernelBuilder", new_kernel) &&
           find("TF_RegisterKernelBuilder", register_kernel) &&
           find("TF_OpKernelConstruction_GetAttrFloat", get_float) &&
           find("TF_OpKernelConstruction_GetAttrInt32", get_int) &&
           find("TF_OpKernelConstruction_GetAttrInt64", get_int64) &&
           find("TF_OpKernelConstruction_Failure", fail_construction) &&
           find("TF_GetInput", get_input) && find("TF_AllocateOutput", allocate_output) &&
           find("TF_ForwardInputOrAllocateOutput", take_over_or_allocate) &&
           find("TF_OpKernelContext_Failure", fail) &&
           find("TF_MaybeLockVariableInputMutexesInOrder", lock_variables) &&
           find("TF_ReleaseVariableInputLockHolder", release) &&
           find("TF_GetInputTensorFromVariable", get_variable) &&
           find("TF_TensorData", data) && find("TF_TensorByteSize", num_bytes) &&
           find("TF_TensorType", type) && find("TF_NumDims", num_dims) &&
           find("TF_Dim", dim) && find("TF_DeleteTensor", delete_tensor) &&
           find("TF_NewStatus", new_status) && find("TF_DeleteStatus", delete_status) &&
           find("TF_SetStatus", set_status) && find("TF_GetCode", code) &&
           find("TF_Message", message);
  }

 private:
  template <typename Function>
  bool find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (function == nullptr) std::fprintf(stderr, "candle_p1: TensorFlow has no %s\n", name);
    return function != nullptr;
  }

  void* library_ = nullptr;
};

inline Functions tf;

// A status that is deleted at the end of its scope.
class Outcome {
 public:
  Outcome() : status_(tf.new_status()) {}
  ~Outcome() { tf.delete_status(status_); }
  Outcome(const Outcome&) = delete;
  Outcome& operator=(const Outcome&) = delete;
  operator Status*() const { return status_; }
  bool ok() const { return tf.code(status_) == 0; }

 private:
  Status* status_;
};

// A tensor that is released at the end of its scope.
class Held {
 public:
  Held() = default;
  ~Held() {
    if (tensor_ != nullptr) tf.delete_tensor(tensor_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  Tensor** out() { return &tensor_; }
  const Tensor* get() const { return tensor_; }
  void* any() const { return tf.data(tensor_); }
  float* floats() const { return static_cast<float*>(tf.data(tensor_)); }
  std::uint8_t* bytes() const { return static_cast<std::uint8_t*>(tf.data(tensor_)); }
  std::size_t num_bytes() const { return tf.num_bytes(tensor_); }
  bool is_float() const { return tf.type(tensor_) == kFloat; }

 private:
  Tensor* tensor_ = nullptr;
};

// The output is a number.
inline void scalar_output(ShapeContext* context, Status* status) {
  ShapeHandle* scalar = tf.scalar_shape(context);
  tf.set_shape(context, 0, scalar, status);
  tf.delete_shape(scalar);
}

// The output has the shape of the first input.
inline void shape_of_first_input(ShapeContext* context, Status* status) {
  ShapeHandle* shape = tf.new_shape();
  tf.get_shape(context, 0, shape, status);
  if (tf.code(status) == 0) tf.set_shape(context, 0, shape, status);
  tf.delete_shape(shape);
}

// Gets the first input, and an output of its shape, in its memory if nothing else needs that.
inline void reuse_first_input(Context* context, Held& input, Held& output, Status* status) {
  std::vector<int64_t> shape;
  {
    Held first;  // released before memory is reused, which is only possible if nothing refers to it
    tf.get_input(context, 0, first.out(), status);
    if (tf.code(status) != 0) return;
    for (int i = 0; i < tf.num_dims(first.get()); ++i) shape.push_back(tf.dim(first.get(), i));
  }
  const int candidates[] = {0};
  int taken_over = -1;
  *output.out() = tf.take_over_or_allocate(context, candidates, 1, 0, shape.data(),
                                           static_cast<int>(shape.size()), &taken_over, status);
  if (tf.code(status) == 0) tf.get_input(context, 0, input.out(), status);
}

void register_add_scaled(Status* status);
void register_average_on_node(Status* status);
void register_clock(Status* status);
void register_convolve(Status* status);
void register_sparse_product(Status* status);
void register_update(Status* status);

}  // namespace tensorflow_c
