"""Structured output: grammars compiled by xgrammar, and the tokens that each step may take.

`tokenizer_info` and `compile_grammar` are all that the API's own check needs: what it lets through
is what the engine compiles. xgrammar is an optional package, imported on first use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pw.engine.request import Grammar
from pw.errors import RequestError
from pw.memory.small_copies import to_device

if TYPE_CHECKING:
    import xgrammar

_MAX_WHITESPACE = 20  # in a row in JSON: small models go on for ever
_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")  # time and source line in xgrammar's messages


def tokenizer_info(inner: Any, vocab_size: int, stop_ids: Seq[int]) -> xgrammar.TokenizerInfo:
    """What xgrammar needs of a tokenizer.

    Args:
        inner: transformers' tokenizer.
        vocab_size: Tokens that have a text; ids above are never let through.
        stop_ids: Ids that end a text.

    Raises:
        RequestError: xgrammar is not installed, or cannot read the tokenizer.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError(
            "structured output is not installed on this server",
            code="unsupported_parameter",
            param="grammar",
            hint="pip install 'pagedweight[structured]'",
        ) from error
    try:
        info = xgrammar.TokenizerInfo.from_huggingface(
            inner, vocab_size=vocab_size, stop_token_ids=list(stop_ids)
        )
    except Exception as error:
        raise _refusal("the model's tokenizer cannot be used with grammars", error) from error
    return _without_special(info, set(inner.all_special_ids))


def _without_special(info: xgrammar.TokenizerInfo, special: set[int]) -> xgrammar.TokenizerInfo:
    """The same with no text for special tokens: their spelling is not theirs to write."""
    import xgrammar

    vocabulary = [
        b"" if token in special else text for token, text in enumerate(info.decoded_vocab)
    ]
    return xgrammar.TokenizerInfo(
        vocabulary,
        xgrammar.VocabType.RAW,
        vocab_size=info.vocab_size,
        stop_token_ids=info.stop_token_ids,
        add_prefix_space=info.add_prefix_space,
    )


def compile_grammar(
    compiler: xgrammar.GrammarCompiler, grammar: Grammar
) -> xgrammar.CompiledGrammar:
    """Compile a grammar. Takes as long as it takes: the caller limits time and memory.

    Raises:
        RequestError: With xgrammar's own sentence.
    """
    try:
        if grammar.kind == "regex":
            return compiler.compile_regex(grammar.text)
        if grammar.kind == "ebnf":
            return compiler.compile_grammar(grammar.text)
        if grammar.kind == "choice":
            return compiler.compile_grammar(_choice_grammar(grammar.text))
        if grammar.kind == "json_object":
            return compiler.compile_json_schema(
                '{"type": "object"}', strict_mode=False, max_whitespace_cnt=_MAX_WHITESPACE
            )
        # One line, as `json.dumps` writes it: where blanks may be, small models spend their tokens.
        return compiler.compile_json_schema(grammar.text, any_whitespace=False, strict_mode=False)
    except RequestError:
        raise
    except Exception as error:
        raise _refusal(f"the {grammar.kind} grammar cannot be compiled", error) from error


def _choice_grammar(text: str) -> str:
    """EBNF of one of the strings in a JSON list."""
    try:
        choices = json.loads(text)
    except ValueError:
        choices = None
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise RequestError(
            "choice must be a JSON list of strings that are not empty",
            code="invalid_grammar",
            param="grammar",
        )
    return "root ::= " + " | ".join(map(_literal, choices))


def _literal(text: str) -> str:
    """A string literal of EBNF."""
    return '"' + "".join(_escape(character) for character in text) + '"'


def _escape(character: str) -> str:
    if character in '"\\' or not character.isprintable():
        return f"\\U{ord(character):08x}"
    return character


def _refusal(what: str, error: Exception) -> RequestError:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return RequestError(
        f"{what}: {_PLACE.sub('', line)[:300]}", code="invalid_grammar", param="grammar"
    )


def clean_tokens(info: xgrammar.TokenizerInfo) -> NDArray[np.uint32]:
    """Tokens that JSON can do with, a bit each: [ceil(V / 32)].

    JSON has no control characters in its strings and needs none but line ends between them.
    xgrammar lets others through where a schema limits the length of a string.
    """
    bits = np.zeros(-(-info.vocab_size // 32) * 32, dtype=np.uint8)
    for token, text in enumerate(info.decoded_vocab):
        bits[token] = all(byte >= 0x20 or byte in b"\r\n" for byte in text)
    return np.packbits(bits, bitorder="little").view("<u4")


class GrammarState:
    """How far a sequence has come in its grammar.

    Args:
        compiled: Its grammar.
        within: [ceil(V / 32)] tokens that may come at all, a bit each; None: all.
    """

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, within: NDArray[np.uint32] | None = None
    ) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._within = within

    @property
    def ended(self) -> bool:
        """Whether nothing may follow: an end token came, or there is none and all is said."""
        matcher = self._matcher
        return matcher.is_terminated() or (not matcher.stop_token_ids and matcher.is_completed())

    def accept(self, token: int) -> bool:
        """Take a token in. False if the grammar has no place for it; nothing changes then."""
        return self._matcher.accept_token(token)

    def fill(self, words: NDArray[np.int32], row: int, blocked: Seq[int]) -> None:
        """Write which tokens may come next, a bit each, to `words[row]`: [S, ceil(V / 32)].

        Tokens of `blocked` are left out where others remain: a grammar at its end has no other.
        Where the vocabulary cannot spell what the grammar wants next, every token may come, and
        `accept` refuses it.
        """
        self._matcher.fill_next_token_bitmask(words, row)
        if self._within is not None:
            words[row] &= self._within.view(np.int32)
        if not words[row].any():
            words[row] = -1
        allowed = words[row].view(np.uint32).copy()
        for token in blocked:
            if token < 32 * len(allowed):
                allowed[token // 32] &= ~np.uint32(1 << token % 32)
        if allowed.any():
            words[row] = allowed.view(np.int32)


def constrain(logits: Tensor, rows: Seq[int], words: NDArray[np.int32]) -> None:
    """Make tokens impossible, in place on logits [S, V]: in `rows[i]` those not in `words[i]`."""
    import xgrammar

    index = to_device(np.array(rows), logits.device)
    part = logits[index]
    xgrammar.apply_token_bitmask_inplace(part, to_device(words, logits.device))
    logits.index_copy_(0, index, part)
