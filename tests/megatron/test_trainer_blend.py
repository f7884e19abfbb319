"""Blended data: fractions follow the weights, in an order that more steps do not change."""

from collections import Counter

import pytest
from trainer_runs import PLAIN_SGD, arguments, degrees, relative_difference, train

from ds_usp import DataError


class Names:
    """Sample ``i`` of stream ``name`` is ``(name, i)``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.name, index


def test_a_blend_keeps_its_fractions_and_its_order():
    from usp_trainer import data

    blend = data.Blend([Names("a"), Names("b"), Names("c")], [3.0, 6.0, 1.0])
    first = [blend[i] for i in range(1000)]
    assert Counter(name for name, _ in first) == {"a": 300, "b": 600, "c": 100}
    for name in "abc":
        indices = [index for which, index in first if which == name]
        assert indices == list(range(len(indices)))
    far = blend[3 * data._FIRST_INDEX]  # the index grows
    assert far[1] > 100 and [blend[i] for i in range(1000)] == first
    again = data.Blend([Names("a"), Names("b"), Names("c")], [0.3, 0.6, 0.1])
    assert again[3 * data._FIRST_INDEX] == far


def test_samples_start_again_when_they_are_used_up():
    from usp_trainer.data import InOrder, ShuffledEpochs

    assert [InOrder("abc")[i] for i in range(5)] == list("abcab")
    stream = ShuffledEpochs("abcdefgh", 1)
    epochs = ["".join(stream[8 * epoch + i] for i in range(8)) for epoch in range(3)]
    assert {"".join(sorted(epoch)) for epoch in epochs} == {"abcdefgh"} and len(set(epochs)) == 3
    assert stream[3] == epochs[0][3]


def test_a_blend_trains_the_same_on_all_degrees(tmp_path):
    for name, letters in (("a.txt", "abcd "), ("b.txt", "wxyz ")):
        (tmp_path / name).write_text(letters * 4000)
    a, b = (str(tmp_path / name) for name in ("a.txt", "b.txt"))
    flags = f" --data-path 0.25 {a} 0.75 {b}"
    one = train(1, degrees() + PLAIN_SGD + flags, output_dir=tmp_path)[0]
    two = train(2, degrees(sp=2) + PLAIN_SGD + flags, output_dir=tmp_path)[0]
    assert relative_difference(two, one) < 1e-5


def test_the_fraction_of_a_text_is_its_weight(tmp_path):
    from usp_trainer.data import _samples, encode_text

    texts = {"a": "abcd", "w": "wxyz"}
    for name, letters in texts.items():
        (tmp_path / name).write_text(letters * 20000)
    flags = f"--data-path 1 {tmp_path / 'a'} 3 {tmp_path / 'w'} --split 50,50,0"
    args = arguments(flags, tmp_path)
    (tmp_path / "data" / "index").mkdir(parents=True)
    prefixes = [encode_text(tmp_path / "data", [(tmp_path / name).read_bytes()]) for name in texts]
    for stream in _samples(args, prefixes, 257):
        starts = [chr(int(stream[i]["tokens"].min())) for i in range(40)]
        assert Counter(starts) == {"a": 10, "w": 30}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("0.3 a 0.7", "2 weights for 1 paths"),
        ("0.3 a b c", "the weight of c is 'b'"),
        ("0.3 a 0 b", "the weight of b is '0'; it must be a finite number above 0"),
        ("nan a 1 b", "the weight of a is 'nan'"),
    ],
)
def test_invalid_weights_are_refused(flags, message):
    from usp_trainer.run_files import parse_blend

    with pytest.raises(DataError) as refused:
        parse_blend(flags.split())
    assert message in str(refused.value)
