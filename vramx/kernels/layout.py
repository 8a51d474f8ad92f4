"""Where the codes and the headers of a packed tensor lie in its one buffer.

Plain integers: no torch, no triton, so that the reference and the kernels read the same lines.

      0                          code_bytes                 buffer_bytes
      | codes of group 0, 1, ... | headers of group 0, 1, ... |

A group is `group_size` elements in flat order; the last one may be shorter and is stored whole,
its missing elements with code 0. `code_bytes` is a multiple of 16, so the headers are aligned.
  8 bits   byte i is the code of element i: two's complement if symmetric, unsigned if not
  4 bits   byte j of a group (j < G/2) has element j in its low half and j + G/2 in its high half
  1 bit    bit k of byte j is element 8 j + k; no headers and no groups
  header   symmetric: the scale as bfloat16. Asymmetric: a 32-bit word with the scale as bfloat16
           in its low half and the minimum as bfloat16 in its high half.
Other widths exist in the reference only, a byte a code in the layout of 8 bits. Immutable; a
property costs a few additions.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALIGNMENT_BYTES = 16  # the widest access of a GPU thread


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


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
        1040
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
        """The bytes of all codes, a multiple of 16: the offset of the first header."""
        codes = self.numel if self.bits == 1 else self.groups * self.group_size
        return _round_up(-(-codes * self.bits // 8), _ALIGNMENT_BYTES)

    @property
    def header_bytes(self) -> int:
        """The bytes of all headers."""
        return self.groups * (2 if self.symmetric else 4)

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the buffer."""
        return self.code_bytes + self.header_bytes
