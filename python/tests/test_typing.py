"""The package's types, as mypy --strict sees them in a program of a user's."""

import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent


@pytest.mark.parametrize("program", ["typed_devices.py", "../examples/matmul.py"])
def test_a_program_passes_strict_checks(program, tmp_path):
    api = pytest.importorskip("mypy.api")
    out, err, status = api.run(["--strict", f"--cache-dir={tmp_path}", str(FOLDER / program)])
    assert status == 0, out + err
