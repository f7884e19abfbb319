"""The trainer's data: every token once an epoch, the same samples for any number of replicas, and
files that are not whole."""

import sys
from itertools import islice
from pathlib import Path

import numpy
import pytest
import torch
import trainer_data

from ds_usp import DataError
from ds_usp.training import DataParallelRanks

TRAINER = Path(__file__).resolve().parents[2] / "examples_deepspeed" / "sequence_parallel"
sys.path.insert(0, str(TRAINER))

from usp_trainer.arguments import parse, validated  # noqa: E402
from usp_trainer.data import MicroBatches, Samples, Tokens, read_tokens, split_samples  # noqa: E402


def counted(tokens: int, vocab: int = 1000) -> Tokens:
    return Tokens("data", numpy.arange(tokens, dtype=numpy.uint16), vocab)


@pytest.mark.parametrize("dtype", [numpy.uint8, numpy.uint16, numpy.int32])
def test_megatrons_encoded_data_are_read_as_they_were_written(dtype, tmp_path):
    documents = [[1, 2, 99], [99], [3, 4, 5, 6, 99]]
    prefix = trainer_data.write_pair(tmp_path / "data", documents, dtype)
    tokens = read_tokens(str(prefix), 100)
    assert (
        tokens.ids.tolist() == [id for text in documents for id in text]
        and tokens.vocab_size == 100
    )


def test_a_text_is_its_bytes_and_an_end(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Grüße")
    assert read_tokens(str(text), None).ids.tolist() == [*"Grüße".encode(), 256]
    assert len(read_tokens(None, None).ids) > 200_000


def test_an_epoch_predicts_every_token_once_in_the_order_of_the_seed():
    tokens, batches = counted(81), []
    for seed in (1, 1, 2):
        samples = Samples(tokens, 8, (0.0, 1.0), seed=seed)
        assert samples.num_samples == 10
        batches.append([samples.batch(index, 1) for index in range(20)])
    for epoch in (batches[0][:10], batches[0][10:]):
        labels = torch.cat([batch["shift_labels"][0] for batch in epoch])
        assert sorted(labels.tolist()) == list(range(1, 81))
        for batch in epoch:
            assert torch.equal(batch["input_ids"] + 1, batch["shift_labels"])
    one, same, other = (
        [int(batch["input_ids"][0, 0]) for batch in batches_of_seed] for batches_of_seed in batches
    )
    assert one == same != other and one[:10] != one[10:]


def test_replicas_read_the_samples_of_one():
    samples = Samples(counted(400), 8, (0.0, 1.0), seed=3)
    one = [*islice(MicroBatches(samples, 12, DataParallelRanks(0, 1, (0,)), first=5), 3)]
    two = [
        [*islice(MicroBatches(samples, 2, DataParallelRanks(r, 2, (0, 1)), first=5), 9)]
        for r in (0, 1)
    ]
    taken = [batch["input_ids"] for pair in zip(*two, strict=True) for batch in pair]
    assert torch.equal(torch.cat(taken), torch.cat([batch["input_ids"] for batch in one]))
    assert len(list(MicroBatches(samples, 2, DataParallelRanks(0, 1, (0,)), num=4))) == 4


def test_the_split_shares_no_label_and_needs_a_sequence():
    args = validated(parse(["--seq-length", "8", "--split", "3,1,0", "--eval-interval", "1"]), 1)
    training, validation = split_samples(counted(404), args)
    assert (training.num_samples, validation.num_samples) == (37, 12)
    labels = [s.batch(0, s.num_samples)["shift_labels"].flatten() for s in (training, validation)]
    assert labels[0].max() < labels[1].min() and labels[1][0] == 304  # in the order of the file
    with pytest.raises(DataError, match="10 tokens, of which --split gives 8"):
        split_samples(counted(10), args)


def test_ends_of_documents():
    tokens = Tokens("data", numpy.array([1, 9, 2, 3, 9, 4, 5, 6, 7]), 10)
    plain = Samples(tokens, 4, (0.0, 1.0)).batch(0, 2)
    assert sorted(plain) == ["input_ids", "shift_labels"]
    masked = Samples(tokens, 4, (0.0, 1.0), mask_ends=True, documents=True).batch(0, 2)
    assert masked["shift_labels"].tolist() == [[9, -100, 3, 9], [-100, 5, 6, 7]]
    assert masked["cu_seqlens"] == [[0, 2, 4], [0, 1, 4]]


def test_a_token_beyond_the_vocabulary_is_refused():
    samples = Samples(counted(81, vocab=80), 8, (0.0, 1.0))
    samples.batch(0, 9)
    with pytest.raises(DataError, match="from 72 to 80, and --vocab-size is 80"):
        samples.batch(9, 1)


def test_a_pair_that_is_not_whole_is_refused(tmp_path):
    """Cut off, of another index, or with a place that is not its sequence's."""
    prefix = trainer_data.write_pair(tmp_path / "data", [[1, 2, 3], [4, 5], [6]])
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    whole = {path: path.read_bytes() for path in (index, tokens)}
    header, place = 34, 34 + 12 + 8  # bytes before the lengths; of the second sequence's place
    damages = {
        "version 1": (index, b"X" + whole[index][1:]),
        "has 20 bytes": (index, whole[index][:20]),
        "bytes, and needs": (index, whole[index][:-1]),
        "its index is of 12": (tokens, whole[tokens][:-2]),
        "the one before it ends": (index, whole[index][:place] + b"\2" + whole[index][place + 1 :]),
        "its index is of 14": (index, whole[index][:header] + b"\4" + whole[index][header + 1 :]),
    }
    for text, (path, damaged) in damages.items():
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=text):
            read_tokens(str(prefix), 10)
        path.write_bytes(whole[path])
    assert read_tokens(str(prefix), 10).ids.tolist() == [1, 2, 3, 4, 5, 6]
