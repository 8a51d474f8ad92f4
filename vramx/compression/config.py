"""What the user asks of compression: the options, and the format of one packed tensor.

Compression is one frozen, hashable value that is validated whole when it is made; Format is the
part of it that the codec needs for one tensor. What the rules of a policy mean is decided in
policy.py; here they are only read. Imports no torch. Pure values, thread-safe; making one takes
microseconds, and Compression.format() and .rules are cached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from vramx.errors import InvalidValueError, brief, refused
from vramx.sizes import parse_size

Policy = Mapping[str, str] | tuple[tuple[str, str], ...]

ROUNDINGS = ("stochastic", "nearest")
# Bits an element of the words for what is packed; formats of other widths are for experiments.
BITS = {"int8": 8, "int4": 4}
MASK, MASK_BITS = "int1", 1
GROUP_SIZES = tuple(1 << exponent for exponent in range(4, 11))
KEEP = "keep"
LEVELS = (KEEP, *BITS)
WIDTHS = {**BITS, MASK: MASK_BITS}
# q and k and whatever feeds an exp: an error there is multiplied, not averaged out. The bias of a
# gradient through a compressed log-softmax was 330 % of it at 2 bits.
DEFAULT_POLICY: dict[str, str] = {
    "scaled_dot_product_attention:0,1": KEEP,
    "cross_entropy": KEEP,
    "log_softmax": KEEP,
    "softmax": KEEP,
    "nll_loss": KEEP,
    "logsumexp": KEEP,
}
_KEY = re.compile(r"(?P<operation>[A-Za-z_][\w.]*)(?::(?P<what>mask|\d{1,4}(?:,\d{1,4})*))?")


@dataclass(frozen=True)
class Format:
    """How the elements of one tensor are stored.

    Args:
        bits: 8, or 4 with two codes a byte; 1 is the format of bool masks. 2, 3, 5, 6 and 7 take a
            byte a code on every device: they are for experiments.
        group_size: elements that share a scale, a power of two from 16 to 1024; of no meaning for
            masks.
        symmetric: codes around zero and a scale; else codes from zero, a scale and a minimum.
        rounding: "stochastic" is unbiased; "nearest" has half the largest error.

    Raises:
        InvalidValueError: a value is none of these.

    Example:
        >>> Format(bits=4, group_size=64, symmetric=False)
        Format(bits=4, group_size=64, symmetric=False, rounding='stochastic')
    """

    bits: int = 8
    group_size: int = 128
    symmetric: bool = True
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _check_integer(
            "bits", self.bits, range(1, 9), "1 for masks, 8, 4, and for experiments 2 to 7"
        )
        _check_group_size(self.group_size)
        _check_bool("symmetric", self.symmetric)
        _check_word("rounding", self.rounding, ROUNDINGS)


@dataclass(frozen=True)
class Rule:
    """One entry of a policy: what is done with what an operation saves.

    `arguments` are the positions of the tensor arguments that it holds for, None all of them;
    `mask` is whether it holds for the bool tensors that the operation saves rather than for the
    others; `level` is what is done.
    """

    operation: str
    arguments: tuple[int, ...] | None
    mask: bool
    level: str

    @property
    def key(self) -> str:
        """The rule's key in a policy, as in `linear`, `dropout:mask` or `mul:0,1`."""
        if self.mask:
            return f"{self.operation}:mask"
        positions = "" if self.arguments is None else ":" + ",".join(map(str, self.arguments))
        return self.operation + positions


# The smallest groups that rows are packed in so that no group has parts of two: at int8 a header is
# a sixth of what such a group has.
LEAST_OF_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Compression:
    """The options of compression, checked.

    Args:
        level: "int8" or "int4": what is packed has 8 or 4 bits an element; "keep": nothing is
            packed, whatever the policy says, also within an enclosing compression.
        group_size: elements that share a scale, a power of two from 16 to 1024; None is 128 at int8
            and 64 at int4. They are fewer, down to 32, where rows of a matrix would share groups;
            rows of other lengths, no multiple of 32, have a scale each.
        rounding: "stochastic" is unbiased; "nearest" is faster and has half the largest error.
        symmetric: None is True at int8 and False at int4, where symmetric codes can make a training
            run unstable.
        min_bytes: smaller tensors are kept as they are; bytes, or text such as "1MiB".
        policy: exceptions by operation, merged over DEFAULT_POLICY: "linear", "mul:0,1" (argument
            positions) -> "keep", "int8" or "int4"; "dropout:mask" (its bool tensors) -> "keep" or
            "int1", a bit each. A rule for a position goes before the rule of its operation.
        offload: None, "cpu", or the fraction of the packed bytes that moves to host memory.
        strict: raise where a tensor cannot be compressed, instead of keeping it.
        deterministic: draw noise that depends on the seed, the step and the order of calls only.

    Raises:
        InvalidValueError: a value is not accepted; the text says which are.

    Example:
        >>> options = Compression(level="int4", min_bytes="64KiB", policy={"linear": "int8"})
        >>> options.min_bytes, options.format().group_size, options.format(bits=8).symmetric
        (65536, 64, True)
    """

    level: str = "int8"
    group_size: int | None = None
    rounding: str = "stochastic"
    symmetric: bool | None = None
    min_bytes: int | str = 1 << 20
    policy: Policy | None = None
    offload: str | float | None = None
    strict: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        _check_word("level", self.level, LEVELS)
        if self.group_size is not None:
            _check_group_size(self.group_size)
        _check_word("rounding", self.rounding, ROUNDINGS)
        if self.symmetric is not None:
            _check_bool("symmetric", self.symmetric, "True, False and None")
        _check_offload(self.offload)
        for name in ("strict", "deterministic"):
            _check_bool(name, getattr(self, name))
        # Stored as values that hash and compare, whatever form they came in.
        object.__setattr__(self, "min_bytes", _parse_min_bytes(self.min_bytes))
        object.__setattr__(self, "policy", _merge(DEFAULT_POLICY, self.policy))

    def format(self, bits: int | None = None) -> Format:
        """Return the format of a tensor that is stored with `bits`, by default the level's.

        Raises:
            InvalidValueError: `bits` is none of 8, 4 and 1 (for masks), or the level is "keep".

        Example:
            >>> Compression(rounding="nearest").format(bits=4)
            Format(bits=4, group_size=64, symmetric=False, rounding='nearest')
        """
        if bits is None:
            if not self.packs:
                raise InvalidValueError(
                    "level 'keep' has no format; accepted are 'int8' and 'int4'"
                )
            bits = BITS[self.level]
        return format_of(bits, self.group_size, self.rounding, self.symmetric)

    @property
    def packs(self) -> bool:
        """Whether anything is packed: not at level "keep"."""
        return self.level != KEEP

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The policy as rules; an operation's most special first: the first that fits holds."""
        assert isinstance(self.policy, tuple)
        return rules_of(self.policy)


@lru_cache(maxsize=256, typed=True)  # or True would find what was made for 1
def format_of(bits: int, group_size: int | None, rounding: str, symmetric: bool | None) -> Format:
    """Return the format that these fields of a Compression mean."""
    _check_integer("bits", bits, (*WIDTHS.values(),), "8, 4, and 1 for masks")
    if bits == MASK_BITS:
        return MASK_FORMAT
    return Format(
        bits=bits,
        group_size=group_size or (128 if bits == 8 else 64),
        symmetric=bits == 8 if symmetric is None else symmetric,
        rounding=rounding,
    )


def _merge(defaults: Mapping[str, str], policy: Policy | None) -> tuple[tuple[str, str], ...]:
    """Return both policies as one in canonical form, `policy` over `defaults` by position.

    Merging the result again changes nothing, so that dataclasses.replace() keeps a policy.
    """
    merged = _entries(defaults.items())
    merged |= _entries(_pairs(policy))
    levels: dict[tuple[str, bool, str], list[int]] = {}
    rules = []
    for (operation, position, mask), level in merged.items():
        if position is None:
            rules.append(Rule(operation, None, mask, level))
        else:
            levels.setdefault((operation, mask, level), []).append(position)
    rules += [
        Rule(operation, tuple(sorted(positions)), mask, level)
        for (operation, mask, level), positions in levels.items()
    ]
    return tuple(sorted((rule.key, rule.level) for rule in rules))


def _pairs(policy: Policy | None) -> Iterable[tuple[str, str]]:
    if policy is None:
        return ()
    if isinstance(policy, Mapping):
        return policy.items()
    if isinstance(policy, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in policy):
        return policy
    raise InvalidValueError(f'policy {brief(policy)} is not a mapping such as {{"linear": "int8"}}')


def _entries(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, int | None, bool], str]:
    """Split every key into single positions; the same one with two levels is a mistake."""
    found: dict[tuple[str, int | None, bool], str] = {}
    for key, level in pairs:
        rule = _parse_rule(key, level)
        for position in (None,) if rule.arguments is None else rule.arguments:
            entry = (rule.operation, position, rule.mask)
            if found.setdefault(entry, level) != level:
                raise InvalidValueError(
                    f"policy {key!r}: {level!r} contradicts an earlier key, which gives "
                    f"{found[entry]!r}; accepted is one level an argument"
                )
    return found


def _parse_rule(key: str, level: str) -> Rule:
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        raise InvalidValueError(
            f"policy key {brief(key)} is not understood; accepted are an operation, and one with "
            "argument positions or its masks: linear, mul:0,1, dropout:mask"
        )
    what = match["what"]
    mask = what == "mask"
    _check_word(f"policy {key!r}: level", level, (KEEP, MASK) if mask else LEVELS)
    positions = None if what is None or mask else tuple(sorted({int(w) for w in what.split(",")}))
    return Rule(match["operation"], positions, mask, level)


@lru_cache(maxsize=256)
def rules_of(policy: tuple[tuple[str, str], ...]) -> tuple[Rule, ...]:
    """Return a Compression's policy as rules; an operation's most special ones first."""
    rules = [_parse_rule(key, level) for key, level in policy]
    return tuple(sorted(rules, key=lambda r: (r.operation, not r.mask, r.arguments is None, r.key)))


def _parse_min_bytes(size: object) -> int:
    try:
        return parse_size(size)  # type: ignore[arg-type]
    except InvalidValueError as error:
        raise InvalidValueError(f"min_bytes: {error}") from None


def _check_integer(name: str, value: object, accepted: Iterable[int], words: str) -> None:
    # True == 1, and is a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or value not in accepted:
        raise refused(name, value, f"are {words}")


def _check_group_size(value: object) -> None:
    _check_integer("group_size", value, GROUP_SIZES, "the powers of two from 16 to 1024")


def _check_bool(name: str, value: object, words: str = "True and False") -> None:
    if not isinstance(value, bool):
        raise refused(name, value, f"are {words}")


def _check_word(name: str, value: object, accepted: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in accepted:
        raise refused(name, value, accepted)


def _check_offload(value: object) -> None:
    if value is None or value == "cpu":
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:  # type: ignore[operator]
        raise refused("offload", value, (None, "cpu"), "a fraction from 0 to 1")


# The format of bool tensors: a bit an element, exact.
MASK_FORMAT = Format(bits=MASK_BITS, rounding="nearest")
