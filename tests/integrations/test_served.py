"""``python -m ds_usp.integrations.transformers`` against what the sweep has found."""

import re
from pathlib import Path

import pytest
import transformers
from harness import RankContext
from tiny_models import NOT_BUILT, config, model_types

from ds_usp.integrations.transformers.__main__ import judge, main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "transformers-models.md"
TYPES = [name for name in model_types() if name not in NOT_BUILT]


def verdicts(ctx: RankContext) -> dict[str, tuple[bool, bool]]:
    """Of each tiny model: is it refused, and was that decided without a forward pass."""
    decided = {}
    for model_type in TYPES:
        tiny = config(model_type)
        tiny.architectures = [model_types()[model_type]]
        _, reasons, doubt = judge(tiny)
        decided[model_type] = bool(reasons), bool(doubt)
    return decided


def test_the_command_refuses_what_the_sweep_finds_refused(pool):
    page = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}:" not in page:
        pytest.skip("the page is of another transformers")
    refused = set(re.findall(r"`([\w-]+)`", page.split("## Refused")[1].split("\n## ")[0]))
    (decided,) = pool.run(verdicts, 1)
    wrong = [
        name
        for name, (no, undecided) in decided.items()
        if not undecided and no != (name in refused)
    ]
    assert not wrong
    assert sum(undecided for _, undecided in decided.values()) <= 12


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("llama", 0, r"LlamaForCausalLM \(transformers \d\S+\): served\n$"),
        ("modernbert", 0, r"ModernBertForMaskedLM .*: served\n$"),
        ("roberta", 0, r"served, where position_ids are given"),
        ("bart", 0, r"BartForCausalLM .*: served\n  BartForCausalLM .* computes its loss"),
        ("zaya", 1, r"ZayaForCausalLM .*: refused\n  its layers \(hybrid\)"),
        ("doge", 1, r"refused\n  the model computes with its attention mask"),
        ("t5", 1, r"refused\n  encoder-decoder"),
        ("qwen2_5_vl", 0, r"^Qwen2_5_VLForConditionalGeneration .*: served\n"),
    ],
)
def test_the_command_says_what_is_served(name, code, text, capsys):
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has it not")
    assert main([name]) == code
    printed = capsys.readouterr().out
    assert re.search(text, printed), printed


def test_a_folder_is_read(tmp_path, capsys):
    config("gemma3_text").save_pretrained(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().out.count("Gemma3ForCausalLM") == 2


def test_a_name_of_nothing_ends_with_code_2(capsys):
    assert main(["no-such-model"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: no-such-model: ")
    assert "Traceback" not in printed.err
