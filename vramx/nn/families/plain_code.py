"""What the code of a block reads beside tensors, and whether all of it is still what it was.

A record of a forward has the values of numbers and words that the forward came by, not where they
are from. So the code is looked through, with what it calls: global names and attributes of them,
variables that functions close over, defaults, attributes of classes, and by their names attributes
of the block's modules and of objects in these, as of a config. What cannot change is compared by
what it is: a look at a dozen names in a microsecond. Code that reads anything else, as a global
dictionary, or may do what a record does not show, is refused. Found in some milliseconds a block;
no other state.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from operator import attrgetter, itemgetter
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vramx.nn.families.plain_plan import NotPlainError, is_table
from vramx.nn.families.questions import part_of
from vramx.patch.module import original_class
from vramx.patch.references import is_filled
from vramx.patch.subclass import RECORD
from vramx.patch.torch_functions import replaced

PLAIN = (int, float, bool, str, bytes, complex, type(None))
_FIXED = (*PLAIN, type(...), slice, range, torch.dtype, torch.device, torch.Size)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType)
# Libraries whose functions do with what they are given what their names say, and keep no state.
_PURE = frozenset(
    (
        *("torch", "math", "operator", "_operator", "functools", "itertools", "typing", "types"),
        *("typing_extensions", "einops", "numpy", "collections", "enum", "dataclasses", "abc"),
        *("builtins", "warnings", "logging", "contextlib", "numbers", "copy"),
    )
)
# But for these, by which code asks how, where or on what it runs: of some, the answer is compared.
_MODES = frozenset(("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype"))
_STATES = frozenset(
    (
        *("is_autocast_enabled", "is_tensor"),
        *("is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype"),
        *("get_autocast_cpu_dtype", "get_default_device", "is_anomaly_enabled"),
        *("cuda", "xpu", "mps", "distributed", "backends", "random", "_C", "initial_seed"),
    )
)
_BUILTINS = frozenset(
    (
        *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "filter", "float", "format"),
        *("frozenset", "getattr", "hasattr", "int", "isinstance", "issubclass", "len", "list"),
        *("map", "max", "min", "pow", "range", "reversed", "round", "set", "slice", "sorted"),
        *("str", "sum", "super", "tuple", "zip", "object", "property", "staticmethod"),
    )
)
_KERNELS = ["backends", "cuda", "sdp_kernel"]
_AROUND = frozenset(  # by which code gets at a module's members, or an object's class
    (
        *("__dict__", "__class__", "_parameters", "_buffers", "parameters", "buffers"),
        *("named_parameters", "named_buffers", "state_dict", "__getattribute__"),
    )
)
_LOADS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"))
_OF_ERRORS = frozenset(("PUSH_EXC_INFO", "JUMP_IF_NOT_EXC_MATCH", "POP_EXCEPT"))
_NOT_CALLED = frozenset(
    (
        *("__init__", "__new__", "__repr__", "__str__", "__del__", "__init_subclass__"),
        *("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__"),
        *("__copy__", "__dir__", "__eq__", "__hash__", "__post_init__"),
    )
)
OF_EVERY_MODULE = frozenset((*vars(nn.Module()), RECORD))
# The instructions that ran, by code.
Key = tuple[str, int, str]
Steps = dict[Key, set[int]]
ByPath = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


class Ran(NamedTuple):
    """What a record has run: the forwards of modules, by path, and which instructions."""

    through: tuple[str, ...]
    steps: Steps


class Reads:
    """What code reads, and what it was; copies of a block share it, and pickles find it again."""

    def __init__(self, found: _Finder) -> None:
        self.names = None if found.asks_for_any else frozenset(found.names)
        # Dictionaries of names, and classes, each with what looks names up there.
        self._lookups = [_lookup(itemgetter, *each) for each in found.items.values()]
        self._lookups += [_lookup(attrgetter, *each) for each in found.attributes.values()]
        functions = tuple(found.functions)
        self._functions = [(_CODE, functions, tuple(map(_CODE, functions)))]
        for name in ("__defaults__", "__kwdefaults__"):
            having = tuple(each for each in functions if getattr(each, name))
            get = attrgetter(name)
            self._functions += [(get, having, tuple(map(get, having)))] if having else []
        self._ran = found.ran
        self.through = frozenset(found.ran.through)
        self._cells = found.cells
        self._bound = found.bound
        self._of_torch = tuple(sorted(found.of_torch))
        self._modes = tuple((ask, ask()) for ask in found.modes)
        self.facts = tuple(sorted(found.facts.items(), key=itemgetter(0)))
        self._key = next(_keys)
        _every[self._key] = self

    def __deepcopy__(self, memo: Any) -> Reads:
        return self

    def __reduce__(self) -> Any:
        return _Pickled, (self.facts, self._ran)

    def hold(self, module: Any, compiles: bool) -> bool:
        """Tell whether all is what it was."""
        if compiles:  # once, and what it reads is not guarded
            return not self._bound and _still_hold(self._key)
        for cell, path in self._bound:
            if cell.cell_contents is not part_of(module, path):
                return False
        return self.hold_alone()

    def hold_alone(self) -> bool:
        """Tell whether all but modules is what it was."""
        if self._of_torch and replaced(self._of_torch) is not None:
            return False
        try:
            return self._are_the_same()
        except Exception:  # it is gone, or of a kind that is not compared
            return False

    def _are_the_same(self) -> bool:
        # Tuples compare what is identical without a look at it.
        for of, look, known in self._lookups:
            if look(of) != known:
                return False
        for get, functions, known in self._functions:
            if (*map(get, functions),) != known:
                return False
        for ask, answer in self._modes:
            if ask() != answer:
                return False
        for cell, content in self._cells:  # noqa: SIM110 - as all_untouched()
            if cell.cell_contents is not content:
                return False
        return True


class _Pickled:
    """What a block's code read in another process: it is looked through again in this one."""

    def __init__(self, facts: Any, ran: Ran) -> None:
        self._facts, self._ran = facts, ran
        self._found: Reads | None = None
        self._is_other = False

    def __reduce__(self) -> Any:
        return _Pickled, (self._facts, self._ran)

    def hold(self, module: Any, compiles: bool) -> bool:
        if compiles or self._is_other:
            return False
        if self._found is None:
            try:
                self._found = look_through(module, self._ran)[0]
                self._is_other = self._found.facts != self._facts
            except NotPlainError:
                self._is_other = True
            if self._found is None or self._is_other:
                return False
        return self._found.hold(module, compiles)


_keys = itertools.count()
_every: dict[int, Reads] = {}


@torch.compiler.assume_constant_result
def _still_hold(key: int) -> bool:
    return _every[key].hold_alone()


def code_key(code: CodeType) -> Key:
    """Return what says which code this is, in another process as well."""
    return code.co_filename, code.co_firstlineno, code.co_name


def look_through(module: nn.Module, ran: Ran) -> tuple[Reads, ByPath]:
    """Return what a block's code reads, and what attributes are that it may read, by path.

    `ran` says what a record has run of it.

    Raises:
        NotPlainError: it reads what may change, or may do what a record does not show.
    """
    found = _Finder(module, ran)
    found.find()
    found.ran = Ran(ran.through, {key: ran.steps[key] for key in found.codes})
    constants = [
        (path, tuple((k, v) for k, v in of.items() if v is not _SAME))
        for path, of in found.constants.items()
    ]
    return Reads(found), tuple(each for each in constants if each[1])


def is_even(value: Any, depth: int = 4) -> bool:
    """Tell whether a value is one that == compares: settings, functions, and containers of such."""
    if isinstance(value, (*_FIXED, enum.Enum, type, *_FUNCTIONS)):
        return True
    if type(value) in (list, tuple, set, frozenset):
        return depth > 0 and all(is_even(each, depth - 1) for each in value)
    if type(value) is dict:
        return depth > 0 and all(is_even(each, depth - 1) for each in value.values())
    return False


def _lookup(getter: Any, of: Any, known: dict[str, Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a place, what looks several names up there, and what they are."""
    names = [*known, next(iter(known))]  # of a single one it would be no tuple
    return of, getter(*names), tuple(known[name] for name in names)


_CODE = attrgetter("__code__")


def _copied(value: Any) -> Any:
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_copied(each) for each in value)
    return {k: _copied(v) for k, v in value.items()} if type(value) is dict else value


def _is_fixed(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(map(_is_fixed, value))
    return type(value) in _FIXED or isinstance(value, enum.Enum)


def _library(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name or "builtins").partition(".")[0]


def _may_change(what: str) -> NotPlainError:
    return NotPlainError(f"it reads {what}, which may change")


class _Finder:
    """Looks through functions, and through what has the attributes that they name."""

    def __init__(self, module: nn.Module, ran: Ran) -> None:
        self.ran = ran
        self.names: set[str] = {"forward"}
        self.asks_for_any = False
        self._around: set[str] = set()
        self.cells: list[tuple[CellType, Any]] = []
        self.bound: list[tuple[CellType, str]] = []
        self.modes: dict[Any, None] = {}
        self.codes: set[Key] = set()  # that were looked at, of what ran
        self.of_torch: set[str] = set()  # functions of torch.nn.functional
        self.facts: dict[str, Any] = {}
        self.constants: dict[str, dict[str, Any]] = {}
        self._paths = {id(part): path for path, part in module.named_modules()}
        # What has attributes, by path: the modules, and objects in theirs.
        self._objects: dict[str, Any] = dict(module.named_modules())
        self.items: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.attributes: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.functions: list[FunctionType] = []
        self._met: dict[FunctionType, None] = {}
        self._waiting: list[FunctionType] = []
        self._classes: dict[type, None] = {}

    def find(self) -> None:
        seen = -1
        while seen != len(self.names) + len(self._met) + len(self._objects) + len(self._classes):
            seen = len(self.names) + len(self._met) + len(self._objects) + len(self._classes)
            for path, owner in list(self._objects.items()):
                self._look_at(path, owner)
            for cls in self._classes:
                self._look_at_class(cls)
            while self._waiting:
                self._look_into(self._waiting.pop())
        if self._around:
            raise NotPlainError(f"it asks for {min(self._around)}")
        if OF_A_PART in self.names:
            for path in self._paths.values():
                self.constants.setdefault(path, {})["training"] = True

    def _look_at_class(self, cls: type) -> None:
        for base in _bases(cls):
            for name in self.names & vars(base).keys():
                self._of_class(cls, name)

    # -- What has attributes -----------------------------------------------------------------------

    def _look_at(self, path: str, owner: Any) -> None:
        is_module = isinstance(owner, nn.Module)
        is_read = not is_module or path in self.ran.through
        cls = original_class(owner) if is_module else type(owner)
        methods = {name for base in _bases(cls) for name in self._methods(base)} if is_read else ()
        for name in methods:
            self._of_class(cls, name)
        known = self.constants.setdefault(path, {})
        names = owner.__dict__.keys() if self.asks_for_any else self.names & owner.__dict__.keys()
        for name in names - known.keys() - (OF_EVERY_MODULE if is_module else set()):
            value = owner.__dict__[name]
            if is_read or is_even(value):
                self._attribute(f"{path}.{name}".lstrip("."), known, name, value)

    def _methods(self, base: type) -> Iterator[str]:
        of_torch = _library(base) == "torch"
        for name, value in vars(base).items():
            special = name.startswith("__") and name.endswith("__") and not of_torch
            called = special and name not in _NOT_CALLED and isinstance(value, FunctionType)
            if name in self.names or called:
                yield name

    def _of_class(self, cls: type, name: str) -> None:
        for base in _bases(cls):
            value = vars(base).get(name)
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if isinstance(inner, FunctionType):
                self._call(inner)
            elif name in vars(base) and not (is_even(inner) and not _is_container(inner)):
                raise _may_change(f"{name} of {cls.__name__}")
        if isinstance(value := _static(cls, name), classmethod):
            base = next(base for base in _bases(cls) if name in vars(base))
            self._note(self.items, vars(base), name, value)
        else:
            self._note(self.attributes, cls, name, getattr(cls, name))

    def _attribute(self, path: str, known: dict[str, Any], name: str, value: Any) -> None:
        if is_even(value):
            known[name] = _copied(value)
            if isinstance(value, type) and _library(value) not in _PURE:
                self._classes[value] = None  # a config, perhaps
            for each in _functions_in(value):
                self._call(each)
        elif isinstance(value, MethodType) and (
            isinstance(value.__self__, type) or id(value.__self__) in self._paths
        ):
            known[name] = value
            self._call(value.__func__)
        elif isinstance(value, functools.partial) and callable(value.func):
            if not all(map(is_even, (*value.args, *value.keywords.values()))):
                raise _may_change(path)
            known[name] = value
            self._settle(value.func, path)
        elif isinstance(value, Tensor) and is_table(value):
            pass
        elif not isinstance(value, (nn.Module, Tensor)) and _is_plain_object(value):
            known.setdefault(name, _SAME)
            self._objects.setdefault(path, value)
            self.constants.setdefault(path, {})["__class__"] = type(value)
        else:
            raise _may_change(path)

    # -- Code --------------------------------------------------------------------------------------

    def _call(self, function: Any) -> None:
        if isinstance(function, FunctionType) and function not in self._met:
            self._met[function] = None
            self._waiting.append(function)

    def _look_into(self, function: FunctionType) -> None:
        if _library(function) == "torch":
            self.names.update(_names_in([*dis.get_instructions(function.__code__)]) - {ANY_NAME})
            return
        if code_key(function.__code__) not in self.ran.steps:
            return
        said = function.__qualname__
        self.facts[f"{function.__module__}.{said}"] = function.__code__.co_code
        self.functions.append(function)
        by_name = function.__kwdefaults__ or {}
        for value in (*(function.__defaults__ or ()), *by_name.values()):
            self._settle(value, f"a default of {said}")
        for name, value in by_name.items():
            self._note(self.items, by_name, name, value)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._close_over(name, cell)
        self._walk(function.__code__, function.__globals__)

    def _close_over(self, name: str, cell: CellType) -> None:
        if not is_filled(cell):
            raise _may_change(name)
        value = cell.cell_contents
        if isinstance(value, nn.Module) and id(value) in self._paths:
            self.bound.append((cell, self._paths[id(value)]))
        elif name != "__class__":
            self.cells.append((cell, value))
            self._settle(value, name)

    def _walk(self, code: CodeType, names: dict[str, Any]) -> None:
        ran = self.ran.steps.get(code_key(code), ())
        steps = list(dis.get_instructions(code))
        ends = {step.offset for step in steps if step.opname.startswith(("RETURN", "YIELD"))}
        self.codes.update({code_key(code)} & self.ran.steps.keys())
        if code_key(code) in self.ran.steps and not ends.intersection(ran):  # it was not told of
            ran = {step.offset for step in steps}
        operations = {step.opname for step in steps if step.offset in ran}
        if operations & _OF_ERRORS:
            raise NotPlainError("it catches an error")
        if operations & {"STORE_GLOBAL", "DELETE_GLOBAL"}:
            raise NotPlainError("it writes a global variable")
        for at, step in enumerate(steps):
            if step.offset not in ran:
                continue
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                after = itertools.takewhile(lambda s: s.opname in _LOADS, steps[at + 1 :])
                self._chain(names, [step.argval, *(each.argval for each in after)])
            elif step.opname == "IMPORT_NAME" and step.argval.partition(".")[0] not in _PURE:
                raise _may_change(step.argval)
        found = _names_in([step for step in steps if step.offset in ran])
        self.asks_for_any |= ANY_NAME in found
        self._around |= found & _AROUND
        self.names.update(found)
        for each in code.co_consts:
            if isinstance(each, CodeType):
                self._walk(each, names)

    def _chain(self, names: dict[str, Any], path: list[str]) -> None:
        """Look at a global name, and at attributes that are asked of it, one of another."""
        first, *rest = path
        if first not in names:
            if hasattr(builtins, first) and first not in _BUILTINS and not _is_error(first):
                raise NotPlainError(f"it calls {first}")
            return
        value, said = names[first], first
        self._note(self.items, names, first, value)
        if value is torch and rest == _KERNELS:  # which of torch's kernels: all compute the same
            return
        for name in rest:
            if _is_fixed(value) or isinstance(value, logging.Logger):
                return
            said = f"{said}.{name}"
            value = self._attribute_of(value, name, said)
        self._settle(value, said)

    def _attribute_of(self, value: Any, name: str, said: str) -> Any:
        of_library = isinstance(value, (ModuleType, type, *_FUNCTIONS)) and _library(value) in _PURE
        if of_library and name not in _STATES:
            if value is functional:
                self.of_torch.add(name)
            return getattr(value, name, None)
        if isinstance(value, type) and not of_library:
            if hasattr(value, name) and not isinstance(_static(value, name), classmethod):
                self._note(self.attributes, value, name, getattr(value, name))
                return getattr(value, name)
        elif not of_library and name in getattr(value, "__dict__", ()):
            self._note(self.items, vars(value), name, vars(value)[name])
            return vars(value)[name]
        raise _may_change(said)

    def _settle(self, value: Any, said: str) -> None:
        """Accept a value that is what it is for good, and look into functions."""
        if isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._settle(each, said)
        elif isinstance(value, (*_FUNCTIONS, type)):
            if getattr(value, "__name__", "") in _STATES and _library(value) in _PURE:
                raise _may_change(said)
            if getattr(value, "__name__", "") in _MODES and _library(value) == "torch":
                self.modes[value] = None
            if _library(value) not in _PURE:
                made = value if isinstance(value, FunctionType) else vars(value).get("__init__")
                self._call(made)
        elif hasattr(value, "__wrapped__") and type(value) is functools._lru_cache_wrapper:
            self._settle(value.__wrapped__, said)
        elif not (
            _is_fixed(value)
            or isinstance(value, logging.Logger)
            or (isinstance(value, ModuleType) and _library(value) in _PURE)
            or type(value).__module__ in ("typing", "types", "typing_extensions")
            or _is_torchs_operator(value)
        ):
            raise _may_change(said)
        if _is_fixed(value):
            self.facts[said] = value

    def _note(
        self, where: dict[int, tuple[Any, dict[str, Any]]], of: Any, name: str, value: Any
    ) -> None:
        where.setdefault(id(of), (of, {}))[1][name] = value


_SAME = object()
_NOT_PLAIN = (
    *(type, ModuleType, MethodType, *_FUNCTIONS),
    *(dict, list, tuple, set, functools.partial),
)
_ASKED = ("__getattr__", "__getattribute__")
ANY_NAME, OF_A_PART = "*", "training of a part"


def _bases(cls: type) -> list[type]:
    """Return the classes that a class is made of, but for torch's modules' and Python's own."""
    return [base for base in cls.__mro__ if base not in (nn.Module, object)]


def _static(cls: type, name: str) -> Any:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _is_container(value: Any) -> bool:
    return type(value) in (list, set, dict)


def _functions_in(value: Any) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        yield value
    elif type(value) in (list, tuple, set, frozenset, dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _functions_in(each)


def _is_plain_object(value: Any) -> bool:
    """Tell whether an object's attributes are what it has in its dictionary, and its class's."""
    if type(getattr(value, "__dict__", None)) is not dict or isinstance(value, _NOT_PLAIN):
        return False
    named = [(name, each) for base in type(value).__mro__[:-1] for name, each in vars(base).items()]
    asked = any(isinstance(each, FunctionType) and name in _ASKED for name, each in named)
    return not asked and not any(name in ("__slots__", "__next__") for name, _ in named)


def _is_error(name: str) -> bool:
    value = getattr(builtins, name)
    return isinstance(value, type) and issubclass(value, BaseException)


def _is_torchs_operator(value: Any) -> bool:
    return (
        type(value).__module__.partition(".")[0] == "torch"
        and callable(value)
        and not (isinstance(value, (nn.Module, Tensor)))
    )


def _names_in(steps: Sequence[dis.Instruction]) -> frozenset[str]:
    """Return the names by which instructions ask for attributes."""
    found, before = set[str](), ""
    for step in steps:
        if step.opname in _LOADS:
            is_of_part = step.argval == "training" and before in _LOADS
            found.add(OF_A_PART if is_of_part else step.argval)
        elif step.opname == "LOAD_GLOBAL" and step.argval in ("getattr", "hasattr"):
            found.add(ANY_NAME)  # words in the code, or made by it
        before = step.opname
    return frozenset(found)
