"""Content of a cell: an interned prefix, so that equal content is the same object."""

from __future__ import annotations

from collections.abc import Iterable

Symbol = int
"""What determines one position: its token id.  LoRA name and version, multimodal item,
prompt embedding and cache salt join it as further fields of one symbol."""


class Prefix:
    """Everything up to and including one position: a node of a trie.

    Nodes are interned by `extend`, so two positions hold the same content exactly when
    they hold the same node.  A node never changes; `_children` only remembers.

    >>> root = Prefix.root()
    >>> root.extend(7).extend(8) is root.extend(7).extend(8)
    True
    >>> root.extend(7).extend(8)
    <7 8>
    """

    __slots__ = ("_children", "length", "parent", "symbol")

    def __init__(self, parent: Prefix | None, symbol: Symbol, length: int) -> None:
        self.parent = parent
        self.symbol = symbol
        self.length = length  # tokens
        self._children: dict[Symbol, Prefix] = {}

    @classmethod
    def root(cls) -> Prefix:
        """The empty prefix of a new trie; nodes of different tries are never equal."""
        return cls(None, 0, 0)

    def extend(self, symbol: Symbol) -> Prefix:
        """The prefix one symbol longer."""
        child = self._children.get(symbol)
        if child is None:
            child = self._children[symbol] = Prefix(self, symbol, self.length + 1)
        return child

    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols from the first position to this one."""
        backwards = []
        node = self
        while node.parent is not None:
            backwards.append(node.symbol)
            node = node.parent
        return tuple(reversed(backwards))

    def __repr__(self) -> str:
        return f"<{' '.join(map(str, self.symbols()))}>"


def extend_content(
    content: tuple[Prefix, ...], symbols: Iterable[Symbol], root: Prefix | None = None
) -> tuple[Prefix, ...]:
    """`content` (indexed by position) with `symbols` appended; `root` if there is none yet."""
    nodes = list(content)
    last = nodes[-1] if nodes else root
    for symbol in symbols:
        assert last is not None, "content without a first prefix needs a root"
        last = last.extend(symbol)
        nodes.append(last)
    return tuple(nodes)
