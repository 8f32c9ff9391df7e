"""The encoder-decoder Transformer: masks, and decoding compared with its definition."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from samestep.recipes.models.seq2seq import END, PAD, START, Seq2Seq, build_positions

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # sums over other lengths are rounded differently


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For these small tensors, several threads are slower than one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def build_model(num_source: int = 20, num_target: int = 22, max_length: int = 24) -> Seq2Seq:
    torch.manual_seed(2)
    model = Seq2Seq(num_source, num_target, dim=16, num_heads=2, num_layers=2, max_length=max_length)
    with torch.no_grad():  # far from the initial values, for which all tokens are equally likely
        for param in model.parameters():
            param.mul_(4.0) if param.dim() > 1 else param.add_(0.3 * torch.randn_like(param))
    return model.eval()


def draw_sources(lengths: list[int], padding: int = 0) -> Tensor:
    """Draw sentences of these lengths, which end with END and are padded beyond the longest."""
    generator = torch.Generator().manual_seed(1)
    source = torch.full((len(lengths), max(lengths) + padding), PAD)
    for row, length in enumerate(lengths):
        source[row, : length - 1] = torch.randint(3, 20, (length - 1,), generator=generator)
        source[row, length - 1] = END
    return source


def draw_targets(num_rows: int, length: int) -> Tensor:
    target = torch.randint(3, 22, (num_rows, length), generator=torch.Generator().manual_seed(2))
    target[:, 0] = START
    return target


@pytest.mark.parametrize("padding", [1, 5, 9])
def test_padding_of_the_source_changes_nothing(padding: int) -> None:
    model, target = build_model(), draw_targets(3, 6)
    plain, padded = (model(draw_sources([7, 4, 2], more), target) for more in (0, padding))
    torch.testing.assert_close(padded, plain, **TOLERANCE)


def test_a_sentence_has_the_same_logits_alone_and_beside_longer_ones() -> None:
    model, source, target = build_model(), draw_sources([9, 5, 2]), draw_targets(3, 6)
    together = model(source, target)
    for row, length in enumerate([9, 5, 2]):
        alone = model(source[row : row + 1, :length], target[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, **TOLERANCE)


def test_later_tokens_and_padding_of_the_target_change_nothing_before_them() -> None:
    model, source, target = build_model(), draw_sources([7, 4]), draw_targets(2, 8)
    logits = model(source, target)
    for place in range(1, 8):
        for token in (PAD, 3, 21):
            changed = target.clone()
            changed[:, place:] = token
            torch.testing.assert_close(model(source, changed)[:, :place], logits[:, :place], **TOLERANCE)
    changed = target.clone()
    changed[:, 3] = 3 + (target[:, 3] - 2) % 19
    assert not torch.allclose(model(source, changed)[:, 3], logits[:, 3], **TOLERANCE)  # earlier ones do


def test_the_source_matters_but_for_padding() -> None:
    model, target = build_model(), draw_targets(1, 4)
    source = draw_sources([5])
    for place in range(5):
        changed = source.clone()
        changed[0, place] = 3 + (int(source[0, place]) - 2) % 17
        assert not torch.allclose(model(changed, target), model(source, target), **TOLERANCE)


def translate_by_definition(model: Seq2Seq, source: Tensor) -> list[int]:
    """Decode one sentence greedily, computing all previous tokens again each time."""
    limit = min(2 * int((source != PAD).sum()) + 10, model.max_length - 1)
    tokens = [START]
    while len(tokens) <= limit:
        logits = model(source, torch.tensor([tokens]))[0, -1]
        logits[[PAD, START]] = -torch.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] == END:
            break
    return [token for token in tokens[1:] if token != END]


def test_greedy_decoding_takes_the_most_likely_token_each_time() -> None:
    model = build_model()
    lengths = [9, 5, 2, 3, 7]
    source = draw_sources(lengths)
    expected = [translate_by_definition(model, source[row : row + 1]) for row in range(len(lengths))]
    assert model.translate(source) == expected
    assert len({tuple(row) for row in expected}) == len(lengths)
    assert model.translate(draw_sources(lengths, padding=4)) == expected


def test_a_longer_sentence_than_the_model_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="a sentence has 25 tokens, and the model takes at most 24"):
        build_model()(draw_sources([25]), draw_targets(1, 2))


def test_positions_are_those_of_the_paper() -> None:
    positions = build_positions(5, 6)
    assert positions.shape == (5, 6)
    for place, k in itertools.product(range(5), range(3)):
        angle = torch.tensor(place / 10_000 ** (2 * k / 6))
        torch.testing.assert_close(positions[place, 2 * k : 2 * k + 2], torch.stack([angle.sin(), angle.cos()]))
