from pathlib import Path

import pytest
import torch

from pw.errors import ConfigError, PwError
from pw.evaluation.continuations import Pair, cut_context, encode_pair, score_pairs
from support.engines import VOCABULARY, make_artifact, open_engine, random_prompt
from support.scoring import CharTokenizer, UnigramEngine

TOKENIZER = CharTokenizer()


def test_blanks_at_the_end_of_the_context_move_to_the_continuation() -> None:
    pair = encode_pair(TOKENIZER, "ab \n", "c", prefix=[7])
    assert pair == Pair([7, ord("a"), ord("b")], [ord(" "), ord("\n"), ord("c")])
    assert encode_pair(TOKENIZER, "", " c", prefix=[7]) == Pair([7], [ord(" "), ord("c")])


def test_tokens_that_join_both_sides_belong_to_the_continuation() -> None:
    class Merging(CharTokenizer):
        """Counts `aa` as one token."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text.replace("aa", "\x01"))

    assert encode_pair(Merging(), "ba", "ab") == Pair([ord("b"), 1], [ord("b")])
    with pytest.raises(ConfigError, match="adds no token"):
        encode_pair(Merging(), "ba", "a")


@pytest.mark.parametrize(("context", "continuation"), [("", "x"), ("  ", "x"), ("x", "")])
def test_nothing_to_score_or_nothing_before_it(context: str, continuation: str) -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        encode_pair(TOKENIZER, context, continuation)


def test_contexts_lose_their_beginning_continuations_nothing() -> None:
    assert cut_context(Pair([1, 2, 3], [4, 5]), 4) == [2, 3, 4, 5]
    assert cut_context(Pair([1, 2, 3], [4, 5]), 9) == [1, 2, 3, 4, 5]
    with pytest.raises(PwError, match="continuation of 2 tokens does not fit into a context of 2"):
        cut_context(Pair([1], [4, 5]), 2)


def test_scores_come_back_in_order_and_are_summed() -> None:
    pairs = [Pair([9, 9], [1, 2]), Pair([9], [0, 0]), Pair([9, 9, 9], [5])]
    done: list[int] = []
    scores = score_pairs(
        UnigramEngine(), pairs, max_model_len=10, concurrency=2, advance=done.append
    )
    assert [score.logprob for score in scores] == pytest.approx([-0.5, -0.2, -0.6])
    assert [score.greedy for score in scores] == [False, True, False]
    assert done == [1, 1, 1]


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    model, artifact = make_artifact("qwen2_moe", tmp_path, num_hidden_layers=1)
    prompt = random_prompt(12, seed=1)
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    best = int(logprobs[-1, : VOCABULARY - 1].argmax())
    pairs = [Pair(prompt, [best]), Pair(prompt, [best - 1]), Pair(prompt[:7], prompt[7:])]
    engine = open_engine(artifact, "dense")
    scores = score_pairs(engine, pairs, max_model_len=engine.max_model_len)
    following = logprobs[6:11].gather(1, torch.tensor(prompt[7:])[:, None]).sum()
    expected = [logprobs[-1, best], logprobs[-1, best - 1], following]
    found = torch.tensor([score.logprob for score in scores])
    torch.testing.assert_close(found, torch.stack(expected), atol=2e-4, rtol=0)
    assert [score.greedy for score in scores] == [True, False, False]
