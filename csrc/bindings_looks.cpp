// What a call and a tensor of torch are like, as tuples that are equal where a policy may not tell
// one from the other: vramx/compression/looks.py says what for.
//
// Attributes are read by name, as Python reads them: nothing here knows torch's own types in C++.
// Bound without pybind11, whose calls take as long as what is done in them: 0.3 us for a call, as
// much for a tensor. Needs the interpreter's lock, keeps nothing but names and a few types.
#include <utility>

#include "bindings.h"

namespace vramx::bindings {
namespace {

// A reference that is given back at the end of its scope.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  Owned(Owned&& other) noexcept : object_(other.release()) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// Set once, by set_kinds(), and never given back: the module lives as long as the process.
struct Kinds {
  PyObject* tensor;     // torch.Tensor
  PyObject* parameter;  // torch.nn.Parameter
  PyObject* values;     // set of types whose objects are keys as they are
};
Kinds kinds{};

// Names of attributes, made once.
struct Names {
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* device = PyUnicode_InternFromString("device");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* grad_fn = PyUnicode_InternFromString("grad_fn");
  PyObject* base = PyUnicode_InternFromString("_base");
  PyObject* version = PyUnicode_InternFromString("_version");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* storage_offset = PyUnicode_InternFromString("storage_offset");
  PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");
};

const Names& names() {
  static const Names made;
  return made;
}

PyObject* read(PyObject* object, PyObject* name) { return PyObject_GetAttr(object, name); }

PyObject* call(PyObject* object, PyObject* name) {
  return PyObject_VectorcallMethod(name, &object, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

PyObject* type_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

// What raises when it is read, as sizes of nested tensors do, has no key.
PyObject* without_key() {
  PyErr_Clear();
  Py_RETURN_NONE;
}

bool is_plain_tensor(PyObject* object) {
  return type_of(object) == kinds.tensor || type_of(object) == kinds.parameter;
}

PyObject* row_of_integers(PyObject* row) {
  Owned items(PySequence_Tuple(row));
  if (!items) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    if (!PyLong_CheckExact(PyTuple_GET_ITEM(items.get(), i))) return nullptr;
  }
  return items.release();
}

// Returns what an argument is like, or null: with an exception set, or none.
PyObject* like(PyObject* value) {
  if (is_plain_tensor(value)) return Py_NewRef(type_of(value));
  const int is_value = PySet_Contains(kinds.values, type_of(value));
  if (is_value < 0) return nullptr;
  if (is_value == 1) return PyTuple_Pack(2, type_of(value), value);
  if (!PyTuple_Check(value) && !PyList_CheckExact(value)) return nullptr;
  const Owned items(row_of_integers(value));
  return items ? PyTuple_Pack(2, type_of(value), items.get()) : nullptr;
}

// call_key(name, args, kwargs)
PyObject* call_key(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 3 || !PyTuple_Check(given[1]) || !PyDict_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "a name, a tuple and a dictionary are needed");
    return nullptr;
  }
  PyObject *args = given[1], *kwargs = given[2];
  const Py_ssize_t positional = PyTuple_GET_SIZE(args);
  Owned key(PyTuple_New(1 + positional + 2 * PyDict_GET_SIZE(kwargs)));
  if (!key) return nullptr;
  Py_ssize_t place = 0;
  PyTuple_SET_ITEM(key.get(), place++, Py_NewRef(given[0]));
  for (Py_ssize_t i = 0; i < positional; ++i) {
    PyObject* found = like(PyTuple_GET_ITEM(args, i));
    if (found == nullptr) return without_key();
    PyTuple_SET_ITEM(key.get(), place++, found);
  }
  PyObject *keyword = nullptr, *value = nullptr;
  Py_ssize_t cursor = 0;
  while (PyDict_Next(kwargs, &cursor, &keyword, &value)) {
    PyObject* found = like(value);
    if (found == nullptr) return without_key();
    PyTuple_SET_ITEM(key.get(), place++, Py_NewRef(keyword));
    PyTuple_SET_ITEM(key.get(), place++, found);
  }
  return key.release();
}

// A saved tensor, and what is asked of it only where an argument has its memory.
class Saved {
 public:
  Saved(PyObject* tensor, PyObject* storage, PyObject* dtype)
      : tensor_(tensor), storage_(storage), dtype_(dtype) {}

  // As calls.py has it: the same elements in the same memory, in whatever shape. A storage has one
  // object as long as it lives.
  bool is_memory_of(PyObject* other) const {
    const Owned storage(call(other, names().untyped_storage));
    if (storage.get() != storage_) return false;
    const Owned dtype(read(other, names().dtype));
    return dtype.get() == dtype_ && is_alike(other, names().storage_offset) &&
           is_alike(other, names().numel);
  }

  bool is(PyObject* other) const { return other == tensor_; }

 private:
  bool is_alike(PyObject* other, PyObject* name) const {
    const Owned mine(call(tensor_, name)), others(call(other, name));
    return mine && others && PyObject_RichCompareBool(mine.get(), others.get(), Py_EQ) == 1;
  }

  PyObject* tensor_;
  PyObject* storage_;
  PyObject* dtype_;
};

// Returns the first of the arguments, those by name last, that a predicate takes; -1: none.
template <typename Predicate>
Py_ssize_t find(PyObject* args, PyObject* kwargs, Predicate takes) {
  const Py_ssize_t positional = PyTuple_GET_SIZE(args);
  for (Py_ssize_t i = 0; i < positional; ++i) {
    if (takes(PyTuple_GET_ITEM(args, i))) return i;
  }
  PyObject *keyword = nullptr, *value = nullptr;
  Py_ssize_t cursor = 0;
  for (Py_ssize_t i = positional; PyDict_Next(kwargs, &cursor, &keyword, &value); ++i) {
    if (takes(value)) return i;
  }
  return -1;
}

// Returns which of the arguments a saved tensor is: itself, or else one of the same memory.
Py_ssize_t place_of(const Saved& saved, PyObject* args, PyObject* kwargs) {
  const Py_ssize_t place = find(args, kwargs, [&](PyObject* each) { return saved.is(each); });
  if (place >= 0) return place;
  return find(args, kwargs,
              [&](PyObject* each) { return is_plain_tensor(each) && saved.is_memory_of(each); });
}

// Of a parameter a policy asks whether it is trained.
PyObject* tensor_like(PyObject* tensor) {
  const bool is_parameter = type_of(tensor) == kinds.parameter;
  const Owned dtype(read(tensor, names().dtype));
  const Owned shape(read(tensor, names().shape));
  const Owned trained(is_parameter ? read(tensor, names().requires_grad) : Py_NewRef(Py_None));
  if (!dtype || !shape || !trained) return nullptr;
  return PyTuple_Pack(4, type_of(tensor), dtype.get(), shape.get(), trained.get());
}

// What the tensors among the arguments are like, for a policy that compares a tensor with them.
PyObject* tensors_like(PyObject* args, PyObject* kwargs) {
  Owned found(PyList_New(0));
  const Py_ssize_t failed = find(args, kwargs, [&](PyObject* each) {
    if (!is_plain_tensor(each)) return false;
    const Owned item(tensor_like(each));
    return !item || PyList_Append(found.get(), item.get()) != 0;
  });
  return failed >= 0 ? nullptr : PyList_AsTuple(found.get());
}

// Of a view, what it is of: the type of that tensor's node, or of a parameter True; of others None.
// Null where it is of something unknown.
PyObject* base_like(PyObject* tensor) {
  const Owned base(read(tensor, names().base));
  if (!base || base.get() == Py_None) return base ? Py_NewRef(Py_None) : nullptr;
  if (type_of(base.get()) == kinds.parameter) return Py_NewRef(Py_True);
  if (!is_plain_tensor(base.get())) return nullptr;
  const Owned node(read(base.get(), names().grad_fn));
  return node ? Py_NewRef(type_of(node.get())) : nullptr;
}

// Whether the operation that made a tensor, or what it is a view of, has made its memory, which
// nothing has written to since; so it has that of no module. -1 with an exception set.
int is_fresh(PyObject* tensor, PyObject* node, PyObject* base, Py_ssize_t place) {
  if (node == Py_None)
    return place < 0 ? 1 : 0;  // made within the call, of which it is no argument
  if (base == Py_True || base == type_of(Py_None)) return 0;
  const Owned version(read(tensor, names().version));
  const long count = version ? PyLong_AsLong(version.get()) : -1;
  return count < 0 ? -1 : (count == 0 ? 1 : 0);
}

// tensor_key(tensor, args, kwargs, compares): the key of a tensor, and its storage, None where it
// is fresh. What is no argument is compared with them, and everything where a call `compares`.
PyObject* tensor_key(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4 || !PyTuple_Check(given[1]) || !PyDict_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "a tensor, a tuple, a dictionary and a bool are needed");
    return nullptr;
  }
  PyObject* tensor = given[0];
  if (type_of(tensor) != kinds.tensor) return without_key();
  const Owned storage(call(tensor, names().untyped_storage));  // raises where it is not strided
  const Owned negative(call(tensor, names().is_neg));
  if (!storage || negative.get() != Py_False) return without_key();
  const Owned dtype(read(tensor, names().dtype));
  const Owned shape(read(tensor, names().shape));
  const Owned stride(call(tensor, names().stride));
  const Owned device(read(tensor, names().device));
  const Owned requires_grad(read(tensor, names().requires_grad));
  const Owned node(read(tensor, names().grad_fn));
  const Owned base(base_like(tensor));
  if (!dtype || !shape || !stride || !device || !requires_grad || !node || !base) {
    return without_key();
  }
  const Saved saved(tensor, storage.get(), dtype.get());
  const Py_ssize_t found = place_of(saved, given[1], given[2]);
  const int fresh = is_fresh(tensor, node.get(), base.get(), found);
  const Owned place(PyLong_FromSsize_t(found));
  const bool compares = found < 0 || given[3] == Py_True;
  const Owned beside(compares ? tensors_like(given[1], given[2]) : Py_NewRef(Py_None));
  if (!place || !beside || PyErr_Occurred() != nullptr) return without_key();
  const Owned key(PyTuple_Pack(9, type_of(node.get()), place.get(), base.get(), dtype.get(),
                               shape.get(), stride.get(), device.get(), requires_grad.get(),
                               beside.get()));
  return key ? PyTuple_Pack(2, key.get(), fresh == 1 ? Py_None : storage.get()) : nullptr;
}

// set_kinds(torch.Tensor, torch.nn.Parameter, values)
PyObject* set_kinds(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 3 || !PyAnySet_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "two types and a set of types are needed");
    return nullptr;
  }
  kinds = {Py_NewRef(given[0]), Py_NewRef(given[1]), Py_NewRef(given[2])};
  Py_RETURN_NONE;
}

template <typename Function>
constexpr PyMethodDef method(const char* name, Function function) {
  // Python's own type for functions of all kinds.
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

}  // namespace

void bind_looks(pybind11::module_& module) {
  static PyMethodDef methods[] = {
      method("set_kinds", &set_kinds),
      method("call_key", &call_key),
      method("tensor_key", &tensor_key),
      {nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw pybind11::error_already_set();
}

}  // namespace vramx::bindings
