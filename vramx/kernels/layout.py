"""Where the codes and the headers of a packed tensor lie in its one buffer.

Plain integers: no torch, no triton, so that the reference and the kernels read the same lines.

      0                          code_bytes                                  buffer_bytes
      | codes of group 0, 1, ... | outliers of group 0, 1, ... | headers of group 0, 1, ... |

A group is `group_size` elements in flat order; the last one may be shorter and is stored whole,
its missing elements with code 0. `code_bytes` is a multiple of 16, so what follows is aligned.
  8 bits   byte i is the code of element i: two's complement if symmetric, unsigned if not
  4 bits   byte j of a group (j < G/2) has element j in its low half and j + G/2 in its high half
  1 bit    bit k of byte j is element 8 j + k; no headers and no groups
  header   symmetric: the scale as bfloat16. Asymmetric: a 32-bit word with the scale as bfloat16
           in its low half and the minimum as bfloat16 in its high half.
  outliers symmetric with 8 bits only: a 32-bit word with the number of the largest magnitude as
           bfloat16 in its low half and the next one in its high half. Code -128 stands for the
           first, wherever it occurs in the group, and 127 for the second; the others have codes of
           -126 to 126, and the scale is theirs. So a channel or two of 1000 times the rest cost the
           rest nothing, and no index is kept. Four bits have too few codes to give two of them
           away, and the word would be a ninth of the buffer.
Other widths exist in the reference only, a byte a code, without outliers. Immutable; a
property costs a few additions.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALIGNMENT_BYTES = 16  # the widest access of a GPU thread


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def has_outliers(bits: int, symmetric: bool) -> bool:
    """Tell whether groups of a format have two exact numbers besides their codes.

    Example:
        >>> has_outliers(8, symmetric=True), has_outliers(4, symmetric=True)
        (True, False)
    """
    return bits == 8 and symmetric


@dataclass(frozen=True)
class Layout:
    """The geometry of one packed tensor; its fields are valid when `Format` made them.

    Args:
        numel: elements of the tensor, not counting what fills its last group up.
        bits: of one code, 1 to 8; 1 is a mask, whose `group_size` and `symmetric` do not matter.
        group_size: elements that share a header; a power of two, at least 16.
        symmetric: a header is a scale; otherwise a scale and a minimum.

    Example:
        >>> Layout(numel=1000, bits=8, group_size=128, symmetric=True).buffer_bytes
        1072
    """

    numel: int
    bits: int
    group_size: int
    symmetric: bool

    @property
    def groups(self) -> int:
        """The groups, the last one counted whole; 0 for a mask."""
        return 0 if self.bits == 1 else -(-self.numel // self.group_size)

    @property
    def code_bytes(self) -> int:
        """The bytes of all codes, a multiple of 16: the offset of what follows them."""
        if self.bits == 1:
            return _round_up(-(-self.numel // 8), _ALIGNMENT_BYTES)
        codes = self.groups * self.group_size
        return _round_up(codes // 2 if self.bits == 4 else codes, _ALIGNMENT_BYTES)

    @property
    def has_outliers(self) -> bool:
        """Whether each group has two exact numbers besides its codes."""
        return has_outliers(self.bits, self.symmetric)

    @property
    def outlier_bytes(self) -> int:
        """The bytes of all outliers, a multiple of 4."""
        return self.groups * 4 if self.has_outliers else 0

    @property
    def header_bytes(self) -> int:
        """The bytes of all headers."""
        return self.groups * (2 if self.symmetric else 4)

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the buffer."""
        return self.code_bytes + self.outlier_bytes + self.header_bytes
