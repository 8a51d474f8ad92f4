"""optimize: swap the blocks of a model for ones that keep less, and say what was done.

A block that is understood is computed as its family does (families/swap.py), which shares what its
parts keep; nothing is copied, added or renamed, and vramx.restore() undoes it. What a block
computes is its family's. Not thread-safe; costs milliseconds, and some hundredths
of a second for a class that is met first, and for each block that has to be read. Touches no tensor
of the model, but for the masks of blocks that are read, and waits for the device for those alone.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vramx.compression.asked import options_of
from vramx.compression.config import Compression
from vramx.errors import VramxWarning, refused
from vramx.nn.families import family_of, head, known_base, plain_reading, projection, trial
from vramx.nn.families.attention import KNOWN
from vramx.nn.families.parts import can_repeat
from vramx.nn.families.plain import PlainBlock
from vramx.nn.families.plain_plan import NotPlainError, Plan, has_opaque
from vramx.nn.families.questions import part_of, untouched
from vramx.nn.families.swap import RECOMPUTE_MLP, Fusing, Settings, swap, unswap
from vramx.nn.levels import LEFT, check_patterns, kept_by, levels_of, word_for
from vramx.patch.module import find, original_class, patch_of
from vramx.patch.table import table
from vramx.recompute.modules import compares


@dataclass(frozen=True)
class OptimizeRow:
    """What was done with one module: its name, its class, the level's word or "left", and why."""

    name: str
    module: str
    done: str
    reason: str


@dataclass(frozen=True)
class OptimizeReport:
    """What optimize() did: a row a module, as model.named_modules() has them; text by str().

    Rows are of swapped blocks, of parts of them that are called as they are, of known blocks that
    were left, and of modules outside of swapped blocks that have no children. What single calls do
    is not in it: a swapped block does as the original without grad mode, in eval mode, and for
    arguments that it does not know.

    Example:
        >>> report = optimize(nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32)))
        >>> [row.name for row in report.swapped]
        ['0']
    """

    rows: tuple[OptimizeRow, ...]

    @property
    def swapped(self) -> tuple[OptimizeRow, ...]:
        """The rows of blocks that were swapped."""
        return tuple(row for row in self.rows if row.done != LEFT)

    @property
    def left(self) -> tuple[OptimizeRow, ...]:
        """The rows of modules that were left as they are."""
        return tuple(row for row in self.rows if row.done == LEFT)

    def __str__(self) -> str:
        rows = [(row.name, row.module, row.done, row.reason) for row in self.rows]
        return table(("name", "class", "done", "reason"), rows)


def optimize(
    model: nn.Module,
    level: str | Mapping[str, str] | None = None,
    keep: Compression | None = None,
    *,
    verify: bool = False,
    **options: Any,
) -> OptimizeReport:
    """Swap the blocks of a model for fused ones that keep less for backward.

    Known are the blocks of Llama, Mistral, Qwen2, Qwen3, Gemma, GPT-2, BERT and ViT of
    transformers, the RMS norms of these outside of blocks, the blocks of timm's vision transformers
    and ConvNeXts, of the ResNets of timm, torchvision and transformers, with norms that are frozen
    or not, and torch.nn.TransformerEncoderLayer. A block of no known class is read, once, by
    torch.fx: one whose forward(x) adds attention and a feed-forward part behind norms is computed
    as that, while it is as it was read. Of language models of transformers, in training
    and with labels, the loss is computed without logits, exactly; `logits` of the result are made
    where something uses them, and a warning names that. A class is swapped only where a small
    module of it, made by the installed release and run on the CPU once, computes the same both
    ways; what is of a known class and left is named in a VramxWarning. A Linear with peft's LoRA is
    part of its block: frozen weights keep nothing, adapters share the packs, and quantised weights
    are their own module's. Parts that are changed otherwise (DoRA, hooks, another attention) are
    called as they are. Optimise before FSDP wraps the model; adapters may come before or after, new
    embeddings before. In a graph of torch.compile a model makes its logits: compile its blocks.
    What torch.jit.script is to compile must be restored first, as what runs under torch.func's
    transforms.

    Args:
        level: "int8" or "int4": what is kept is packed; "keep": fused and exact; "recompute_mlp":
            packed as `keep` says, and of the feed-forward part nothing is kept: its first products
            are made again in backward (a block whose part is not understood does without, and the
            report says so); "recompute_all": only the block's input is kept, packed (exactly where
            the block has ReLUs, whose gradients jump), and the fused block recomputed in backward,
            then exactly; "left": not swapped. Or a mapping from
            patterns of names ("model.layers.1?", "lm_head") to such words: the first that matches
            counts, and what none matches is left. None is "int8" or "int4", as `keep` says.
        keep: how tensors are packed; rounding, group_size and symmetric count as well as level.
        verify: compare each block with its original on its first training call without a cache:
            results and gradients of one pass each, dropout off and everything kept exactly. A block
            that differs by more than rounding is restored, with a VramxWarning.
        options: fields of Compression, over those of `keep`: rounding="nearest".

    Returns:
        The report. The model itself is changed in place, and vramx.restore() undoes it; optimising
        again first undoes what optimising did.

    Raises:
        InvalidValueError: a level or an option is not accepted, or a pattern matches no module;
            nothing was changed.

    Memory: int8 keeps about a quarter of what a Llama of transformers does without, recompute_mlp
        an eighth.
    Sync: none, but where a mask of a block that is read is on the device; with `verify`, the first
        calls wait for it.
    Error bound: results as the original's, to rounding; gradients as the fused functions' of
        vramx.nn say. Dropout draws other masks than the original would, of the same probability.

    Example:
        >>> model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32), nn.Linear(16, 2))
        >>> [row.name for row in optimize(model, "int8").swapped]
        ['0']
    """
    keep = options_of(Compression() if keep is None else keep, options, "keep")
    chosen = levels_of(level, keep)
    if not isinstance(model, nn.Module):
        raise refused("model", model, "is a torch.nn.Module")
    if isinstance(level, Mapping):
        check_patterns(chosen, model)
    for module in model.modules():
        unswap(module)
    rows, left = [], list[tuple[type[nn.Module], str]]()
    found_heads = {id(found.module): found for found in head.heads_of(model)}
    for name, module, found in _visit(model, found_heads, chosen):
        plan = found if isinstance(found, Plan) else None
        family, word = PlainBlock if plan else family_of(module), word_for(chosen, name)
        of_head = found_heads.get(id(module))
        why_not = found if isinstance(found, str) else None
        if why_not is None and word == LEFT:
            why_not = "its level says so"
        if why_not is None and of_head is not None:
            head.swap_head(of_head)
            rows.append(OptimizeRow(name, type(module).__name__, "keep", head.said_of(of_head)))
            left += head.left_of(of_head)
            continue
        if family is None or why_not is not None:
            rows.append(OptimizeRow(name, type(module).__name__, LEFT, why_not or ""))
            if word != LEFT and of_head is not None and head.is_known(of_head.models[0]):
                left.append((original_class(of_head.models[0]), why_not or ""))
            elif word != LEFT and (
                family or known_base(module) or head.why_no_head(module, found_heads)
            ):
                left.append((original_class(module), why_not or ""))
            continue
        may_compare = compares(module) or (plan is not None and has_opaque(module, plan))
        settings = Settings(
            word, kept_by(word, keep), unverified=verify, compares=may_compare, read=plan
        )
        swap(module, family, settings)
        rows.append(OptimizeRow(name, type(module).__name__, *_done(module, word)))
        rows += _changed_parts(name, module)
    _warn_of(left)
    return OptimizeReport(tuple(rows))


def _warn_of(left: list[tuple[type[nn.Module], str]]) -> None:
    """Name what was to be swapped and is of a known class, once a class and reason."""
    for (cls, reason), count in Counter(left).items():
        library = cls.__module__.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", "")
        warnings.warn(
            f"{cls.__name__} of {library} {version}".rstrip()
            + f" is left as it was, {count} of this model: {reason}",
            VramxWarning,
            stacklevel=3,
        )


def _visit(
    model: nn.Module, heads: Mapping[int, head.Head], chosen: dict[str, str]
) -> Iterator[tuple[str, nn.Module, Plan | str | None]]:
    """Yield heads, blocks and other leaves, and why not to swap them or what they were read to be.

    A block of no known family is read; one that could not be is yielded if it is one of several.
    """
    counts = Counter(type(module) for module in model.modules())
    inside: list[str] = []
    for name, module in list(model.named_modules()):
        if any(name.startswith(block) for block in inside):
            continue
        found: Plan | str | None
        if id(module) in heads:
            found, is_whole = head.why_not(heads[id(module)]), True
        elif (no_head := head.why_no_head(module, heads)) is not None:
            found, is_whole = no_head, False
        elif family_of(module) is not None:
            found = _why_not(module)
            is_whole = found is None
        else:
            found = _unnamed(module, word_for(chosen, name), counts[type(module)] > 1)
            is_whole = isinstance(found, Plan)
            if found is None:
                continue
        if is_whole:
            inside.append(f"{name}." if name else "")
        yield name, module, found


def _unnamed(module: nn.Module, word: str, is_one_of_several: bool) -> Plan | str | None:
    """Return what a module of no known family was read to be, or why it is left; None: no row."""
    base = known_base(module)
    if base is not None:
        return f"its class is derived from {base.__name__}: not known"
    if next(module.children(), None) is None:
        return "it is of no known family"
    if word == LEFT or not plain_reading.may_be_plain(module):
        return None
    try:
        return plain_reading.read(module)
    except NotPlainError as error:
        return f"it is of no known family: {error}" if is_one_of_several else None


def _why_not(module: nn.Module) -> str | None:
    forward = type(module).forward
    patch = patch_of(module)
    set_by_others = "forward" in module.__dict__ or (patch is not None and patch.inner is not None)
    if set_by_others or forward.__module__ != type(module).__module__:
        return "its forward was replaced"
    family = family_of(module)
    return None if family is None else trial.why_not(module, family)


def _done(block: Any, word: str) -> tuple[str, str]:
    """Return the level that a swapped module has now, and as what it is computed."""
    fusing = find(block, Fusing)
    assert fusing is not None
    reason = f"as {fusing.family.__name__}"
    if word != RECOMPUTE_MLP:
        return word, reason
    part = block.vramx_feed_forward()
    if part is not None and can_repeat(part):
        return word, reason
    if block.RECOMPUTES:
        reason += "; its feed-forward part is not understood: not recomputed"
    keep = fusing.settings.keep
    return keep.level, reason


def _changed_parts(name: str, block: nn.Module) -> Iterator[OptimizeRow]:
    """Yield rows of the parts of a swapped block that are called as they are."""
    family: Any = type(block)
    known = (*family.PARTS, *family.OPTIONAL)
    paths = dict.fromkeys(
        path.rsplit(".", cut)[0] for path in known for cut in range(path.count("."), -1, -1)
    )
    for path in paths:
        part = part_of(block, path)
        reason = _changed(part) if isinstance(part, nn.Module) else None
        if reason is not None:
            full = f"{name}.{path}" if name else path
            yield OptimizeRow(full, type(part).__name__, LEFT, reason)


def _changed(part: nn.Module) -> str | None:
    if not untouched(part):
        return "it has hooks or another forward: called as it is"
    weight = getattr(part, "weight", None)
    if isinstance(weight, Tensor) and (weight.dim() == 2 or hasattr(part, "base_layer")):
        return projection.why_not(part)
    config = getattr(part, "config", None)
    word = getattr(config, "_attn_implementation", None)
    if word is not None and word not in KNOWN:
        return f"its attention is {word!r}: called as it is"
    return None
