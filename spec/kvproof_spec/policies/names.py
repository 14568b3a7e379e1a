"""The content by which an index knows a block, where that is not just what the block holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from kvproof_spec.actions import Submit
from kvproof_spec.policies.releases import Release
from kvproof_spec.prefix import Inputs, Prefix
from kvproof_spec.state import Request


class Names:
    """vLLM's block hashes, but for hashing: `generate_block_hash_extra_keys`.

    With prompt embeddings a block is known by all its embeddings, zeros for tokens
    included: by none after the prompt, so that the prompt's end counts, and never by the
    token that an embedding stands for.  Releases that know an adapter by its name alone
    take its versions for one.
    """

    def __init__(self, release: Release) -> None:
        self.release = release
        self._own: dict[int, list[Prefix]] = {}  # by request, by position
        self._embedded: set[int] = set()  # requests

    def submit(self, root: Prefix, action: Submit) -> None:
        inputs, embedded = action.inputs, {position for position, _ in action.inputs.embeds}
        if inputs.lora_version and not self.release.keys_adapter_versions:
            inputs = replace(inputs, lora_version=0)
        elif not embedded:
            return
        symbols = [0 if at in embedded else symbol for at, symbol in enumerate(action.symbols)]
        self._own[action.request] = prompt_names(inputs, root, symbols)
        if embedded:
            self._embedded.add(action.request)

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


def prompt_names(inputs: Inputs, root: Prefix, symbols: list[int]) -> list[Prefix]:
    last, names = inputs.root(root), []
    if inputs.embeds:
        last = last.context("embeddings")
    for position, symbol in enumerate(symbols):
        last = last.extend(inputs.at(position, symbol))
        names.append(last)
    return names
