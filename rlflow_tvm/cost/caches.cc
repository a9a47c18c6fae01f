// What `caches.py` says, run by the process that times kernels: a worker here, or a server of TVM's RPC.
// `read` and `write` are compiled by TVM and linked with this file: they run on TVM's thread pool.
#include <stdlib.h>
#include <string.h>

#include <map>
#include <memory>
#include <vector>

#include <tvm/ffi/c_api.h>

#define EXPORTED extern "C" __attribute__((visibility("default"))) int
#define ARGUMENTS void *, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result

extern "C" int __tvm_ffi_read(void *, const TVMFFIAny *, int32_t, TVMFFIAny *);
extern "C" int __tvm_ffi_write(void *, const TVMFFIAny *, int32_t, TVMFFIAny *);

namespace {

constexpr int64_t kVector = 16, kParts = 2;  // as in caches.py

struct Free {
  void operator()(void *memory) const { free(memory); }
};

std::vector<int> temperatures = {4};
std::map<int, std::unique_ptr<void, Free>> others;
int64_t parts = 1, prepared = 0;
int recent = 2;  // a sweep of this size, as `sweep` counts, leaves no private cache as it was

std::unique_ptr<void, Free> zeros(size_t bytes) {
  // written, as pages that never were are all one page of zeros
  std::unique_ptr<void, Free> memory(aligned_alloc(64, (bytes + 63) / 64 * 64));
  if (memory) memset(memory.get(), 0, bytes);
  return memory;
}

struct Tensor {
  Tensor(void *data, std::vector<int64_t> extents) : shape(std::move(extents)) {
    strides.assign(shape.size(), 1);
    for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
    tensor = DLTensor{data, {kDLCPU, 0}, static_cast<int32_t>(shape.size()), {kDLInt, 32, 1}, shape.data(),
                      strides.data(), 0};
  }
  TVMFFIAny argument() {
    TVMFFIAny any{};
    any.type_index = kTVMFFIDLTensorPtr;
    any.v_ptr = &tensor;
    return any;
  }
  std::vector<int64_t> shape, strides;
  DLTensor tensor;
};

int64_t rows_of(int digit) { return (int64_t{1} << (22 + digit)) / (4 * kVector * parts); }

// What a sweep reads; none where there is no memory for it.
void *other(int digit) {
  auto &memory = others[digit];
  if (!memory) memory = zeros(rows_of(digit) * 4 * kVector * parts);
  return memory.get();
}

// Reads 2^(digit + 2) MiB (`temperature.megabytes`).
int sweep(int digit) {
  const int64_t rows = rows_of(digit);
  void *memory = other(digit);
  if (memory == nullptr) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", "no memory to sweep the caches with");
    return -1;
  }
  std::unique_ptr<void, Free> sums = zeros(4 * kVector * parts);
  Tensor x(memory, {parts, rows, kVector}), y(sums.get(), {parts, kVector});
  TVMFFIAny given[] = {x.argument(), y.argument()}, nothing{};
  return __tvm_ffi_read(nullptr, given, 2, &nothing);
}

// Writes what is there already, half of it by another thread.
int touch(const DLTensor *operand) {
  int64_t bytes = (operand->dtype.bits * operand->dtype.lanes + 7) / 8;
  for (int32_t i = 0; i < operand->ndim; ++i) bytes *= operand->shape[i];
  const int64_t rows = bytes / (4 * kVector * kParts);  // the rest is less than two cache lines
  if (rows == 0) return 0;
  alignas(64) int32_t nil = 0;
  Tensor view(static_cast<char *>(operand->data) + operand->byte_offset, {kParts, rows, kVector}), zero(&nil, {1});
  TVMFFIAny given[] = {view.argument(), zero.argument(), view.argument()}, nothing{};
  return __tvm_ffi_write(nullptr, given, 3, &nothing);
}

const DLTensor *tensor_of(const TVMFFIAny &any) {
  if (any.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor *>(any.v_ptr);
  if (any.type_index == kTVMFFITensor)
    return reinterpret_cast<const DLTensor *>(reinterpret_cast<const char *>(any.v_obj) + sizeof(TVMFFIObject));
  return nullptr;
}

int temperature(int32_t operand) {
  return operand < static_cast<int32_t>(temperatures.size()) ? temperatures[operand] : temperatures.back();
}

int prepare(ARGUMENTS) {
  ++prepared;
  int far = 0;
  bool cooled = false;
  for (int32_t i = 0; i < num_args; ++i) {
    far = temperature(i) > far ? temperature(i) : far;
    cooled = cooled || temperature(i) == 1;
  }
  if (far > 1 && sweep(far) != 0) return -1;
  for (int digit : {1, 0}) {
    for (int32_t i = 0; i < num_args; ++i) {
      const DLTensor *operand = tensor_of(args[i]);
      if (operand != nullptr && temperature(i) == digit && touch(operand) != 0) return -1;
    }
    if (digit == 1 && cooled && sweep(recent) != 0) return -1;
  }
  *result = TVMFFIAny{};
  return 0;
}

}  // namespace

// start(parts, recent): registers the preparation, which sweeps in so many parts, as a global function of this process;
// `recent`: the digit of a sweep that leaves no private cache as it was.
EXPORTED __tvm_ffi_start(ARGUMENTS) {
  (void)num_args;
  parts = args[0].v_int64;
  recent = static_cast<int>(args[1].v_int64);
  *result = TVMFFIAny{};
  TVMFFIObjectHandle function = nullptr;
  if (TVMFFIFunctionCreate(nullptr, prepare, nullptr, &function) != 0) return -1;
  static const char name[] = "rlflow_tvm.prepare_caches";
  const TVMFFIByteArray bytes{name, sizeof(name) - 1};
  const int code = TVMFFIFunctionSetGlobal(&bytes, function, 1);
  TVMFFIObjectDecRef(function);
  return code;
}

// cold(digit, ...): temperatures of the operands from now on. What is swept is made now, so that no timed run has to
// wait for it.
EXPORTED __tvm_ffi_cold(ARGUMENTS) {
  temperatures.clear();
  int far = 0;
  for (int32_t i = 0; i < num_args; ++i) {
    temperatures.push_back(static_cast<int>(args[i].v_int64));
    far = temperatures.back() > far ? temperatures.back() : far;
    if (temperatures.back() == 1) other(recent);
  }
  if (far > 1) other(far);
  *result = TVMFFIAny{};
  return 0;
}

// prepared() -> how often the preparation ran.
EXPORTED __tvm_ffi_prepared(ARGUMENTS) {
  (void)args, (void)num_args;
  *result = TVMFFIAny{};
  result->type_index = kTVMFFIInt;
  result->v_int64 = prepared;
  return 0;
}
