"""What the code of a block reads beside tensors, and whether all of it is still what it was.

A record of a forward has the values of numbers and words that the forward came by, not where they
are from. So the names in the code that ran are looked up, and in that of functions and methods that
it names: global variables, what functions close over, defaults, attributes of classes, and by their
names attributes of the block's modules and of objects in these, as of a config. Each is compared in
a call by what it is: a microsecond for a dozen. Code that names anything which may change without
being another, as a global dictionary, or asks on what it runs, is refused. Found in some
milliseconds a block.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import itertools
import sys
from collections.abc import Iterator
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from vramx.nn.families.plain_plan import NotPlainError, is_table
from vramx.nn.families.questions import part_of
from vramx.patch.module import original_class
from vramx.patch.references import is_filled
from vramx.patch.subclass import RECORD
from vramx.patch.torch_functions import replaced

_FIXED = (
    *(int, float, bool, str, bytes, complex, type(None), type(...), slice, range),
    *(torch.dtype, torch.device, torch.Size),
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
# Libraries whose functions do with what they are given what their names say, and keep no state.
_PURE = {"torch", "numpy", "einops", "typing_extensions", *sys.stdlib_module_names} - {"__main__"}
# Asked again, and compared.
_MODES = {
    each.__name__: each
    for each in (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype)
}
# But for these, by which code asks how, where or on what it runs, or gets at members unseen.
_REFUSED = """
    __class__ __dict__ __getattribute__ _buffers _parameters backends buffers callable cuda delattr
    dir distributed environ eval exec get_autocast_cpu_dtype get_autocast_dtype
    get_autocast_gpu_dtype get_default_device getenv globals hash id initial_seed input
    is_anomaly_enabled is_autocast_cpu_enabled is_autocast_enabled is_tensor iter locals mps
    named_buffers named_parameters next open parameters print random repr setattr state_dict time
    type vars xpu
"""
_NAMED = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_NAME")
_ENDS = ("RETURN", "YIELD")
_MODE_OF_A_PART = "training of a part"
_BY_ANY_NAME = frozenset(("getattr", "hasattr"))
_SPECIAL = ("__call__", "__getattr__", "__getitem__", "__len__", "__iter__", "__contains__")
OF_EVERY_MODULE = frozenset((*vars(nn.Module()), RECORD))
# The instructions that ran, by code.
Key = tuple[str, int, str]
Steps = dict[Key, set[int]]
ByPath = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
_CODE = attrgetter("__code__")


class Ran(NamedTuple):
    """What a record has run: the forwards of modules, by path, and which instructions."""

    through: tuple[str, ...]
    steps: Steps


class Reads:
    """What code reads, and what it was; copies of a block share it, and pickles find it again."""

    def __init__(self, found: _Finder) -> None:
        self.names = None if found.asks_for_any else frozenset(found.names)
        self._ran = Ran(found.ran.through, {key: found.ran.steps[key] for key in found.codes})
        self.through = frozenset(found.ran.through)
        # Dictionaries, classes, functions and cells, each with what looks names up there.
        self._lookups = [_lookup(get, *each) for get, *each in found.lookups()]
        self._functions = tuple(found.functions)
        self._codes = tuple(map(_CODE, self._functions))
        self._of_torch = tuple(sorted(filter(_is_of_torch, found.names)))
        self._modes = [(_MODES[name], _MODES[name]()) for name in found.names & _MODES.keys()]
        self._bound = found.bound
        self._facts = tuple(sorted(found.facts.items()))
        self._key = next(_keys)
        _every[self._key] = self

    def __deepcopy__(self, memo: Any) -> Reads:
        return self

    def __reduce__(self) -> Any:
        return _Pickled, (self._ran, self._facts)

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
        if (*map(_CODE, self._functions),) != self._codes:
            return False
        for ask, answer in self._modes:
            if ask() != answer:
                return False
        try:
            for of, look, known in self._lookups:
                if look(of) != known:
                    return False
        except (KeyError, AttributeError, ValueError):  # it is gone
            return False
        return True


class _Pickled:
    """What a block's code read in another process: it is looked through again in this one."""

    def __init__(self, ran: Ran, facts: Any) -> None:
        self._ran, self._facts = ran, facts
        self._found: Reads | None = None

    def __reduce__(self) -> Any:
        return _Pickled, (self._ran, self._facts)

    def hold(self, module: Any, compiles: bool) -> bool:
        if compiles:
            return False
        if self._found is None:
            try:
                self._found = look_through(module, self._ran)[0]
            except NotPlainError:
                return False
        return self._found._facts == self._facts and self._found.hold(module, compiles)


_keys = itertools.count()
_every: WeakValueDictionary[int, Reads] = WeakValueDictionary()


@torch.compiler.assume_constant_result
def _still_hold(key: int) -> bool:
    return _every[key].hold_alone()


def code_key(code: CodeType) -> Key:
    """Return what says which code this is, in another process as well."""
    return code.co_filename, code.co_firstlineno, code.co_name


def look_through(module: nn.Module, ran: Ran) -> tuple[Reads, ByPath]:
    """Return what a block's code reads, and what attributes are that it may read, by path.

    Raises:
        NotPlainError: it reads what may change unseen, or may do what a record does not show.
    """
    found = _Finder(module, ran)
    found.find()
    constants = [
        (path, tuple((k, v) for k, v in of.items() if v is not _SAME))
        for path, of in found.constants.items()
    ]
    return Reads(found), tuple(each for each in constants if each[1])


def _lookup(getter: Any, of: Any, known: dict[str, Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a place, what looks several names up there, and what they are."""
    names = [*known, next(iter(known))]  # of a single one it would be no tuple
    return of, getter(*names), tuple(known[name] for name in names)


def _may_change(what: str) -> NotPlainError:
    return NotPlainError(f"it reads {what}, which may change")


class _Finder:
    """Looks through functions, and through what has the attributes that they name."""

    def __init__(self, module: nn.Module, ran: Ran) -> None:
        self.ran = ran
        self.names: set[str] = {"forward", *_SPECIAL}
        self.asks_for_any = False
        self.bound: list[tuple[CellType, str]] = []
        self.facts: dict[str, str] = {}
        self.constants: dict[str, dict[str, Any]] = {}
        self._paths = {id(part): path for path, part in module.named_modules()}
        # What has attributes, by path: the modules, and objects in theirs.
        self._objects: dict[str, Any] = dict(module.named_modules())
        self._places: dict[tuple[Any, int], tuple[Any, dict[str, Any]]] = {}
        self._met: set[FunctionType] = set()
        self.functions: list[FunctionType] = []
        self.codes: set[Key] = set()  # that were looked at, of what ran
        self._classes: dict[type, None] = {}

    def lookups(self) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
        for (getter, _), (of, known) in self._places.items():
            yield getter, of, known

    def find(self) -> None:
        seen = -1
        while seen != len(self.names) + len(self._objects) + len(self._classes):
            seen = len(self.names) + len(self._objects) + len(self._classes)
            for path, owner in list(self._objects.items()):
                self._look_at(path, owner)
            for cls in self._classes:
                self._look_at_class(cls)
        if refused := self.names.intersection(_REFUSED.split()):
            raise NotPlainError(f"it asks for {min(refused)}")
        if _MODE_OF_A_PART in self.names:
            for path in self._paths.values():
                self.constants.setdefault(path, {})["training"] = True

    # -- What has attributes -----------------------------------------------------------------------

    def _look_at(self, path: str, owner: Any) -> None:
        is_module = isinstance(owner, nn.Module)
        is_read = not is_module or path in self.ran.through
        if is_read:
            self._look_at_class(original_class(owner) if is_module else type(owner))
        known = self.constants.setdefault(path, {})
        names = owner.__dict__.keys() if self.asks_for_any else self.names & owner.__dict__.keys()
        for name in names - known.keys() - (OF_EVERY_MODULE if is_module else set()):
            value = owner.__dict__[name]
            if is_read or _is_even(value):
                self._look_at_attribute(f"{path}.{name}".lstrip("."), known, name, value)

    def _look_at_class(self, cls: type) -> None:
        bases = [base for base in cls.__mro__ if base not in (nn.Module, object)]
        for name in self.names & {name for base in bases for name in vars(base)}:
            for base in bases:
                value = vars(base).get(name)
                inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if isinstance(inner, FunctionType) and not isinstance(value, classmethod):
                    self._look_into(inner)
                elif name in vars(base) and not _is_fixed(value):
                    raise _may_change(f"{name} of {cls.__name__}")
            self._note(attrgetter, cls, name, getattr(cls, name))

    def _look_at_attribute(self, path: str, known: dict[str, Any], name: str, value: Any) -> None:
        if _is_even(value):
            known[name] = _copied(value)
            if isinstance(value, type) and _library(value) not in _PURE:
                self._classes[value] = None  # a config, perhaps
            for each in _functions_in(value):
                self._look_into(each)
        elif isinstance(value, MethodType) and id(value.__self__) in self._paths:
            known[name] = value
            self._look_into(value.__func__)
        elif isinstance(value, functools.partial):
            known[name] = value
            for each in (value.func, *value.args, *value.keywords.values()):
                self._settle(each, path)
        elif isinstance(value, Tensor) and is_table(value):
            pass
        elif _is_plain_object(value):
            known.setdefault(name, _SAME)
            self._objects.setdefault(path, value)
            self.constants.setdefault(path, {})["__class__"] = type(value)
        else:
            raise _may_change(path)

    # -- Code --------------------------------------------------------------------------------------

    def _look_into(self, function: Any) -> None:
        if function in self._met:
            return
        self._met.add(function)
        if _library(function) in _PURE:
            self.names.update(set(function.__code__.co_names).difference(_REFUSED.split()))
            return
        if code_key(function.__code__) not in self.ran.steps:
            return
        said = f"{function.__module__}.{function.__qualname__}"
        self.facts[said] = function.__code__.co_code.hex()
        self.functions.append(function)
        if function.__defaults__:
            self._note(attrgetter, function, "__defaults__", function.__defaults__)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._settle(value, f"a default of {said}")
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._close_over(name, cell)
        names = self._names_in(function.__code__)
        self.asks_for_any |= not names.isdisjoint(_BY_ANY_NAME)
        self.names.update(names)
        for name in names & function.__globals__.keys():
            self._note(itemgetter, function.__globals__, name, function.__globals__[name])
            self._settle(function.__globals__[name], name)

    def _names_in(self, code: CodeType) -> set[str]:
        """Return the names in what ran of a function's code, and of functions within it."""
        ran = self.ran.steps.get(code_key(code))
        if ran is None:
            return set()
        self.codes.add(code_key(code))
        steps = list(dis.get_instructions(code))
        if any(step.offset in ran for step in steps if step.opname.startswith(_ENDS)):
            steps = [step for step in steps if step.offset in ran]  # else not all were told of
        if any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in steps):
            raise NotPlainError("it writes a global variable")
        inner = [self._names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
        named = {step.argval for step in steps if step.opname in _NAMED}.union(*inner)
        attributes = [step.argval if step.opname in _NAMED else "" for step in steps]
        if any(name == "training" and of for of, name in itertools.pairwise(attributes)):
            named.add(_MODE_OF_A_PART)
        return named

    def _close_over(self, name: str, cell: CellType) -> None:
        if not is_filled(cell):
            raise _may_change(name)
        value = cell.cell_contents
        if isinstance(value, nn.Module) and id(value) in self._paths:
            self.bound.append((cell, self._paths[id(value)]))
        elif name != "__class__":
            self._note(attrgetter, cell, "cell_contents", value)
            self._settle(value, name)

    def _settle(self, value: Any, said: str) -> None:
        """Accept a value that is what it is for good, and look into functions."""
        if isinstance(value, (type, ModuleType, *_FUNCTIONS, functools._lru_cache_wrapper)):
            if _library(value) in _PURE or (isinstance(value, type) and _is_of_values(value)):
                return
            value = getattr(value, "__wrapped__", value)
        if isinstance(value, FunctionType):
            self._look_into(value)
        elif _is_fixed(value):
            self.facts[said] = repr(value)
        elif type(value).__module__ not in ("typing", "torch._ops"):
            raise _may_change(said)

    def _note(self, getter: Any, of: Any, name: str, value: Any) -> None:
        self._places.setdefault((getter, id(of)), (of, {}))[1][name] = value


_SAME = object()


def _is_of_torch(name: str) -> bool:
    return isinstance(getattr(functional, name, None), _FUNCTIONS)


def _library(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name or builtins.__name__).partition(".")[0]


def _is_fixed(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(map(_is_fixed, value))
    return type(value) in _FIXED or isinstance(value, enum.Enum)


def _is_of_values(cls: type) -> bool:
    """Tell whether a class is of modules, numbers or errors: it is called, or asked what is one."""
    return issubclass(cls, (nn.Module, enum.Enum, BaseException))


def _is_even(value: Any, depth: int = 4) -> bool:
    """Tell whether a value is one that == compares: settings, functions, and containers of such."""
    if _is_fixed(value) or isinstance(value, (type, *_FUNCTIONS)):
        return True
    within = value.values() if type(value) is dict else value
    several = type(value) in (list, tuple, set, frozenset, dict)
    return several and depth > 0 and all(_is_even(each, depth - 1) for each in within)


def _copied(value: Any) -> Any:
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_copied(each) for each in value)
    return {k: _copied(v) for k, v in value.items()} if type(value) is dict else value


def _functions_in(value: Any) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        yield value
    elif type(value) in (list, tuple, set, frozenset, dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _functions_in(each)


def _is_plain_object(value: Any) -> bool:
    """Tell whether an object's attributes are what it has in its dictionary, and its class's."""
    if type(getattr(value, "__dict__", None)) is not dict:
        return False
    if isinstance(value, (type, ModuleType, MethodType, nn.Module, Tensor, dict, list, tuple, set)):
        return False
    return not any("__slots__" in vars(base) for base in type(value).__mro__[:-1])
