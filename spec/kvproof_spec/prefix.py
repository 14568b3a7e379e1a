"""Content of a cell: an interned prefix, so that equal content is the same object."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

Symbol = int
"""The token id that a position is given; what else decides its content is in `Inputs`."""


@dataclass(frozen=True, slots=True)
class Item:
    """A multimodal item (an image, say) in the place of `tokens` tokens from `first` on."""

    id: str
    first: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """What decides the content of a request's cells beside its token ids.

    `lora` is the adapter's name; a name loaded again with other weights has another
    `lora_version`.  `salt` sets a tenant's cache apart.  `embeds` are (position,
    embedding) where a prompt embedding takes the place of the token's own.
    """

    lora: str | None = None
    lora_version: int = 0
    salt: str | None = None
    items: tuple[Item, ...] = ()
    embeds: tuple[tuple[int, int], ...] = ()

    def at(self, position: int, token: Symbol) -> Hashable:
        """What decides the content of one position, given what is before it.

        >>> Inputs(items=(Item("cat", 2, 3),)).at(3, 7)
        (7, 'cat', 1)
        """
        for at, embedding in self.embeds:
            if at == position:
                return "embedding", embedding
        for item in self.items:
            if item.first <= position < item.first + item.tokens:
                return token, item.id, position - item.first
        return token

    def within(self, tokens: int) -> Inputs:
        """Without the items and embeddings that a prompt of `tokens` tokens has no room for."""
        items = tuple(item for item in self.items if item.first + item.tokens <= tokens)
        embeds = tuple(embed for embed in self.embeds if embed[0] < tokens)
        if (items, embeds) == (self.items, self.embeds):
            return self
        return replace(self, items=items, embeds=embeds)

    def root(self, root: Prefix) -> Prefix:
        """What the request's content starts from: adapter and salt decide every position."""
        if self.lora is None and self.salt is None:
            return root
        return root.context((self.lora, self.lora_version, self.salt))


TOKENS_ONLY = Inputs()


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

    def __init__(self, parent: Prefix | None, symbol: Hashable, length: int) -> None:
        self.parent = parent
        self.symbol = symbol
        self.length = length  # tokens
        self._children: dict[Hashable, Prefix] = {}

    @classmethod
    def root(cls) -> Prefix:
        """The empty prefix of a new trie; nodes of different tries are never equal."""
        return cls(None, 0, 0)

    def extend(self, symbol: Hashable) -> Prefix:
        """The prefix one symbol longer."""
        child = self._children.get(symbol)
        if child is None:
            child = self._children[symbol] = Prefix(self, symbol, self.length + 1)
        return child

    def context(self, name: Hashable) -> Prefix:
        """Another empty prefix, whose extensions are equal to nobody else's."""
        child = self._children.get(name)
        if child is None:
            child = self._children[name] = Prefix(self, name, self.length)
        return child

    def symbols(self) -> tuple[Hashable, ...]:
        """The symbols from the first position to this one."""
        backwards = []
        node = self
        while node.parent is not None:
            backwards.append(node.symbol)
            node = node.parent
        return tuple(reversed(backwards))

    def __repr__(self) -> str:
        return f"<{' '.join(map(str, self.symbols()))}>"


def extend_content(content: tuple[Prefix, ...], symbols: Iterable[Hashable]) -> tuple[Prefix, ...]:
    """`content` (indexed by position, not empty) with `symbols` appended."""
    nodes = list(content)
    for symbol in symbols:
        nodes.append(nodes[-1].extend(symbol))
    return tuple(nodes)


def content_of(
    root: Prefix, tokens: Sequence[Symbol], inputs: Inputs = TOKENS_ONLY
) -> tuple[Prefix, ...]:
    """The content at each position of a prompt."""
    last, nodes = inputs.root(root), []
    plain = not inputs.items and not inputs.embeds
    for position, token in enumerate(tokens):
        last = last.extend(token if plain else inputs.at(position, token))
        nodes.append(last)
    return tuple(nodes)
