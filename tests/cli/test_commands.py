# SPDX-License-Identifier: Apache-2.0
"""demo, generate and explain on the real checkpoint; mistakes give one clear line."""

from __future__ import annotations

import json

import pytest

from kvpass.cli import main, running


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out = capsys.readouterr()
    return int(exit_.value.code or 0), out.out, out.err


@pytest.mark.checkpoint
def test_demo_shows_identical_tokens_and_moves(capsys):
    code, out, _ = run(
        capsys, "demo", "--tokens", "1100", "--max-new-tokens", "40", "--inner", "eager",
        "--share", "0.4",
    )  # fmt: skip
    assert code == 0, out
    assert "tokens identical: yes" in out
    assert "moved cold to hot" in out


@pytest.mark.checkpoint
def test_explain_says_what_is_rewritten(capsys):
    code, out, _ = run(
        capsys, "explain", "--model", "smollm2-135m", "--verify", "4", "--inner", "eager"
    )
    assert code == 0
    assert out.count("30 of 30 attention sites rewritten") == 1
    assert out.count("equal to the uncompiled model") == 1
    assert "NOT" not in out


@pytest.mark.checkpoint
def test_explain_of_transformers_counts_both_caches(capsys):
    code, out, _ = run(
        capsys, "explain", "--model", "smollm2-135m", "--via", "transformers", "--json",
        "--inner", "eager",
    )  # fmt: skip
    assert code == 0
    results = json.loads(out)
    assert [(result["sites"], result["rewritten"]) for result in results] == [(30, 30)] * 2


@pytest.mark.checkpoint
def test_generate_prints_text_and_verifies(capsys):
    code, out, err = run(
        capsys, "generate", "--model", "smollm2-135m", "--prompt", "The capital of France is",
        "--max-new-tokens", "5", "--hot", "1MiB", "--inner", "eager", "--verify",
    )  # fmt: skip
    assert code == 0
    assert "Paris" in out
    assert "tokens identical: yes" in err


@pytest.mark.checkpoint
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--model", "smollm2-135m"], "one of --prompt and --prompt-file"),
        (
            ["generate", "--model", "smollm2-135m", "--prompt", "a", "--prompt-file", "b"],
            "one of --prompt and --prompt-file",
        ),
        (["generate", "--model", "smollm2-135m", "--prompt", ""], "no tokens"),
        (["generate", "--model", "smollm2-135m", "--prompt", "a", "--hot", "abc"], "--hot = 'abc'"),
        (["generate", "--model", "smollm2-135m", "--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["generate", "--model", "no-such-model", "--prompt", "a"], "--model 'no-such-model'"),
        (["explain", "--model", "no-such-model"], "--model 'no-such-model'"),
        (["explain", "--model", "smollm2-135m", "--inner", "indictor"], "--inner = 'indictor'"),
        (["demo", "--inner", "indictor"], "--inner = 'indictor'"),
        (["demo", "--tokens", "100000"], "100000"),
    ],
)
def test_mistakes_give_one_line(capsys, arguments, words):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert err.startswith("error:")


@pytest.mark.checkpoint
def test_the_environment_is_the_default_of_flags(capsys, monkeypatch):
    monkeypatch.setenv("KVPASS_HOT", "1KiB")
    monkeypatch.setenv("KVPASS_INNER", "eager")
    arguments = ["generate", "--model", "smollm2-135m", "--prompt", "One two three",
                 "--max-new-tokens", "3"]  # fmt: skip
    code, _, err = run(capsys, *arguments)
    assert code == 0
    assert "100% of the KV cache outside the hot tier" in err.replace("\n", " ")
    monkeypatch.setenv("KVPASS_HOT", "false")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("error: KVPASS_HOT = 'false'")


def test_a_folder_that_holds_no_checkpoint_is_a_failure(capsys, tmp_path):
    code, _, err = run(capsys, "generate", "--model", str(tmp_path), "--prompt", "a")
    assert code == 1
    assert err.startswith("error:")
    assert "config.json" in err


@pytest.mark.checkpoint
def test_tokens_that_differ_are_a_failure(capsys, monkeypatch):
    right, calls = running.decode, []

    def wrong_in_turn(*args, **kwargs):
        result = right(*args, **kwargs)
        calls.append(result)
        if len(calls) == 1:
            result.tokens[-1] += 1
        return result

    monkeypatch.setattr(running, "decode", wrong_in_turn)
    code, _, err = run(
        capsys, "generate", "--model", "smollm2-135m", "--prompt", "One two", "--max-new-tokens",
        "2", "--inner", "eager", "--verify",
    )  # fmt: skip
    assert (code, len(calls)) == (1, 1)
    assert "tokens identical: no" in err


@pytest.mark.checkpoint
def test_generate_samples_with_a_seed_and_stops_before_a_string(capsys):
    base = ["generate", "--model", "smollm2-135m", "--prompt", "One two three four five six",
            "--inner", "eager", "--max-new-tokens", "12"]  # fmt: skip
    sampled = [*base, "--temperature", "1.5", "--top-k", "50", "--top-p", "0.95"]
    texts = [run(capsys, *sampled, "--seed", seed) for seed in ("1", "1", "2")]
    assert [code for code, *_ in texts] == [0, 0, 0]
    assert texts[0][1] == texts[1][1] != texts[2][1]
    _, greedy, _ = run(capsys, *base)
    word = greedy.split()[3]
    code, cut, err = run(capsys, *base, "--stop", word, "--stop", "never said")
    assert (code, cut.rstrip()) == (0, greedy[: greedy.index(word)].rstrip())
    assert len(greedy.split()) > len(cut.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "error: --temperature = -1.0: give 0 or a number from"),
        (["--top-k", "0"], "error: --top-k = 0: give an integer from 1, or None"),
        (
            ["--temperature", "1e-40"],
            "error: --temperature = 1e-40: give 0 or a number from 0.0001",
        ),
        (["--prompt", "a\udcff"], "error: --prompt is no UTF-8 text"),
        (["--top-p", "1.5"], "error: --top-p = 1.5"),
        (["--repetition-penalty", "0"], "error: --repetition-penalty = 0.0"),
        (["--stop", ""], "error: --stop ''"),
        (["--temperature", "1", "--verify"], "error: --verify compares greedy tokens"),
        (["--stop", "x", "--verify"], "error: --verify knows neither --stop"),
    ],
)
def test_sampling_flags_that_do_not_fit(capsys, arguments, words):
    code, _, err = run(capsys, "generate", "--model", "smollm2-135m", "--prompt", "One", *arguments)
    assert code == 2 and err.startswith(words)


def test_a_seed_is_a_number_of_64_bits(capsys):
    for seed in ("-1", "9" * 23):
        code, _, err = run(
            capsys, "generate", "--model", "smollm2-135m", "--prompt", "One", "--seed", seed
        )
        assert code == 2 and "Invalid value for '--seed'" in err


def test_a_negative_number_of_tokens_to_verify_is_refused(capsys):
    code, _, err = run(capsys, "explain", "--model", "smollm2-135m", "--verify", "-3")
    assert code == 2
    assert "greater than or equal to 0" in err or "-3" in err
