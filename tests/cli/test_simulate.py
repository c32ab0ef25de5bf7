# SPDX-License-Identifier: Apache-2.0
"""``kvpass simulate`` on recorded traces, and ``generate --record-trace`` that makes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpass.cli import main

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
POLICIES = ["LRU", "LFU", "ARC", "LRU-2", "kvpass", "Belady", "Belady + windows"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out = capsys.readouterr()
    return int(exit_.value.code or 0), out.out, out.err


def test_simulate_prints_a_table_and_the_same_as_json(capsys):
    law = str(TRACES / "law.npz")
    code, out, _ = run(capsys, "simulate", law, "--hot", "40%")
    assert code == 0
    assert "law.npz" in out
    code, text, _ = run(capsys, "simulate", law, "--hot", "40%", "--json")
    assert code == 0
    ((result,),) = [one["sizes"] for one in json.loads(text)]
    assert [row["policy"] for row in result["rows"]] == POLICIES
    for row in result["rows"]:
        assert f"{row['hit_ratio']:.2%}" in out


def test_simulate_follows_the_options_of_the_policy(capsys, monkeypatch):
    arguments = ("simulate", str(TRACES / "law.npz"), "--hot", "25%", "--json")

    def moves() -> int:
        code, text, _ = run(capsys, *arguments)
        assert code == 0
        (row,) = [r for r in json.loads(text)[0]["sizes"][0]["rows"] if r["policy"] == "kvpass"]
        return row["moves"]

    default = moves()
    monkeypatch.setenv("KVPASS_MIN_FREQUENCY", "100000")
    assert moves() == 0 < default


def test_the_committed_table_is_what_the_traces_give(capsys):
    """Whoever changes the policy runs the table again."""
    (path,) = RESULTS.glob("policy-*.json")
    code, text, _ = run(
        capsys, "simulate", *(str(TRACES / f"{n}.npz") for n in ("law", "code", "story")), "--json"
    )
    assert code == 0
    assert json.loads(text) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["simulate", "nowhere.npz"], 2, "nowhere.npz"),
        (["simulate", str(TRACES / "README.md")], 1, "no trace"),
        (["simulate", str(TRACES / "law.npz"), "--hot", "1KiB"], 2, "--hot '1KiB'"),
        (["simulate", str(TRACES / "law.npz"), "--hot", "false"], 2, "--hot 'false'"),
        (["simulate", str(TRACES / "law.npz"), "--hot", "200%"], 2, "200%"),
        (["generate", "--model", "smollm2-135m", "--prompt", "a", "--record-trace", "no/t.npz"],
         2, "does not exist"),
        (["generate", "--model", "smollm2-135m", "--prompt", "a", "--record-trace", "."],
         2, "is a folder"),
        (["generate", "--model", "smollm2-135m", "--prompt", "a", "--trace-interval", "2"],
         2, "--record-trace"),
        (["generate", "--model", "smollm2-135m", "--prompt", "a", "--max-new-tokens", "1",
          "--record-trace", "t.npz"], 2, "at least 2"),
    ],
)  # fmt: skip
def test_mistakes_give_one_clear_line(capsys, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    got, _, err = run(capsys, *arguments)
    assert got == code
    assert message in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


@pytest.mark.checkpoint
def test_generate_records_a_trace_that_simulate_reads(capsys, tmp_path):
    path = tmp_path / "t.npz"
    code, _, err = run(
        capsys, "generate", "--model", "smollm2-135m", "--prompt", "One two three four five",
        "--max-new-tokens", "9", "--hot", "64MiB", "--inner", "eager",
        "--record-trace", str(path), "--trace-interval", "2",
    )  # fmt: skip
    assert code == 0, err
    code, text, err = run(capsys, "simulate", str(path), "--hot", "50%", "--json")
    assert code == 0, err
    (result,) = json.loads(text)
    assert result["model"] == "smollm2-135m"
    assert result["tokens"] - result["prompt_tokens"] == 8
    assert result["sizes"][0]["blocks"] == 30
    assert result["sizes"][0]["requests"] > 0
