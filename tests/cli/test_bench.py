"""``siamesenorm bench`` as a user runs it."""

from __future__ import annotations

import json

import pytest

from siamesenorm.cli import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err


def test_table_json_and_chart(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    small = ("1x64", "--tokens", "16", "--rounds", "1", "--modes", "fused")
    code, out, err = run(capsys, *small, "--out", str(tmp_path / "made"))
    assert (code, err) == (0, "")
    assert "1x64: llama, 2 sublayers × 64, 16 tokens, float32" in out
    # Nothing is cut short on a terminal of 80 columns.
    for header in ("ms tokens/s to pre to plain to host", "kept MiB to pre peak MiB streams floor time at floor"):
        assert any(" ".join(line.split()) == header for line in out.splitlines())
    assert "…" not in out
    facts = json.loads((tmp_path / "made/bench.json").read_text())
    assert [row["scheme"] for row in facts["cases"]] == ["pre", "siamese"]
    assert (tmp_path / "made/bench.png").stat().st_size > 5000
    assert (tmp_path / "made/bench.svg").read_text().startswith("<?xml")
    code, out, err = run(capsys, *small, "--json")
    assert json.loads(out)["cases"][1]["kept_to_baseline"] > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lm-tny",), "did you mean 'lm-tiny'"),
        (("1x65",), "a width that is a multiple of 64"),
        (("1x64", "--modes", "quick"), "unknown mode 'quick'"),
        (("1x64", "--modes", ","), "give --modes at least one"),
        (("1x64", "--modes", "triton"), "needs a GPU and Triton"),
        (("1x64", "--schemes", "siamese:y=1"), "scheme 'siamese' has no option 'y'"),
    ],
)
def test_bad_input(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
