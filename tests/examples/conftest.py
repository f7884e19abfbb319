"""Fixtures of the tests of scripts."""

from pathlib import Path

import pytest
from programs import CheckRefused, start


@pytest.fixture
def check_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CheckRefused:
    """Checks that a script with these settings ends with a message and starts and writes nothing;
    ``@data@`` in a setting is the prefix of encoded data."""

    def check(size: str, message: str, settings: dict[str, str]) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("data.bin", "data.idx"):
            Path(name).write_text("tokens")
        given = {k: v.replace("@data@", str(tmp_path / "data")) for k, v in settings.items()}
        monkeypatch.setattr("launch_job.supervise", lambda *_: pytest.fail("it was started"))
        assert start(size, **given) == 2
        out, errors = capsys.readouterr()
        assert out == "" and errors.startswith("error: ") and message in errors, errors
        assert len(list(tmp_path.iterdir())) == 2

    return check
