"""An import of a name that left says what to write instead."""

import pytest

import ds_usp
from ds_usp.removed_names import INSTEAD


@pytest.mark.parametrize("name", INSTEAD)
def test_an_import_says_what_to_write_instead(name):
    package, _, last = name.rpartition(".")
    for statement in (f"import {name}", f"from {package} import {last}"):
        with pytest.raises(ImportError) as raised:
            exec(statement)
        assert INSTEAD[name] in str(raised.value)


def test_other_names_are_not_answered():
    with pytest.raises(ImportError, match="cannot import name"):
        exec("from ds_usp.training import nothing")
    assert not hasattr(ds_usp, "nothing")
