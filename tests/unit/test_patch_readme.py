"""The README of the patches shows what is applied."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megatron_patches

README = Path(megatron_patches.__file__).with_name("README.md")
BLOCK = r"(<!-- table {host} -->\n)(.*?)(<!-- end -->)"


@pytest.mark.parametrize("host", megatron_patches.frameworks())
def test_the_table_is_what_is_applied(host: str, request: pytest.FixtureRequest) -> None:
    text = README.read_text(encoding="utf-8")
    block = re.compile(BLOCK.format(host=host), re.DOTALL)
    match = block.search(text)
    assert match, f"{README.name} has no place for the table of {host}"
    table = f"{megatron_patches.table(host)}\n"
    if request.config.getoption("--write-support-table"):
        README.write_text(block.sub(lambda m: m[1] + table + m[3], text), encoding="utf-8")
        return
    assert match[2] == table, "run: pytest tests/unit/test_patch_readme.py --write-support-table"
