"""ropesearch/report.py: the numbers of the text are those of the scores, and what should be said is said."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropesearch.artifact.config import VerifyLevel
from ropesearch.artifact.verify import Finding
from ropesearch.evaluate.interval import paired_interval
from ropesearch.evaluate.needle import NeedleEvaluation
from ropesearch.evaluate.perplexity import Evaluation
from ropesearch.evaluate.table import perplexity_text
from ropesearch.report import AFTER, BEFORE, EvaluateOutcome, FinetuneOutcome, SearchOutcome, VerifyOutcome
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective, Part
from ropesearch.score.score import Score
from ropesearch.search.front import Point
from ropesearch.search.run import SearchResult
from ropesearch.search.selection import Finalist
from tests import toys
from tests.artifact.examples import FINE_TUNED, REGIME, SHORT, TARGET_LENGTH, rope_config

TOKENS = 100  # of each window


def score(*nats_per_token: float) -> Score:
    """One window for each number."""
    nats = np.array([[each * TOKENS] for each in nats_per_token])
    return Score(nats=nats, tokens=np.full_like(nats, TOKENS, dtype=np.int64), block_edges=np.array([0, TOKENS + 1]))


def row(method: str, length: int, *nats_per_token: float) -> Evaluation:
    each = score(*nats_per_token)
    return Evaluation(
        method=method,
        split="held_out",
        length=length,
        nats=each.total_nats,
        tokens=each.total_tokens,
        block_edges=(0, length),
        block_nats=(each.total_nats,),
        block_tokens=(each.total_tokens,),
        window_nats=tuple(each.window_nats.tolist()),
        window_tokens=tuple(each.window_tokens.tolist()),
    )


YARN = Regime(name="yarn", max_length=TARGET_LENGTH, factors=(1.0,) * 4 + (4.0,) * 4, attention_factor=1.139)
FINALISTS = [
    Finalist(9, "searched", REGIME, score(1.0), score(1.25)),
    Finalist(3, "yarn", YARN, score(1.5), score(1.5)),
    Finalist(8, "searched", REGIME, score(1.1), score(1.75)),
    Finalist(0, "unscaled", YARN, score(16.0), None, "not a number"),
]
SCORES = {"unscaled": score(16.0), "yarn": score(1.5), "searched": score(1.0)}
ROWS = [
    row("unscaled", TARGET_LENGTH, 8.0, 8.5, 8.25),
    row("yarn", TARGET_LENGTH, 2.25, 2.0, 2.125),
    row("searched", TARGET_LENGTH, 1.5, 1.75, 1.625),
    row("unscaled", toys.ORIGINAL_LENGTH, 1.0, 1.0, 1.0),
    row("searched", toys.ORIGINAL_LENGTH, 1.0, 1.5, 1.25),
]
OK = Finding(level=VerifyLevel.digest, ok=True, message="the weights are the bound ones")
NOTE = Finding(level=VerifyLevel.table, ok=True, message="an older loader refuses it", is_note=True)
WRONG = Finding(level=VerifyLevel.table, ok=False, message="factor 3 differs")


def outcome(**changes: Any) -> SearchOutcome:
    result: dict[str, Any] = {
        "regime": REGIME,
        "trial_number": 9,
        "method": "searched",
        "search_scores": SCORES,
        "finalists": FINALISTS,
        "course": [(8, 1.1), (9, 1.0)],
        "num_trials": 12,
        "num_failed": 2,
        "num_forward_equivalent_tokens": 49152,
        "stopped_because": "num_trials",
    }
    values: dict[str, Any] = {
        "run_folder": Path("runs/a"),
        "checkpoint_folder": Path("runs/a/checkpoint"),
        "rope_config": rope_config(),
        "rows": ROWS,
        "failures": [],
        "findings": [OK],
    }
    fields = {field.name for field in dataclasses.fields(SearchResult)}
    of_result = {name: changes.pop(name) for name in list(changes) if name in fields}
    return SearchOutcome(result=SearchResult(**(result | of_result)), **(values | changes))


def table_of(text: str) -> dict[str, list[str]]:
    """Cells by method, of the lines between the title and the first empty line."""
    lines = text.split("\n\n")[0].splitlines()[2:]
    return {line.split()[0]: line.split() for line in lines}


def test_the_table_of_a_search() -> None:
    text = outcome().to_text()
    assert text.startswith(f"perplexity at {TARGET_LENGTH} tokens (3 held-out documents)\n")
    interval = paired_interval(ROWS[1], ROWS[2])
    assert (interval.difference, interval.low, interval.high) == (0.5, 0.25, 0.75)
    assert table_of(text) == {
        "unscaled": [
            "unscaled",
            "8.89e+06",
            "failed",
            f"{math.exp(8.25):.0f}",
            "+6.6250",
            "(+6.5000",
            "to",
            "+6.7500)",
        ],
        "yarn": ["yarn", "4.482", "4.482", f"{math.exp(2.125):.3f}", "+0.5000", "(+0.2500", "to", "+0.7500)"],
        "searched": ["searched", "2.718", f"{math.exp(1.25):.3f}", f"{math.exp(1.625):.3f}"],  # and no interval
    }
    assert "nats per token above searched (95 % interval)" in text.splitlines()[1]


def test_two_documents_are_too_few_for_an_interval() -> None:
    few = [row("yarn", TARGET_LENGTH, 2.25, 2.0), row("searched", TARGET_LENGTH, 1.5, 1.75)]
    shown = table_of(outcome(rows=few + ROWS[3:]).to_text())
    assert shown["yarn"] == ["yarn", "4.482", "4.482", f"{math.exp(2.125):.3f}", "+0.5000"]


def test_a_search_without_a_scored_candidate_says_so() -> None:
    text = outcome(method="yarn", trial_number=3, regime=YARN, course=[], finalists=FINALISTS[1:2]).to_text()
    assert "no candidate was scored to its end, the best baseline is what is left, so rope_config.json" in text


def test_what_racing_saved() -> None:
    assert "racing" not in outcome().to_text()
    text = outcome(num_stopped=5, num_saved_tokens=16384).to_text()
    assert "racing: 5 candidates were stopped before the last window, which saved 25% of the search's tokens" in text


def test_the_rest_of_a_search() -> None:
    text = outcome().to_text()
    assert "chosen: searched (trial 9 of 12, 2 failed), attention factor 1.137, factors 1.00 to 4.81" in text
    price = f"{math.expm1(0.25):+.1%}"
    assert price == "+28.4%"
    assert f"price on short inputs: perplexity at 64 tokens 2.718 unscaled, 3.490 now ({price})" in text
    assert "run         runs/a  (" in text
    assert "checkpoint  runs/a/checkpoint  (as its rope_config.json says; " in text
    assert "ropesearch verify runs/a/checkpoint" in text
    spaced = outcome(checkpoint_folder=Path("my runs/checkpoint")).to_text()
    assert "ropesearch verify 'my runs/checkpoint')" in spaced  # as a shell takes it
    for unsaid in ("no candidate beat", "other loaders", "NOT verified"):
        assert unsaid not in text
    assert outcome().exit_code == 0


def test_a_baseline_that_wins_is_said() -> None:
    rows = [*ROWS, row("yarn", toys.ORIGINAL_LENGTH, 1.0, 1.0)]
    text = outcome(method="yarn", regime=YARN, trial_number=3, rows=rows).to_text()
    assert "chosen: yarn (trial 3 of 12" in text and "attention factor 1.139, factors 1.00 to 4.00" in text
    assert "no candidate beat yarn on the selection windows" in text
    cells = table_of(text)
    assert len(cells["yarn"]) == 4 and cells["searched"][4:] == ["-0.5000", "(-0.7500", "to", "-0.2500)"]
    assert "nats per token above yarn" in text and "2.718 now (+0.0%)" in text


def test_an_unscaled_model_that_wins_has_no_price() -> None:
    unscaled = dataclasses.replace(YARN, name="unscaled")
    text = outcome(method="unscaled", regime=unscaled, trial_number=0).to_text()
    assert "2.718 unscaled, 2.718 now (+0.0%)" in text and "no candidate beat unscaled" in text


@pytest.mark.parametrize("difference", [0.0, -1e-9, -4e-5, 1e-9])
def test_what_is_shown_as_zero_has_one_sign(difference: float) -> None:
    """The price on short inputs, and by how much a method lies above the winner."""
    rows = [
        row("yarn", TARGET_LENGTH, *(value + difference for value in (1.5, 1.75, 2.0))),
        row("searched", TARGET_LENGTH, 1.5, 1.75, 2.0),
        row("unscaled", toys.ORIGINAL_LENGTH, 1.0, 1.0, 1.0),
        row("searched", toys.ORIGINAL_LENGTH, *(1.0 + difference for _ in range(3))),
    ]
    text = outcome(rows=rows).to_text()
    assert "2.718 now (+0.0%)" in text
    assert table_of(text)["yarn"][4:] == ["+0.0000", "(+0.0000", "to", "+0.0000)"]
    text = outcome(rows=[row(each.method, each.length, each.nats / each.tokens) for each in rows]).to_text()
    assert table_of(text)["yarn"][4:] == ["+0.0000"]


def test_a_negative_price_keeps_its_sign() -> None:
    rows = [*ROWS[:4], row("searched", toys.ORIGINAL_LENGTH, 0.9994, 0.9994)]
    assert "2.717 now (-0.1%)" in outcome(rows=rows).to_text()


def test_a_result_that_other_loaders_cannot_express_is_said() -> None:
    config = rope_config(regimes=(dataclasses.replace(REGIME, retained_tokens=4),))
    assert "note: config.json cannot express retained_tokens: other" in outcome(rope_config=config).to_text()
    assert "note: " not in outcome().to_text()


def test_a_folder_that_is_not_what_it_says() -> None:
    failed = outcome(findings=[OK, WRONG])
    text = failed.to_text()
    assert failed.exit_code == 1 and "\nfactor 3 differs\n" in text and "(NOT verified; " in text
    assert OK.message not in text


def test_one_held_out_document_admits_no_interval() -> None:
    rows = [row(each.method, each.length, each.nats / each.tokens) for each in ROWS]
    text = outcome(rows=rows).to_text()
    assert "(1 held-out documents)" not in text and "(1 held-out document)" in text
    assert table_of(text)["yarn"][4:] == ["+0.5000"]


@pytest.mark.parametrize(
    "each",
    [
        outcome(),
        EvaluateOutcome(run_folder=Path("runs/b"), rows=ROWS, failures=["yarn at 256 tokens: out of memory"]),
        VerifyOutcome(folder=Path("c"), findings=[OK, WRONG, NOTE]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_json_is_strict_and_holds_all(each: Any) -> None:
    value = json.loads(json.dumps(each.to_json(), allow_nan=False))
    if isinstance(each, SearchOutcome):
        assert value == {
            "run": "runs/a",
            "checkpoint": "runs/a/checkpoint",
            "rope_config": rope_config().to_json(),
            "scoring_seconds": 0.0,
            "failures": [],
        }
    elif isinstance(each, EvaluateOutcome):
        assert value["run"] == "runs/b" and value["failures"] == ["yarn at 256 tokens: out of memory"]
        assert [(one["method"], one["length"], one["nats"], one["tokens"]) for one in value["evaluation"]] == [
            (one.method, one.length, one.nats, one.tokens) for one in ROWS
        ]
    else:
        assert value == {
            "folder": "c",
            "verified": False,
            "findings": [
                {"level": "digest", "ok": True, "note": False, "message": OK.message},
                {"level": "table", "ok": False, "note": False, "message": WRONG.message},
                {"level": "table", "ok": True, "note": True, "message": NOTE.message},
            ],
        }


GUARDED = Objective(
    parts=(Part(length=TOKENS + 1, weight=1.0),), guarded_tokens=TOKENS + 1, tolerance_nats=math.log(1.05)
)


def test_lengths_and_guard_are_told() -> None:
    """One window of 100 tokens, all scored at either length: the columns hold the objective, the text the guard."""
    finalists = [dataclasses.replace(FINALISTS[0], excess_nats=-0.0125), *FINALISTS[1:]]
    text = outcome(objective=GUARDED, num_candidates_in_guard=1, finalists=finalists).to_text()
    assert "objective: nats per token, weighted 1 at 101 tokens; guard: perplexity on the first 101 tokens" in text
    assert "tokens at most 5 % above the unscaled model's (columns search and selection: its exponential)" in text
    increase = f"{math.exp(math.log(1.05) - 0.0125) - 1:+.2%}"
    assert increase == "+3.70%"
    assert (
        "guard: 1 of 2 scored candidates keeps it on the search windows; on the selection windows searched, at +3.70%, "
        "keeps it (by 0.0125 nats per token)\n" in text
    )
    assert "guard" not in outcome().to_text() and "objective:" not in outcome().to_text()


@pytest.mark.parametrize("num_members", [1, 5, 6, 7, 40])
def test_the_front_is_shown_by_few_of_its_members(num_members: int) -> None:
    """The two ends are always there, and not more than six."""
    members = [Point(n, "searched", REGIME, 1.0 + n / 100, 3.0 - n / 100, None, True) for n in range(num_members)]
    points = [*members, Point(99, "yarn", YARN, 5.0, 5.0, None, False)]
    lines = outcome(points=points).to_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("front of both objectives: "))
    assert f"{num_members} of {num_members + 1} scored trials on the search windows (front.json" in lines[start]
    assert lines[start + 1].split() == ["trial", "method", "long", "short"]
    rows = [line.split() for line in lines[start + 2 : start + 2 + min(6, num_members)]]
    shown = [members[int(row[0])] for row in rows]
    for row, point in zip(rows, shown, strict=True):
        both = point.long_nats_per_token, point.short_nats_per_token
        assert row[1:] == ["searched", *(perplexity_text(nats, 1) for nats in both)]
    assert shown[0] == members[0] and shown[-1] == members[-1]
    assert [point.trial_number for point in shown] == sorted({point.trial_number for point in shown})
    assert ("some of them" in lines[start]) is (num_members > 6)
    assert "front" not in outcome().to_text()


def test_answers_to_needles_have_a_table_of_their_own() -> None:
    rows = [
        NeedleEvaluation(
            method=method, split="held_out", length=TARGET_LENGTH, nats=nats, tokens=4, num_right=right,
            window_nats=(nats, 0.0), window_tokens=(3, 1), window_right=(right > 0, right > 1),
        )
        for method, nats, right in (("unscaled", 40.0, 0), ("searched", 2.0, 1))
    ]  # fmt: skip
    scores = {name: dataclasses.replace(SCORES[name], answered=(True,)) for name in SCORES}
    finalists = [
        dataclasses.replace(
            each, selection_score=each.selection_score and dataclasses.replace(each.selection_score, answered=(True,))
        )
        for each in FINALISTS
    ]
    text = outcome(needle_rows=rows, objective=Objective(needle_weight=1.0), search_scores=scores, finalists=finalists)
    lines = text.to_text().splitlines()
    start = lines.index(f"answers to 2 held-out needles at {TARGET_LENGTH} tokens")
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["method", "perplexity", "right"],
        ["unscaled", perplexity_text(40.0, 4), "0"],
        ["searched", perplexity_text(2.0, 4), "1"],
    ]
    assert "objective: nats per token of the needles' answers (columns search and selection: its exponential)" in lines
    assert "needles" not in outcome().to_text()


@pytest.mark.parametrize(
    ("num_kept", "winner", "excess", "guard", "won"),
    [
        (0, "searched", 0.25, "none of 2 scored candidates keep it", "BREAKS it, the least of all finalists"),
        (0, "searched", -0.25, "none of 2 scored candidates keep it", "keeps it"),  # on other windows
        (2, "searched", 0.0, "all 2 scored candidates keep it", "keeps it"),
        (2, "searched", 0.25, "all 2 scored candidates keep it", "BREAKS it, the least of all finalists"),
        (0, "yarn", -0.25, "none of 2 scored candidates keep it", "keeps it"),
        (2, "yarn", -0.25, "all 2 scored candidates keep it", "keeps it"),
        (0, "yarn", 0.25, "none of 2 scored candidates keep it", "BREAKS it, the least of all finalists"),
    ],
)
def test_the_guards_outcome_is_told_without_contradiction(
    num_kept: int, winner: str, excess: float, guard: str, won: str
) -> None:
    """Which candidates keep it, whether the result does, and, for a baseline, what no candidate did better."""
    first = FINALISTS[0] if winner == "searched" else FINALISTS[1]
    finalists = [dataclasses.replace(first, excess_nats=excess), *(each for each in FINALISTS if each is not first)]
    text = outcome(objective=GUARDED, num_candidates_in_guard=num_kept, finalists=finalists, method=winner).to_text()
    assert f"guard: {guard} on the search windows; on the selection windows {winner}, at " in text
    assert f"%, {won} (by {abs(excess):.4f} nats per token)" in text
    beaten = [line for line in text.splitlines() if line.startswith("no candidate ")]
    if winner == "searched":
        assert beaten == []
    else:
        better = "that keeps the guard beat" if excess <= 0 else "comes nearer to keeping the guard than"
        expected = f"no candidate {better} yarn on the selection windows, so rope_config.json holds that"
        assert beaten == [expected]


def test_a_guard_without_a_scored_candidate() -> None:
    finalists = [dataclasses.replace(FINALISTS[1], excess_nats=-0.25), FINALISTS[3]]
    text = outcome(
        objective=GUARDED, num_candidates_in_guard=0, finalists=finalists, method="yarn", course=[]
    ).to_text()
    assert "guard: no candidate was scored on the search windows; on the selection windows yarn, at " in text


def test_text_of_an_evaluation() -> None:
    text = EvaluateOutcome(run_folder=Path("b"), rows=ROWS[3:], failures=["yarn at 64 tokens: out of memory"]).to_text()
    assert text.splitlines()[-3:] == ["not scored: yarn at 64 tokens: out of memory", "", "run  b  (evaluation.json)"]
    assert "3.490" in text and "held_out, 3 documents" in text
    assert "of the last" not in text
    last = EvaluateOutcome(run_folder=Path("b"), rows=ROWS[3:], failures=[], last_tokens=32).to_text()
    assert last.startswith("perplexity by length in tokens, of the last 32 of each window (held_out, 3 documents)\n")
    nothing = EvaluateOutcome(run_folder=Path("b"), rows=[], failures=["a", "b"]).to_text()
    assert nothing.splitlines()[:3] == ["no method could be scored", "not scored: a", "not scored: b"]


def test_text_of_a_verification() -> None:
    failed = VerifyOutcome(folder=Path("c"), findings=[OK, WRONG])
    assert failed.exit_code == 1
    assert failed.to_text().splitlines() == [
        "ok    digest  the weights are the bound ones",
        "FAIL  table   factor 3 differs",
        "NOT verified",
    ]
    fine = VerifyOutcome(folder=Path("c"), findings=[OK, NOTE])
    assert fine.exit_code == 0
    assert fine.to_text().splitlines()[1:] == ["note  table   an older loader refuses it", "verified"]


def test_it_says_that_only_the_last_tokens_were_scored() -> None:
    search = {**outcome().rope_config.search, "objective": {"name": "perplexity", "last_tokens": 32}}
    text = dataclasses.replace(outcome(), rope_config=rope_config(search=search)).to_text()
    assert "tokens, of the last 32 of each window (" in text


def finetuned(before: list[list[float]], after: list[list[float]], **changes: Any) -> FinetuneOutcome:
    """A fine-tuning by nats per token of each document: short ones, then long ones."""
    rows = [
        row(method, length, *nats).to_json()
        for method, both in ((BEFORE, before), (AFTER, after))
        for length, nats in zip((toys.ORIGINAL_LENGTH, TARGET_LENGTH), both, strict=True)
    ]
    result = rope_config(**{**FINE_TUNED, "evaluation": rows, **changes})
    return FinetuneOutcome(
        run_folder=Path("runs/a"), checkpoint_folder=Path("runs/a/checkpoint"), rope_config=result, findings=[OK]
    )


def test_the_table_of_a_fine_tuning() -> None:
    outcome = finetuned([[1.0, 1.2, 1.4], [2.0, 2.5, 3.0]], [[1.1, 1.3, 1.5], [1.9, 2.4, 2.9]])
    lines = outcome.to_text().splitlines()
    assert lines[0] == "perplexity (3 held-out documents)"
    up, down = math.expm1(0.1), math.expm1(-0.1)
    assert lines[2].split()[-4:] == [f"{up:+.1%}", f"({up:+.1%}", "to", f"{up:+.1%})"]
    assert lines[3].split() == [
        str(TARGET_LENGTH), "long", perplexity_text(2.5, 1), perplexity_text(2.4, 1), f"{down:+.1%}", f"({down:+.1%}",
        "to", f"{down:+.1%})",
    ]  # fmt: skip
    assert lines[4] == (
        "before: the base's weights under the same two tables; the base's own folder serves up to 64 tokens with the "
        "long one too"
    )
    again = dataclasses.replace(outcome.rope_config, training={"base": {"num_regimes": 2}, **FINE_TUNED["training"]})
    text = dataclasses.replace(outcome, rope_config=again).to_text()
    assert "before: the base's weights under the same two tables\n" in text
    assert "note: worse than before at 64 tokens" in outcome.to_text()
    assert "note: worse than before at 256 tokens" not in outcome.to_text()


def test_worse_is_said_only_where_the_interval_says_so() -> None:
    before, after = [1.0, 1.0, 1.0, 1.0], [1.02, 0.99, 1.01, 0.99]
    interval = paired_interval(row("b", 64, *after), row("a", 64, *before))
    assert interval.low < 0 < interval.difference
    assert "worse" not in finetuned([before, before], [after, before]).to_text()


@pytest.mark.parametrize("num_documents", [1, 2])
def test_few_documents_have_no_interval(num_documents: int) -> None:
    before, after = [[1.0] * num_documents] * 2, [[1.5] * num_documents] * 2
    outcome = finetuned(before, after)
    assert outcome.to_text().splitlines()[2].split()[-1] == f"{math.expm1(0.5):+.1%}"
    assert "note: worse than before at 64 tokens" in outcome.to_text()


@pytest.mark.parametrize(
    ("nats", "shown", "change"),
    [(80.0, "5.54e+34", "+2.04e+36%"), (800.0, "inf", "+inf%"), (8.0, "2981", "+1.10e+05%")],
)
def test_ruined_weights_are_reported_in_few_digits(nats: float, shown: str, change: str) -> None:
    line = finetuned([[1.0], [1.0]], [[nats], [1.0]]).to_text().splitlines()[2]
    assert line.split()[-2:] == [shown, change]


def test_of_one_table_for_both_regimes_no_crossing_is_said() -> None:
    """Nothing can go wrong where the tables are the same."""
    unscaled = dataclasses.replace(SHORT, name="unscaled", max_length=TARGET_LENGTH)
    same = finetuned([[1.0], [1.0]], [[1.0], [1.0]], regimes=(SHORT, unscaled)).to_text()
    assert "grows across" not in same and "single_table" not in same and "before:" not in same
    assert "note: vLLM serves 64 tokens by default, and more with --max-model-len" in same
    other = finetuned([[1.0], [1.0]], [[1.0], [1.0]]).to_text()
    assert "a sequence that grows across 64 tokens" in other and "single_table=true" in other
