"""The content by which an index knows a block, where that is not just what the block holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from kvproof_spec.actions import Submit
from kvproof_spec.policies.releases import Release
from kvproof_spec.prefix import Inputs, Prefix, Symbol, content_of
from kvproof_spec.state import Request


class Names:
    """vLLM's block hashes, but for hashing: `generate_block_hash_extra_keys`.

    With prompt embeddings a block is known by all its embeddings, zeros for tokens
    included and none after the prompt, so that the prompt's end counts; and by its items as
    well.  Releases that know an adapter by its name alone take its versions for one.
    """

    def __init__(self, release: Release) -> None:
        self.release = release
        self._own: dict[int, list[Prefix]] = {}  # by request, by position
        self._embedded: set[int] = set()  # requests

    def submit(self, root: Prefix, action: Submit) -> None:
        inputs = action.inputs
        if inputs.lora_version and not self.release.keys_adapter_versions:
            inputs = replace(inputs, lora_version=0)
        if inputs.embeds:
            self._embedded.add(action.request)
            self._own[action.request] = embedded_names(root, action.symbols, inputs)
        elif inputs is not action.inputs:
            self._own[action.request] = list(content_of(root, action.symbols, inputs))

    def of(self, request: Request, tokens: int) -> Prefix:
        """The name of what the first `tokens` tokens fill."""
        own = self._own.get(request.id)
        if own is None:
            return request.content[tokens - 1]
        while len(own) < tokens:
            last, at = own[-1], len(own)
            if at == request.prompt_tokens and request.id in self._embedded:
                last = last.context("no embedding")
            own.append(last.extend(request.content[at].symbol))
        return own[tokens - 1]

    def clone(self) -> Self:
        twin = type(self)(self.release)
        twin._own = {request: list(own) for request, own in self._own.items()}
        twin._embedded = set(self._embedded)
        return twin


def embedded_names(root: Prefix, symbols: Sequence[Symbol], inputs: Inputs) -> list[Prefix]:
    """Beside each embedding also the item that it belongs to."""
    last, names = inputs.root(root).context("embeddings"), []
    items = replace(inputs, embeds=())
    for position, symbol in enumerate(symbols):
        last = last.extend((inputs.at(position, symbol), items.at(position, 0)))
        names.append(last)
    return names
